"""The gradient of each collective, as collectives.

The function differentiated is the global one: every rank has a loss of its own, and a gradient is
that of their sum. So the adjoint of a collective is the collective that runs the bytes backwards.
Each takes the gradient of the result and ``a``, the call's arguments (with ``a.saved_input`` and
``a.saved_output`` where the row saves them), and gives the gradient of the first argument.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace as Call
from typing import Any

import torch
from torch import Tensor

from fcoll import bare
from fcoll.errors import NoGradient
from fcoll.groups import by_name
from fcoll.reductions import REDUCTIONS


class _Identity(torch.autograd.Function):
    """all_reduce(grad="identity") and this are each the gradient of the other."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, group_name: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.group_name = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return bare.wait(bare.call("all_reduce", grad, "sum", ctx.group_name, "identity")), None


def identity(x: Tensor, group_name: str) -> Tensor:
    """x itself; its gradient is summed over the group."""
    return _Identity.apply(x, group_name)


# -- reductions: how one rank's part shares in the gradient G of the reduced value ---


def _whole(G: Tensor, x: Tensor, y: Tensor, group_name: str) -> Tensor:
    return G


def _mean(G: Tensor, x: Tensor, y: Tensor, group_name: str) -> Tensor:
    return G / by_name(group_name).n


def _others_product(G: Tensor, x: Tensor, y: Tensor, group_name: str) -> Tensor:
    # Not y / x, which zeros spoil: the product of all parts but ours. Differentiable again.
    g = by_name(group_name)
    parts = bare.wait(bare.call("all_gather_into_tensor", x.unsqueeze(0), g.n, group_name))
    others = parts.roll(-g.rank, 0)[1:]  # ours is first, then left out
    return G * others.prod(0).conj()


def _tied(G: Tensor, x: Tensor, y: Tensor, group_name: str) -> Tensor:
    # Parts that tie for the extreme share alike, as torch.amax does.
    tied = (x == y).to(G.dtype)
    count = bare.wait(bare.call("all_reduce", tied, "sum", group_name))
    return G * tied / count


_SHARE: dict[str, Callable[[Tensor, Tensor, Tensor, str], Tensor]] = {
    "whole": _whole,
    "mean": _mean,
    "others_product": _others_product,
    "tied": _tied,
}


def _share(op: str, reduce_op: str, G: Tensor, x: Tensor, y: Tensor, group_name: str) -> Tensor:
    share = REDUCTIONS[reduce_op].share
    if share is None:
        raise NoGradient(op=f"{op} with {reduce_op}", why="bits do not vary smoothly", hint="")
    return _SHARE[share](G, x, y, group_name)


def needs_values(a: Call) -> tuple[str, ...]:
    """Whose values the gradient needs."""
    needed = {"others_product": ("input",), "tied": ("input", "output")}
    return needed.get(REDUCTIONS[a.reduce_op].share or "", ())


def all_reduce(grad: Tensor, a: Call) -> Tensor:
    if a.grad == "sum":
        G = bare.wait(bare.call("all_reduce", grad, "sum", a.group_name))
    else:
        G = identity(grad, a.group_name)
    return _share("all_reduce", a.reduce_op, G, a.saved_input, a.saved_output, a.group_name)


def reduce_scatter_tensor(grad: Tensor, a: Call) -> Tensor:
    def whole(x: Tensor) -> Tensor:
        gather = partial(bare.call, "all_gather_into_tensor")
        return bare.wait(gather(x, a.group_size, a.group_name, a.dim, a.sizes))

    y = whole(a.saved_output) if a.saved_output is not None else None
    return _share("reduce_scatter_tensor", a.reduce_op, whole(grad), a.saved_input, y, a.group_name)


def reduce(grad: Tensor, a: Call) -> Tensor:
    def whole(x: Tensor) -> Tensor:
        return bare.wait(bare.call("broadcast", x, a.dst, a.group_name))

    y = whole(a.saved_output) if a.saved_output is not None else None
    return _share("reduce", a.reduce_op, whole(grad), a.saved_input, y, a.group_name)


