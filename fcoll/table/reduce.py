"""Collectives that reduce: all_reduce, reduce_scatter_tensor and reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fcoll.errors import BadOption, NoGradient, fail
from fcoll.groups import by_name, check_device, rank_here, size_here
from fcoll.reductions import REDUCTIONS, check_reduction
from fcoll.table import pieces, stacks, wire
from fcoll.table.checks import check_member, check_rank, check_scatters
from fcoll.table.layout import chunks
from fcoll.table.partition import Partition
from fcoll.table.row import Call, Native, Sizes, declare, each, torch_ops
from fcoll.table.shapes import same, scattered
from fcoll.transport.carriers import carrier_of, issued

GRADS = ("sum", "identity")

# -- gradients: the share of one rank's part x in the gradient G of the result y, by reduce op ---

# The function differentiated is the global one: every rank has a loss of its own, and a gradient is
# that of their sum. So the adjoint of a collective is the collective that runs the bytes backwards,
# and of a reduction each part then takes its share.


def _whole(G: Tensor, x: Tensor, y: Tensor, a: Call) -> Tensor:
    return G


def _mean(G: Tensor, x: Tensor, y: Tensor, a: Call) -> Tensor:
    return G / size_here(a.group_name)


def _others_product(G: Tensor, x: Tensor, y: Tensor, a: Call) -> Tensor:
    # Not y / x, which zeros spoil: the product of all parts but ours. Differentiable again.
    n, rank = by_name(a.group_name).n, rank_here(a.group_name)
    parts = a.call("all_gather_into_tensor", x.unsqueeze(0), n, a.group_name)
    if isinstance(rank, int):
        others = parts.roll(-rank, 0)[1:]  # ours is first, then left out
    else:
        ours = torch.arange(n, device=x.device).view(-1, *[1] * x.dim()) == rank
        others = parts.masked_fill(ours, 1)
    return G * others.prod(0).conj()


def _tied(G: Tensor, x: Tensor, y: Tensor, a: Call) -> Tensor:
    # Parts that tie for the extreme share alike, as torch.amax does.
    tied = (x == y).to(G.dtype)
    return G * tied / a.call("all_reduce", tied, "sum", a.group_name)


_SHARE: dict[str, Callable[[Tensor, Tensor, Tensor, Call], Tensor]] = {
    "whole": _whole,
    "mean": _mean,
    "others_product": _others_product,
    "tied": _tied,
}


def _share(G: Tensor, x: Tensor, y: Tensor, a: Call) -> Tensor:
    """The gradient of this rank's part x, from the gradient G of the whole result y; or of each in
    lists of them."""
    kind = REDUCTIONS[a.reduce_op].share
    if kind is None:
        why = "bits do not vary smoothly"
        hint = "Call it on x.detach(), or under torch.no_grad()."
        raise NoGradient(op=f"{a.op} with {a.reduce_op}", why=why, hint=hint)
    rule = _SHARE[kind]
    return each(lambda G, x, y: rule(G, x, y, a), G, x, y)


def _share_of(whole: Callable[[Tensor], Tensor], grad: Tensor, a: Call) -> Tensor:
    """The gradient of this rank's part, where ``whole`` makes of this rank's piece of a result, or
    of its gradient, all of it."""
    y = whole(a.saved_output) if a.saved_output is not None else None
    return _share(whole(grad), a.saved_input, y, a)  # type: ignore[arg-type]


def _saves(a: Call) -> tuple[str, ...]:
    """Whose values the gradient needs."""
    needed = {"others_product": ("input",), "tied": ("input", "output")}
    return needed.get(REDUCTIONS[a.reduce_op].share or "", ())


# -- all_reduce ---


def _check_all_reduce(
    op: str, input: Tensor, reduce_op: str, group_name: str, grad: str = "sum"
) -> None:
    check_device(op, input.device.type, group_name)
    check_reduction(op, reduce_op, input.dtype)
    if grad not in GRADS:
        fail(BadOption, op=op, arg="grad", value=grad, known=", ".join(GRADS))


def _run_all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    out = input.clone(memory_format=torch.contiguous_format)
    g = by_name(group_name)
    if g.n == 1:
        return out
    return issued(out, *carrier_of(g, out.device).all_reduce_(out, REDUCTIONS[reduce_op], g))


def _all_reduce_adjoint(grad: Tensor, a: Call) -> Tensor:
    summed = a.grad == "sum"
    G = a.call("all_reduce", grad, "sum", a.group_name) if summed else a.identity(grad)
    return _share(G, a.saved_input, a.saved_output, a)


def _transposed_all_reduce(G_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    G_W = _stacked_all_reduce(G_W, {"reduce_op": "sum"}, groups)
    return stacks.mean_or_sum(G_W, args, groups)


@stacks.rule(
    transposed=_transposed_all_reduce,
    when=lambda a: stacks.sums(a) and a.get("grad") != "identity",
)
def _stacked_all_reduce(x_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    if args.get("grad", "sum") == "identity":
        return stacks.OwnGradient.apply(x_W, args["reduce_op"], groups)
    return stacks.reduced_on_all(args["reduce_op"], x_W, groups)


def _uneven_all_reduce(xs: list[Tensor], args: list[dict[str, Any]]) -> list[Tensor]:
    return pieces.only(pieces.received("all_reduce", [[x] for x in xs], args[0]["reduce_op"]))


ALL_REDUCE = declare(
    "all_reduce",
    "(Tensor input, str reduce_op, str group_name, str grad='sum') -> Tensor",
    check=_check_all_reduce,
    shape=same,
    run=_run_all_reduce,
    adjoint=_all_reduce_adjoint,
    stacked=_stacked_all_reduce,
    uneven=_uneven_all_reduce,
    saves=_saves,
    wire_bytes=wire.ring_twice,
    steps=wire.twice_n_minus_1,
    one_shot_bytes=wire.to_each,
    replicates=True,
    targets=torch_ops("all_reduce"),
    native=Native(kernel=True, fast=("x", "op", "group", "grad"), arena="whole"),
)


# -- reduce_scatter_tensor ---


def _check_reduce_scatter(
    op: str, input: Tensor, reduce_op: str, group_size: int, group_name: str,
    dim: int = 0, sizes: Sizes = None,
) -> None:  # fmt: skip
    check_reduction(op, reduce_op, input.dtype)
    check_scatters(op, input, group_size, group_name, dim, sizes)


def run_reduce_scatter(
    input: Tensor, reduce_op: str, group_name: str, dim: int = 0, sizes: Sizes = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    g = by_name(group_name)
    if out is None:
        out = input.new_empty(scattered(input, g.n, group_name, dim, sizes))
    if g.n == 1:
        out.copy_(input)
        return out
    parts, carrier = chunks(input, dim, g.n, sizes), carrier_of(g, input.device)
    if sizes is None:
        return issued(out, *carrier.reduce_scatter(out, parts, REDUCTIONS[reduce_op], g))
    mine = torch.empty_like(parts[0])  # padded to the largest part
    work, finish = carrier.reduce_scatter(mine, parts, REDUCTIONS[reduce_op], g)

    def fill() -> None:
        if finish:
            finish()
        out.data.copy_(mine.narrow(dim, 0, out.shape[dim]))

    return issued(out, work, fill)


def _reduce_scatter_adjoint(grad: Tensor, a: Call) -> Tensor:
    def whole(part: Tensor) -> Tensor:
        gather = ("all_gather_into_tensor", part, a.group_size, a.group_name, a.dim, a.sizes)
        return a.call(*gather)

    return _share_of(whole, grad, a)


def _transposed_reduce_scatter(G_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    whole = stacks.gathered(G_W, args.get("dim", 0), groups)
    return stacks.mean_or_sum(whole, args, groups)


@stacks.rule(transposed=_transposed_reduce_scatter, when=stacks.sums)
def _stacked_reduce_scatter_tensor(x_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    stacks.check_even_sizes("reduce_scatter_tensor", args)
    return stacks.scattered(x_W, args["reduce_op"], args.get("dim", 0), groups)


def _uneven_reduce_scatter(xs: list[Tensor], args: list[dict[str, Any]]) -> list[Tensor]:
    parts = pieces.parts_of(xs, [a.get("sizes") for a in args])
    return pieces.only(pieces.received("reduce_scatter", parts, args[0]["reduce_op"]))


REDUCE_SCATTER_TENSOR = declare(
    "reduce_scatter_tensor",
    "(Tensor input, str reduce_op, int group_size, str group_name, int dim=0,"
    " SymInt[]? sizes=None) -> Tensor",
    check=_check_reduce_scatter,
    shape=scattered,
    run=run_reduce_scatter,
    adjoint=_reduce_scatter_adjoint,
    stacked=_stacked_reduce_scatter_tensor,
    uneven=_uneven_reduce_scatter,
    saves=_saves,
    wire_bytes=wire.ring,
    steps=wire.n_minus_1,
    targets=torch_ops("reduce_scatter_tensor", "_c10d_functional_autograd"),
    contiguous=True,
    native=Native(kernel=True, fast=("x", "op", "group", "dim"), arena="share"),
)


# -- reduce ---


def _check_reduce(op: str, input: Tensor, reduce_op: str, dst: int, group_name: str) -> None:
    check_device(op, input.device.type, group_name)
    check_reduction(op, reduce_op, input.dtype)
    check_rank(op, "dst", dst, group_name)


def _run_reduce(input: Tensor, reduce_op: str, dst: int, group_name: str) -> Tensor:
    g = by_name(group_name)
    out = input.clone(memory_format=torch.contiguous_format)
    if g.n == 1:
        return out
    work, finish = carrier_of(g, out.device).reduce_(out, dst, REDUCTIONS[reduce_op], g)
    return issued(out, work, finish if g.rank == dst else lambda: out.data.zero_())


def _reduce_adjoint(grad: Tensor, a: Call) -> Tensor:
    def from_root(x: Tensor) -> Tensor:
        return a.call("broadcast", x, a.dst, a.group_name)

    return _share_of(from_root, grad, a)


def _transposed_reduce(G_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    return stacks.mean_or_sum(stacks.on_all(G_W, args["dst"], groups), args, groups)


@stacks.rule(transposed=_transposed_reduce, when=stacks.sums)
def _stacked_reduce(x_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    dst = check_member("reduce", "dst", args["dst"], groups.n)
    return stacks.on_one(x_W, args["reduce_op"], dst, groups)


REDUCE = declare(
    "reduce",
    "(Tensor input, str reduce_op, int dst, str group_name) -> Tensor",
    check=_check_reduce,
    shape=same,
    run=_run_reduce,
    adjoint=_reduce_adjoint,
    stacked=_stacked_reduce,
    saves=_saves,
    wire_bytes=wire.everything,
    steps=wire.n_minus_1,
    one_shot_bytes=wire.to_each,
)

ROWS = (ALL_REDUCE, REDUCE_SCATTER_TENSOR, REDUCE)
