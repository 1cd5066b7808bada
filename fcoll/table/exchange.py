"""Collectives in which each pair of ranks has a message of its own: all_to_all_single,
shard_dim_alltoall and permute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll._torch import guard_or_false
from fcoll.errors import BadPermutation, BadSplits, fail
from fcoll.groups import by_name, check_device, group_rank, group_size
from fcoll.table import pieces, stacks, wire
from fcoll.table.checks import check_dim, check_divisible, complaint, listed, shown
from fcoll.table.layout import chunks, concat, flat
from fcoll.table.partition import Partition
from fcoll.table.row import Call, Native, Shape, Sizes, declare, torch_ops
from fcoll.table.shapes import same
from fcoll.transport.carriers import carrier_of, issued

# -- all_to_all_single ---


def _check_all_to_all(
    op: str, input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int],
    group_name: str,
) -> None:  # fmt: skip
    check_device(op, input.device.type, group_name)
    check_dim(op, input, 0)
    n = group_size(group_name)
    for arg, splits, total in (
        ("input_splits", input_split_sizes, input.shape[0]),
        ("output_splits", output_split_sizes, None),
    ):
        why = complaint(splits, n, total)
        if why:
            fail(BadSplits, op=op, arg=arg, splits=listed(splits), why=why, n=n)
    r = group_rank(group_name)
    sent, expected = input_split_sizes[r], output_split_sizes[r]
    if guard_or_false(sent != expected):
        why = f"rank {r} sends itself {shown(sent)} rows and expects {shown(expected)}"
        shown_splits = listed(output_split_sizes)
        fail(BadSplits, op=op, arg="output_splits", splits=shown_splits, why=why, n=n)


def check_even_splits(
    x: Tensor, output_splits: Sizes, input_splits: Sizes, group_name: str
) -> None:
    """Without splits, dim 0 must divide; one of the two alone is a mistake."""
    op = "all_to_all_single"
    n = group_size(group_name)
    for arg, missing in (("input_splits", output_splits), ("output_splits", input_splits)):
        other = input_splits if arg == "input_splits" else output_splits
        if missing is None and other is not None:
            why = "the other one is missing"
            fail(BadSplits, op=op, arg=arg, splits=listed(other), why=why, n=n)
    check_dim(op, x, 0)
    check_divisible(op, x, 0, group_name, "output_splits= and input_splits=")


def _all_to_all_shape(input: Tensor, output_split_sizes: Sequence[int]) -> Shape:
    return [sum(output_split_sizes), *input.shape[1:]]


def _run_all_to_all(
    input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int],
    group_name: str,
) -> Tensor:  # fmt: skip
    g = by_name(group_name)
    out = input.new_empty(_all_to_all_shape(input, output_split_sizes))
    if g.n == 1:
        out.copy_(input)
        return out
    if math.prod(input.shape[1:]) == 0:
        return out
    x, splits = input.contiguous(), (output_split_sizes, input_split_sizes)
    return issued(out, carrier_of(g, x.device).exchange(out, x, g, *splits))


def _all_to_all_adjoint(grad: Tensor, a: Call) -> Tensor:
    splits = a.input_split_sizes, a.output_split_sizes  # swapped: the rows go back
    return a.call("all_to_all_single", grad, *splits, a.group_name)


@stacks.rule(moves=True)
def _stacked_all_to_all_single(x_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    stacks.check_even_splits("all_to_all_single", args)
    return _resharded(x_W, 0, 0, groups)


def _resharded(x_W: Tensor, gather_dim: int, shard_dim: int, groups: Partition) -> Tensor:
    """Part j of rank i along shard_dim goes to j, where it is the i-th along gather_dim."""
    parts = groups.members(x_W)  # [n, A, S, ...]
    sizes = groups.n, x_W.shape[1 + shard_dim] // groups.n
    sent = parts.unflatten(3 + shard_dim, sizes).movedim(3 + shard_dim, 0)
    received = sent.movedim(1, 3 + gather_dim)  # [to, A, S, ..., from, ...]
    return groups.placed(received).flatten(1 + gather_dim, 2 + gather_dim)


def _uneven_all_to_all(xs: list[Tensor], args: list[dict[str, Any]]) -> list[Tensor]:
    sent = pieces.parts_of(xs, [a["input_split_sizes"] for a in args])
    arrived = pieces.received("all_to_all", sent)
    for i, (ys, a) in enumerate(zip(arrived, args, strict=True)):
        splits, sizes = a["output_split_sizes"], [y.shape[0] for y in ys]
        if splits and list(splits) != sizes:
            why = f"rank {i} is sent {sizes} rows"
            facts = {"op": "all_to_all_single", "arg": "output_splits", "n": len(xs)}
            fail(BadSplits, splits=listed(splits), why=why, **facts)
    return [torch.cat(ys) for ys in arrived]


ALL_TO_ALL_SINGLE = declare(
    "all_to_all_single",
    "(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, str group_name)"
    " -> Tensor",
    check=_check_all_to_all,
    shape=_all_to_all_shape,
    run=_run_all_to_all,
    adjoint=_all_to_all_adjoint,
    stacked=_stacked_all_to_all_single,
    uneven=_uneven_all_to_all,
    wire_bytes=wire.ring,
    steps=wire.n_minus_1,
    personal=True,
    own_args=("output_split_sizes", "input_split_sizes"),
    own_dim=lambda args: 0,
    targets=torch_ops("all_to_all_single", "_c10d_functional_autograd"),
    contiguous=True,
    native=Native(kernel=True, fast=("x", "group", "output_splits", "input_splits")),
)


# -- shard_dim_alltoall ---


def _check_shard_dim(
    op: str, input: Tensor, gather_dim: int, shard_dim: int, group_name: str
) -> None:
    check_device(op, input.device.type, group_name)
    check_dim(op, input, gather_dim)
    check_dim(op, input, shard_dim)
    check_divisible(op, input, shard_dim, group_name, "a dim that divides")


def _shard_dim_shape(input: Tensor, gather_dim: int, shard_dim: int, group_name: str) -> Shape:
    n = group_size(group_name)
    shape = list(input.shape)
    shape[shard_dim] = shape[shard_dim] // n
    shape[gather_dim] = shape[gather_dim] * n
    return shape


def _run_shard_dim(input: Tensor, gather_dim: int, shard_dim: int, group_name: str) -> Tensor:
    g = by_name(group_name)
    if g.n == 1 or gather_dim == shard_dim:  # it is sharded so already
        return input.clone(memory_format=torch.contiguous_format)
    sent = chunks(input, shard_dim, g.n, None)
    shape = list(sent.shape[1:])
    shape[gather_dim] *= g.n
    out = input.new_empty(shape)
    parts = torch.empty_like(sent)
    work = carrier_of(g, sent.device).exchange(parts, sent, g)
    sizes = [parts.shape[1 + gather_dim]] * g.n
    return issued(out, work, lambda: concat(out, parts, gather_dim, sizes))


def _shard_dim_adjoint(grad: Tensor, a: Call) -> Tensor:
    return a.call("shard_dim_alltoall", grad, a.shard_dim, a.gather_dim, a.group_name)


@stacks.rule(moves=True)
def _stacked_shard_dim_alltoall(x_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    if args["gather_dim"] == args["shard_dim"]:
        return x_W.clone(memory_format=torch.contiguous_format)
    return _resharded(x_W, args["gather_dim"], args["shard_dim"], groups)


def _uneven_shard_dim(xs: list[Tensor], args: list[dict[str, Any]]) -> list[Tensor]:
    gather_dim, shard_dim = args[0]["gather_dim"], args[0]["shard_dim"]
    if gather_dim == shard_dim:
        return xs
    sent = pieces.parts_of(xs, [None] * len(xs), shard_dim)
    return [torch.cat(ys, gather_dim) for ys in pieces.received("all_to_all", sent)]


SHARD_DIM_ALLTOALL = declare(
    "shard_dim_alltoall",
    "(Tensor input, int gather_dim, int shard_dim, str group_name) -> Tensor",
    check=_check_shard_dim,
    shape=_shard_dim_shape,
    run=_run_shard_dim,
    adjoint=_shard_dim_adjoint,
    stacked=_stacked_shard_dim_alltoall,
    uneven=_uneven_shard_dim,
    wire_bytes=wire.ring,
    steps=wire.n_minus_1,
    personal=True,
    targets=("_dtensor::shard_dim_alltoall",),
)


# -- permute ---


def _check_permute(op: str, input: Tensor, dst: Sequence[int], group_name: str) -> None:
    check_device(op, input.device.type, group_name)
    n = group_size(group_name)
    targets = [d for d in dst if d != -1]
    in_range = all([0 <= d < n for d in targets])
    if len(dst) != n or not in_range or len(set(targets)) != len(targets):
        fail(BadPermutation, op=op, dst=listed(dst), n=n)


def _run_permute(input: Tensor, dst: Sequence[int], group_name: str) -> Tensor:
    g = by_name(group_name)
    receives = g.rank in dst
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    if not receives:
        out.zero_()
    if g.n == 1:
        return out.copy_(input) if receives else out
    size, sends, x = input.numel(), dst[g.rank] >= 0, flat(input)
    send = [size if r == dst[g.rank] else 0 for r in range(g.n)]
    receive = [size if dst[r] == g.rank else 0 for r in range(g.n)]
    into = out.view(-1) if receives else x[:0]
    carrier = carrier_of(g, x.device)
    return issued(out, carrier.exchange(into, x if sends else x[:0], g, receive, send))


def _permute_adjoint(grad: Tensor, a: Call) -> Tensor:
    source = [a.dst.index(r) if r in a.dst else -1 for r in range(len(a.dst))]
    return a.call("permute", grad, source, a.group_name)


@stacks.rule(moves=True)
def _stacked_permute(x_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    parts, dst = groups.members(x_W), list(args["dst"])
    if len(dst) != groups.n:  # of groups of other sizes; a call's check has seen the rest
        fail(BadPermutation, op="permute", dst=listed(dst), n=groups.n)
    source = [dst.index(r) if r in dst else -1 for r in range(len(dst))]
    received = [parts[i] if i >= 0 else torch.zeros_like(parts[0]) for i in source]
    return groups.placed(torch.stack(received))


def _uneven_permute(xs: list[Tensor], args: list[dict[str, Any]]) -> list[Tensor]:
    dst = list(args[0]["dst"])
    return [xs[dst.index(i)] if i in dst else torch.zeros_like(x) for i, x in enumerate(xs)]


PERMUTE = declare(
    "permute",
    "(Tensor input, int[] dst, str group_name) -> Tensor",
    check=_check_permute,
    shape=same,
    run=_run_permute,
    adjoint=_permute_adjoint,
    stacked=_stacked_permute,
    uneven=_uneven_permute,
    wire_bytes=wire.everything,
    steps=wire.one,
    personal=True,
)

ROWS = (ALL_TO_ALL_SINGLE, SHARD_DIM_ALLTOALL, PERMUTE)