# -- movement ---


def all_gather_into_tensor(grad: Tensor, a: Call) -> Tensor:
    scatter = partial(bare.call, "reduce_scatter_tensor")
    mine = bare.wait(scatter(grad, "sum", a.group_size, a.group_name, a.dim, a.sizes))
    return mine.reshape(a.input_shape)


def all_to_all_single(grad: Tensor, a: Call) -> Tensor:
    back = partial(bare.call, "all_to_all_single")
    return bare.wait(back(grad, a.input_split_sizes, a.output_split_sizes, a.group_name))


def shard_dim_alltoall(grad: Tensor, a: Call) -> Tensor:
    return bare.wait(bare.call("shard_dim_alltoall", grad, a.shard_dim, a.gather_dim, a.group_name))


def broadcast(grad: Tensor, a: Call) -> Tensor:
    return bare.wait(bare.call("reduce", grad, "sum", a.src, a.group_name))


def gather(grad: Tensor, a: Call) -> Tensor:
    back = bare.call("scatter", grad, a.dst, a.group_size, a.group_name, a.dim, a.sizes)
    return bare.wait(back).reshape(a.input_shape)


def scatter(grad: Tensor, a: Call) -> Tensor:
    return bare.wait(bare.call("gather", grad, a.src, a.group_size, a.group_name, a.dim, a.sizes))


def permute(grad: Tensor, a: Call) -> Tensor:
    source = [a.dst.index(r) if r in a.dst else -1 for r in range(len(a.dst))]
    return bare.wait(bare.call("permute", grad, source, a.group_name))


def wait_tensor(grad: Tensor, a: Call) -> Tensor:
    return grad


# -- lists ---


def all_reduce_coalesced(grads: list[Tensor], a: Call) -> list[Tensor]:
    if a.grad == "sum":
        Gs = list(map(bare.wait, bare.call("all_reduce_coalesced", grads, "sum", a.group_name)))
    else:
        Gs = [identity(G, a.group_name) for G in grads]
    xs, ys = a.saved_input or [None] * len(Gs), a.saved_output or [None] * len(Gs)
    op = "all_reduce_coalesced"
    return [
        _share(op, a.reduce_op, G, x, y, a.group_name) for G, x, y in zip(Gs, xs, ys, strict=True)
    ]


def all_gather_into_tensor_coalesced(grads: list[Tensor], a: Call) -> list[Tensor]:
    back = bare.call(
        "reduce_scatter_tensor_coalesced", grads, "sum", a.group_size, a.group_name, a.dims
    )
    return [bare.wait(x).reshape(s) for x, s in zip(back, a.input_shape, strict=True)]


def reduce_scatter_tensor_coalesced(grads: list[Tensor], a: Call) -> list[Tensor]:
    def whole(xs: list[Tensor]) -> list[Tensor]:
        gather = partial(bare.call, "all_gather_into_tensor_coalesced")
        return list(map(bare.wait, gather(xs, a.group_size, a.group_name, a.dims)))

    Gs = whole(grads)
    xs = a.saved_input or [None] * len(Gs)
    ys = whole(a.saved_output) if a.saved_output is not None else [None] * len(Gs)
    op = "reduce_scatter_tensor_coalesced"
    return [
        _share(op, a.reduce_op, G, x, y, a.group_name) for G, x, y in zip(Gs, xs, ys, strict=True)
    ]


# -- what has none ---


def none_for_p2p(grad: object, a: Call) -> Tensor:
    raise NoGradient(
        op=a.op,
        why="its peer could not know that a gradient must be sent back, and would hang",
        hint="Use permute, scatter or all_to_all_single, which every rank of the group calls.",
    )


def none_in_place(grad: object, a: Call) -> Tensor:
    hint = f"Use {a.op.removesuffix('_').removesuffix('_out')}, which returns a new tensor."
    raise NoGradient(op=a.op, why="it overwrites its argument", hint=hint)
