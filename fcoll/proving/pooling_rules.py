"""The rules of pooling and of ops that add up what padding or enlarging has copied."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fcoll.proving.algebra import Algebra
from fcoll.proving.elementwise_rules import element, elements, rule
from fcoll.proving.norm_rules import RULES

aten = torch.ops.aten

# Each element of the result is a sum of elements of the first argument.
_SUMS = """
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward
"""


def _sums(name: str, a: Algebra, x: Any, *how: Any) -> Tensor:
    x = element(a, x)
    return a.linear(lambda d: getattr(aten, name)(d, *how), x, x.numel())


RULES |= {name: partial(_sums, name) for name in _SUMS.split()}


# -- averages ---


def _divisors(pool: Any, shape: torch.Size, how: tuple[Any, ...]) -> Tensor:
    """Of each window: by the sum and the average of ones."""
    ones = torch.ones(shape, dtype=torch.float64)
    return (_window_sums(pool, ones, how) / pool(ones, *how)).round()


def _window_sums(pool: Any, x: Tensor, how: tuple[Any, ...]) -> Tensor:
    return pool(x, *_summing(how))


def _summing(how: tuple[Any, ...]) -> tuple[Any, ...]:
    """Kernel, stride, padding, ceil_mode, count_include_pad, divisor: each window divided by 1."""
    filled = (*how, *_DEFAULTS[len(how) :])
    return (*filled[:-1], 1)


_DEFAULTS: tuple[Any, ...] = ([], [], 0, False, True, None)


def _average(name: str, a: Algebra, x: Any, *how: Any) -> Tensor:
    x, pool = element(a, x), getattr(aten, name)
    sums = a.linear(lambda d: _window_sums(pool, d, how), x, x.numel())
    return a.div(sums, a.lift(_divisors(pool, x.shape, how)))


def _average_backward(name: str, a: Algebra, grad: Any, x: Any, *how: Any) -> Tensor:
    grad, x = elements(a, grad, x)
    back = getattr(aten, f"{name}_backward")
    share = a.div(grad, a.lift(_divisors(getattr(aten, name), x.shape, how)))
    return a.linear(lambda d: back(d, x, *_summing(how)), share, grad.numel())


for _name in ("avg_pool2d", "avg_pool3d"):
    RULES[_name] = partial(_average, _name)
    RULES[f"{_name}_backward"] = partial(_average_backward, _name)


def _windows(size: int, count: int) -> Tensor:
    """Which of ``size`` elements each of ``count`` windows has, as torch's adaptive pools do."""
    at = torch.arange(size)
    first = torch.arange(count) * size // count
    end = -(-(torch.arange(count) + 1) * size // count)
    return ((at >= first[:, None]) & (at < end[:, None])).to(torch.float64)


@rule("_adaptive_avg_pool2d_backward")
def _adaptive_backward(a: Algebra, grad: Any, x: Any) -> Tensor:
    grad, x = elements(a, grad, x)
    rows, columns = (_windows(n, k) for n, k in zip(x.shape[-2:], grad.shape[-2:], strict=True))
    share = a.div(grad, a.lift(rows.sum(1)[:, None] * columns.sum(1)))
    return a.linear(lambda d: rows.t() @ d @ columns, share, grad.numel())
