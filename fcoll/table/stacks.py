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
from fcoll.errors import NoStackedRule, RaggedRanks, fail
from fcoll.reductions import REDUCTIONS, Reduction, accumulator, fold
from fcoll.table.partition import Partition

Args = Mapping[str, Any]
Rule = Callable[[Tensor, Args, Partition], Tensor]
Prepared = Callable[[Any], Any]  # of a stack, or of a list of stacks
Groups = Partition | Sequence[Sequence[int]]


class StackedRule:
    """A rule of even groups, for any: those of each size by themselves, put together by rank.

    ``prepare`` decides what no value of a tensor has a say in, once for all calls that look alike
    (``plans.py``). ``groups`` may also be a list of rank lists.
    """

    def __init__(
        self, rule: Rule, moves: bool, transposed: Rule | None, when: Callable[[Args], bool]
    ) -> None:
        functools.update_wrapper(self, rule)
        self.rule, self.moves, self.transposed, self.when = rule, moves, transposed, when

    def __call__(self, x_W: Tensor, args: Args, groups: Groups) -> Tensor:
        return self.prepare(x_W.dtype, args, Partition.of(groups, x_W.shape[0]))(x_W)

    def prepare(self, dtype: torch.dtype, args: Args, groups: Partition) -> Prepared:
        """The rule with these arguments, of stacks of this dtype."""
        if not groups.is_even:
            return lambda x_W: self._by_size(x_W, args, groups)
        run = self._differentiable(args, groups)
        as_int = _AS_INT.get(dtype) if self.moves else None
        return run if as_int is None else lambda x_W: run(x_W.view(as_int)).view(dtype)

    def _differentiable(self, args: Args, groups: Partition) -> Prepared:
        rule, transposed = self.rule, self.transposed
        # Not of one group: what all ranks share is expanded, and the gradient that arrives is a sum
        if transposed is None or len(groups.groups) == 1 or not self.when(args):
            return lambda x_W: rule(x_W, args, groups)

        def linear(x_W: Tensor) -> Tensor:
            if x_W.requires_grad and torch.is_grad_enabled() and _torch.ordinary(x_W):
                return Linear.apply(x_W, rule, transposed, args, groups)
            return rule(x_W, args, groups)

        return linear

    def _by_size(self, x_W: Tensor, args: Args, groups: Partition) -> Tensor:
        ranks: list[int] = []
        ys = []
        for some, partition in groups.by_size:
            ys.append(self(x_W[some], args, partition))
            ranks += some
        if len({y.shape[1:] for y in ys}) > 1:
            sizes = " or ".join(str(n) for n in sorted({len(g) for g in groups.groups}))
            op = self.rule.__name__.removeprefix("_stacked_")
            fail(RaggedRanks, op=op, why=f"its groups have {sizes} ranks")
        place = sorted(range(len(ranks)), key=ranks.__getitem__)
        return torch.cat(ys)[place]


def rule(
    *,
    moves: bool = False,
    transposed: Rule | None = None,
    when: Callable[[Args], bool] = lambda args: True,
) -> Callable[[Rule], StackedRule]:
    """Makes a StackedRule of one that is written for even groups.

    ``moves``: it only moves elements, so those of dtypes that torch does not index go as plain
    integers. ``transposed``: the collective that runs the bytes backwards, of a rule that is linear
    in its tensor ``when`` the arguments are such. It is one node of autograd then, whose bits are
    those of real ranks: torch's own gradient of an expand would add in another order.
    """
    return lambda of_even: StackedRule(of_even, moves, transposed, when)


def no_rule(op: str, why: str, hint: str) -> Callable[..., Any]:
    """A rule that raises: the collective has no meaning on stacked ranks."""

    def stacked(xs_W: Any, args: Args, groups: Any) -> Any:
        fail(NoStackedRule, op=op, why=why, hint=hint)

    return stacked


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
    """Member by member, not parts.sum(0), which adds in an order of its own."""
    wide, n = accumulator(parts.dtype), parts.shape[0]
    if is_compiling() or _torch.tracing():
        # a graph of n adds is one kernel, but compiles in a time that grows with n
        parts = parts.to(wide)
        return functools.reduce(torch.add, parts.unbind()) if n <= 64 else parts.sum(0)
    if not parts.is_cpu:
        return functools.reduce(torch.add, parts.to(wide).unbind())
    # one slice after the other
    index = parts.new_zeros(n, dtype=torch.int64)
    return _zeros((1, *parts.shape[1:]), wide).index_add(0, index, parts.to(wide))[0]


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Negative ones: added to a number they leave it as it is, also if it is -0."""
    zero = complex(-0.0, -0.0) if dtype.is_complex else -0.0
    return torch.full(shape, zero, dtype=dtype, device="cpu")


def reduced(reduce_op: str, x_W: Tensor, groups: Partition) -> Tensor:
    """[W, ...] -> [A, S, ...]: what each of even groups reduces to."""
    if not _sums_at_once(reduce_op, x_W, groups):
        return folded(reduce_op, groups.members(x_W))
    A, _, S = groups.grid or (len(groups.groups), 0, 1)
    differentiated = x_W.requires_grad and torch.is_grad_enabled()
    rest = reduce_op, groups
    total = Linear.apply(x_W, _summed, _to_all, *rest) if differentiated else _summed(x_W, *rest)
    return total.view(A, S, *x_W.shape[1:])


def reduced_on_all(reduce_op: str, x_W: Tensor, groups: Partition) -> Tensor:
    """[W, ...] -> [W, ...]: what each of even groups reduces to, on all of its ranks."""
    differentiated = x_W.requires_grad and torch.is_grad_enabled()
    if differentiated or not _sums_at_once(reduce_op, x_W, groups):
        return groups.spread(reduced(reduce_op, x_W, groups))
    total = _summed(x_W, reduce_op, groups)
    if len(groups.groups) == 1:
        return total.expand(groups.world, *total.shape[1:])
    return total.index_select(0, groups.group_index(total))  # as spread, in a few ops less


def _sums_at_once(reduce_op: str, x_W: Tensor, groups: Partition) -> bool:
    return (
        groups.sums_at_once
        and (reduce_op == "sum" or reduce_op == "avg")
        and _rounds(x_W.dtype)
        and x_W.is_cpu
        and _torch.ordinary(x_W)
    )


def _summed(x_W: Tensor, reduce_op: str, groups: Partition) -> Tensor:
    """[W, ...] -> [groups, ...]"""
    dtype = x_W.dtype
    wide = accumulator(dtype)
    zero = complex(-0.0, -0.0) if dtype.is_complex else -0.0
    total = groups.summed(x_W if wide is dtype else x_W.to(wide), zero)
    if reduce_op == "avg":
        total = total / groups.n
    return total if wide is dtype else total.to(dtype)


def _to_all(G: Tensor, reduce_op: str, groups: Partition) -> Tensor:
    """[groups, ...] -> [W, ...]: the gradient of each part from those of the groups' sums."""
    A, _, S = groups.grid or (len(groups.groups), 0, 1)
    G_W = groups.spread(G.view(A, S, *G.shape[1:]))
    return mean_or_sum(G_W, {"reduce_op": reduce_op}, groups)


