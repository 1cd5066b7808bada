"""What the rows' ``stacked`` rules share: groups of different sizes, and reductions over members.

A rule is ``stacked(xs_W, args, groups)``: the ranks' tensors stacked, the schema's other arguments
by name, and a Partition; it returns the ranks' results stacked, in new memory. It is written for
groups of one size and torch's own ops, so autograd differentiates it: the gradient of the sum of
all ranks' losses, as the rows' adjoints have it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fcoll import _torch
from fcoll.errors import NoStackedRule, RaggedRanks, RankOutOfGroup, fail
from fcoll.reductions import REDUCTIONS, Reduction, accumulator, fold
from fcoll.table.partition import Partition

Args = Mapping[str, Any]
Rule = Callable[[Tensor, Args, Partition], Tensor]


def even(rule: Rule) -> Callable[..., Tensor]:
    """The rule of groups of one size, for any: each size by itself, put together by rank.

    ``groups`` may also be a list of rank lists.
    """

    @functools.wraps(rule)
    def stacked(x_W: Tensor, args: Args, groups: Partition | Sequence[Sequence[int]]) -> Tensor:
        groups = Partition.of(groups, x_W.shape[0])
        if groups.is_even:
            return rule(x_W, args, groups)
        ranks: list[int] = []
        ys = []
        for some, partition in groups.by_size:
            ys.append(rule(x_W[some], args, partition))
            ranks += some
        if len({y.shape[1:] for y in ys}) > 1:
            sizes = sorted({len(g) for g in groups.groups})
            fail(RaggedRanks, op=_name(rule), why=f"its groups have {_or(sizes)} ranks")
        place = sorted(range(len(ranks)), key=ranks.__getitem__)
        return torch.cat(ys)[place]

    return stacked


def each(
    one: Callable[..., Tensor],
) -> Callable[[Sequence[Tensor], Args, Partition], list[Tensor]]:
    """The rule of a row on lists, from that of the row of one tensor."""

    def stacked(xs_W: Sequence[Tensor], args: Args, groups: Partition) -> list[Tensor]:
        dims = args.get("dims") or [0] * len(xs_W)
        return [one(x, {**args, "dim": d}, groups) for x, d in zip(xs_W, dims, strict=True)]

    return stacked


def no_rule(op: str, why: str, hint: str) -> Callable[..., Any]:
    """In the place of a rule that cannot be."""

    def stacked(xs_W: Any, args: Args, groups: Any) -> Any:
        fail(NoStackedRule, op=op, why=why, hint=hint)

    return stacked


def _name(rule: Callable[..., Any]) -> str:
    return rule.__name__.removeprefix("_stacked_")


def _or(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


# -- arguments that would make ranks differ ---


def check_even_sizes(op: str, args: Args) -> None:
    """``sizes`` that are all the same say nothing new; others make ragged results."""
    sizes = args.get("sizes")
    if sizes is not None and len(set(sizes)) > 1:
        fail(RaggedRanks, op=op, why=f"sizes={list(sizes)} differ")


def check_even_splits(op: str, args: Args) -> None:
    """All ranks have the same splits: what i sends to j is input[j] and output[i] for all i, j."""
    splits = {*args["input_split_sizes"], *args["output_split_sizes"]}
    if len(splits) > 1:
        sizes = f"{list(args['input_split_sizes'])} and {list(args['output_split_sizes'])}"
        fail(RaggedRanks, op=op, why=f"its splits {sizes} differ")


def check_member(op: str, arg: str, rank: int, n: int) -> int:
    if not 0 <= rank < n:
        fail(RankOutOfGroup, op=op, arg=arg, rank=rank, n=n, last=n - 1)
    return rank


# -- dims: a rank's dim is behind those of W, or of A and S ---


def cut(x: Tensor, dim: int, n: int) -> Tensor:
    """[A, S, ...] -> [n, A, S, ...]: n equal parts along a rank's dim."""
    return x.unflatten(2 + dim, (n, x.shape[2 + dim] // n)).movedim(2 + dim, 0)


def joined(parts: Tensor, dim: int) -> Tensor:
    """[n, A, S, ...] -> [A, S, ...]: the parts one behind the other along a rank's dim."""
    moved = parts.movedim(0, 2 + dim)
    return moved.clone(memory_format=torch.contiguous_format).flatten(2 + dim, 3 + dim)


def at_least_1d(x_W: Tensor) -> Tensor:
    return x_W.unsqueeze(1) if x_W.dim() == 1 else x_W


def moved(rule: Rule) -> Rule:
    """A rule that only moves elements: those that torch does not index go as plain integers."""

    @functools.wraps(rule)
    def of_any_dtype(x_W: Tensor, args: Args, groups: Partition) -> Tensor:
        as_int = _AS_INT.get(x_W.dtype)
        if as_int is None:
            return rule(x_W, args, groups)
        return rule(x_W.view(as_int), args, groups).view(x_W.dtype)

    return of_any_dtype


_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AS_INT = {
    dtype: _SAME_WIDTH[dtype.itemsize]
    for dtype in (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    )
}


# -- reductions ---


def folded(reduce_op: str, parts: Tensor) -> Tensor:
    """[n, ...] -> [...], as ``reductions.fold``: in rank order where the order can be seen in the
    bits, narrow floats accumulated in f32."""
    row, dtype = REDUCTIONS[reduce_op], parts.dtype
    if parts.shape[0] == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    if dtype == torch.uint64:
        return fold(row, parts)
    if (exact := _EXACT.get(row.name)) and not (row.name == "product" and _rounds(dtype)):
        return exact(parts.to(accumulator(dtype))).to(dtype)
    if row.takes == "bits":
        return _halved(row, parts.to(accumulator(dtype))).to(dtype)
    if not _rounds(dtype):
        return _whole_sum(parts, dtype)
    if row.name == "product":
        return functools.reduce(torch.mul, parts.to(accumulator(dtype)).unbind()).to(dtype)
    total = _sum_in_order(parts)
    return (total / parts.shape[0] if row.name == "avg" else total).to(dtype)


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _product(parts: Tensor) -> Tensor:
    return parts.all(0) if parts.dtype == torch.bool else parts.prod(0, dtype=parts.dtype)


# amin and amax: parts that tie share a gradient alike, as the rows' adjoints have it.
_EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda parts: parts.amin(0),
    "max": lambda parts: parts.amax(0),
    "product": _product,
}


def _whole_sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return parts.any(0)
    wide = accumulator(dtype)
    return parts.to(wide).sum(0, dtype=wide).to(dtype)


def _halved(row: Reduction, parts: Tensor) -> Tensor:
    """torch reduces no bits over a dim: fold halves on each other, log2(n) times."""
    while (n := parts.shape[0]) > 1:
        half = n // 2
        pairs = row.fold(parts[:half], parts[half : 2 * half])
        parts = torch.cat([pairs, parts[2 * half :]])
    return parts[0]


def _sum_in_order(parts: Tensor) -> Tensor:
    """One add a member, not parts.sum(0), which adds in an order of its own."""
    if is_compiling() or _torch.tracing():
        # a graph of n adds is one kernel, but compiles in a time that grows with n
        wide = parts.to(accumulator(parts.dtype))
        return functools.reduce(torch.add, wide.unbind()) if len(wide) <= 64 else wide.sum(0)
    if _torch.plain(parts):  # apply takes 20 us more
        return _SumInOrder.forward(parts)
    return _SumInOrder.apply(parts)


class _SumInOrder(torch.autograd.Function):
    """In place, so that a group of 1,024 takes 1,024 adds and one buffer."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parts: Tensor) -> Tensor:
        wide = accumulator(parts.dtype)
        if parts.dtype.itemsize == 1:
            parts = parts.to(wide)  # torch adds no float8 to a float
        first, *others = parts.unbind()
        total = first.to(wide, copy=True).contiguous()
        for part in others:
            total.add_(part)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.n, ctx.dtype = inputs[0].shape[0], inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.to(ctx.dtype).expand(ctx.n, *grad.shape)


# -- all_reduce(grad="identity"): the gradient that arrives is the whole one already ---


class OwnGradient(torch.autograd.Function):
    """all_reduce of stacked ranks whose gradient is each rank's own, times its share."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_W: Tensor, reduce_op: str, groups: Partition) -> Tensor:
        return groups.spread(folded(reduce_op, groups.members(x_W)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, Partition], output: Tensor) -> None:
        x_W, ctx.reduce_op, ctx.groups = inputs
        if REDUCTIONS[ctx.reduce_op].share not in ("whole", "mean"):
            ctx.save_for_backward(x_W)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        G, share = Identity.apply(grad, ctx.groups), REDUCTIONS[ctx.reduce_op].share
        if share == "mean":
            G = G / ctx.groups.n
        elif share != "whole":
            (x_W,) = ctx.saved_tensors

            def of_group(x: Tensor) -> Tensor:
                return folded(ctx.reduce_op, ctx.groups.members(x))

            y, pull = torch.func.vjp(of_group, x_W)
            G = G * pull(torch.ones_like(y))[0]
        return G, None, None


class Identity(torch.autograd.Function):
    """x itself; its gradient is summed over even groups. Partner of OwnGradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_W: Tensor, groups: Partition) -> Tensor:
        return x_W.view_as(x_W)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Partition], output: Tensor) -> None:
        ctx.groups = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return OwnGradient.apply(grad, "sum", ctx.groups), None


@even
def identity(x_W: Tensor, args: Args, groups: Partition) -> Tensor:
    """fcoll.identity of stacked ranks."""
    return Identity.apply(x_W, groups)
