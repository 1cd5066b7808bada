"""The ops of a batch norm over ranks, which torch has for GPUs only: SyncBatchNorm is made of them.

Sums over all dims but that of the channels, the second; invstd is 1 / sqrt(variance + eps).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fcoll.proving.algebra import Algebra
from fcoll.proving.elementwise_rules import rule
from fcoll.proving.tensor_rules import RULES

WRITES = frozenset(("batch_norm_gather_stats_with_counts",))  # running statistics


def _others(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _by_channel(x: Tensor, like: Tensor) -> Tensor:
    return x.view(-1, *[1] * (like.dim() - 2))


@rule("batch_norm_stats")
def _stats(a: Algebra, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = RULES["var_mean"](a, x, _others(x), correction=0)
    return mean, a.inverse_root(a.add(variance, a.number(eps)))


@rule("batch_norm_gather_stats_with_counts")
def _gathered(
    a: Algebra,
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Of ranks that each have a mean, an invstd and a count."""
    counts = counts.unsqueeze(1)
    n = a.total(counts, [])
    mean = a.div(a.total(a.mul(means, counts), [0]), n)
    variances = a.sub(a.square(a.inverse(invstds)), a.number(eps))
    spread = a.add(variances, a.square(a.sub(means, mean)))
    squares = a.total(a.mul(spread, counts), [0])
    for running, new in (
        (running_mean, mean),
        (running_var, a.div(squares, a.sub(n, a.number(1)))),
    ):
        if running is not None:
            running.copy_(RULES["lerp"](a, running, new, momentum))
    return mean, a.inverse_root(a.add(a.div(squares, n), a.number(eps)))


@rule("batch_norm_elemt")
def _normalized(
    a: Algebra, x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    scale = invstd if weight is None else a.mul(invstd, weight)
    done = a.mul(a.sub(x, _by_channel(mean, x)), _by_channel(scale, x))
    return done if bias is None else a.add(done, _by_channel(bias, x))


@rule("batch_norm_backward_reduce")
def _backward_sums(
    a: Algebra, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *wanted: bool
) -> tuple[Tensor, ...]:
    """Sums of the gradient and of it times x - mean; the gradients of weight and bias."""
    total = a.total(grad, _others(x))
    along = a.total(a.mul(grad, a.sub(x, _by_channel(mean, x))), _others(x))
    return total, along, a.mul(along, invstd), total.clone()


@rule("batch_norm_backward_elemt")
def _backward(
    a: Algebra,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Any,
    total: Tensor,
    along: Tensor,
    counts: Tensor,
) -> Tensor:
    over = a.inverse(a.lift(counts.sum()))
    total, along = a.mul(total, over), a.mul(a.mul(along, over), a.mul(invstd, invstd))
    inner = a.mul(a.sub(x, _by_channel(mean, x)), _by_channel(along, x))
    inner = a.sub(a.sub(grad, _by_channel(total, x)), inner)
    scale = invstd if weight is None else a.mul(invstd, weight)
    return a.mul(inner, _by_channel(scale, x))