# -- rules that are linear ---


class Linear(torch.autograd.Function):
    """``rule(x, *rest)``, which is linear in x: its gradient is ``transposed(grad, *rest)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: Any, transposed: Any, *rest: Any) -> Tensor:  # type: ignore[override]
        ctx.shape, ctx.transposed, ctx.rest = x.shape, transposed, rest
        with _torch.views_untracked():  # a result that is a view could not be written to
            return rule(x, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        none = (None,) * (2 + len(ctx.rest))
        return ctx.transposed(grad, *ctx.rest).reshape(ctx.shape), *none


def sums(args: Args) -> bool:
    """Is the reduce op a sum or a mean, which are linear?"""
    return args["reduce_op"] in ("sum", "avg")


def mean_or_sum(G_W: Tensor, args: Args, groups: Partition) -> Tensor:
    """The share of each part in the gradient of a sum, or of a mean."""
    return G_W / groups.n if args["reduce_op"] == "avg" else G_W


def on_all(x_W: Tensor, rank: int, groups: Partition) -> Tensor:
    """One member's tensor, on all of its group."""
    source = groups.members(x_W)[rank]
    return groups.spread(source.clone(memory_format=torch.contiguous_format))


def on_one(x_W: Tensor, reduce_op: str, rank: int, groups: Partition) -> Tensor:
    """The members' tensors reduced, on one of them; zeros elsewhere."""
    return groups.only_on(rank, reduced(reduce_op, x_W, groups))


def gathered(x_W: Tensor, dim: int, groups: Partition) -> Tensor:
    """The members' tensors one behind the other, on all of them."""
    return groups.spread(joined(groups.members(at_least_1d(x_W)), dim))


def scattered(x_W: Tensor, reduce_op: str, dim: int, groups: Partition) -> Tensor:
    """The members' tensors reduced, each with its part of the result."""
    whole = reduced(reduce_op, x_W, groups)
    if dim == 0 and len(groups.groups) == 1 and groups.in_order:
        return whole.view(groups.n, -1, *whole.shape[3:])
    return groups.placed(cut(whole, dim, groups.n))


# -- all_reduce(grad="identity"): the gradient that arrives is the whole one already ---


class OwnGradient(torch.autograd.Function):
    """all_reduce of stacked ranks whose gradient is each rank's own, times its share."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_W: Tensor, reduce_op: str, groups: Partition) -> Tensor:
        return groups.spread(reduced(reduce_op, x_W, groups))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, Partition], output: Tensor) -> None:
        x_W, ctx.reduce_op, ctx.groups = inputs
        if REDUCTIONS[ctx.reduce_op].share not in ("whole", "mean"):
            ctx.save_for_backward(x_W)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        G, share = identity(grad, {}, ctx.groups), REDUCTIONS[ctx.reduce_op].share
        if share == "mean":
            G = G / ctx.groups.n
        elif share != "whole":
            (x_W,) = ctx.saved_tensors

            def of_group(x: Tensor) -> Tensor:
                return reduced(ctx.reduce_op, x, ctx.groups)

            y, pull = torch.func.vjp(of_group, x_W)
            G = G * pull(torch.ones_like(y))[0]
        return G, None, None


class Identity(torch.autograd.Function):
    """x itself; its gradient is ``summed(grad)``, of which this is the gradient again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
        ctx.summed = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.summed(grad), None


@rule()
def identity(x_W: Tensor, args: Args, groups: Partition) -> Tensor:
    """fcoll.identity of stacked ranks: its gradient is summed over even groups."""
    return Identity.apply(x_W, lambda G_W: OwnGradient.apply(G_W, "sum", groups))
