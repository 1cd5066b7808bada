"""Collectives that copy parts between ranks unchanged: all_gather_into_tensor, gather, scatter and
broadcast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fcoll.groups import by_name, check_device
from fcoll.table import pieces, stacks, wire
from fcoll.table.checks import check_gathers, check_member, check_rank, check_scatters
from fcoll.table.layout import concat, contiguous_parts, flat, padded, resized
from fcoll.table.partition import Partition
from fcoll.table.row import Call, Native, Sizes, declare, each, torch_ops
from fcoll.table.shapes import gathered, same, scattered
from fcoll.transport.carriers import carrier_of, issued


def _own_dim(args: Mapping[str, Any]) -> int | None:
    """With ``sizes`` the ranks' parts differ along dim."""
    return args["dim"] if args.get("sizes") is not None else None


# -- all_gather_into_tensor ---


def run_all_gather(
    input: Tensor, group_name: str, dim: int = 0, sizes: Sizes = None, out: Tensor | None = None
) -> Tensor:
    g = by_name(group_name)
    if out is None:
        out = input.new_empty(gathered(input, g.n, dim, sizes))
    x = input.reshape(1) if input.dim() == 0 else input
    if g.n == 1:
        out.copy_(x)
        return out
    carrier = carrier_of(g, x.device)
    if sizes is None and contiguous_parts(x.shape, dim):
        return issued(out, carrier.all_gather(out, x.contiguous(), g))
    lengths = sizes or [x.shape[dim]] * g.n
    x = padded(x, dim, max(lengths))  # carriers gather equal parts only
    parts = x.new_empty((g.n, *x.shape))
    work = carrier.all_gather(parts, x, g)
    return issued(out, work, lambda: concat(out, parts, dim, lengths))


def _all_gather_adjoint(grad: Tensor, a: Call) -> Tensor:
    scatter = ("reduce_scatter_tensor", grad, "sum", a.group_size, a.group_name, a.dim, a.sizes)
    return each(Tensor.reshape, a.call(*scatter), a.input_shape)


def _transposed_all_gather(G_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    return stacks.scattered(G_W, "sum", args.get("dim", 0), groups)


@stacks.rule(moves=True, transposed=_transposed_all_gather)
def _stacked_all_gather_into_tensor(x_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    stacks.check_even_sizes("all_gather_into_tensor", args)
    return stacks.gathered(x_W, args.get("dim", 0), groups)


def _uneven_all_gather(xs: list[Tensor], args: list[dict[str, Any]]) -> list[Tensor]:
    rows = [[x.reshape(1) if x.dim() == 0 else x] for x in xs]
    return [torch.cat(ys) for ys in pieces.received("all_gather", rows)]


ALL_GATHER_INTO_TENSOR = declare(
    "all_gather_into_tensor",
    "(Tensor input, int group_size, str group_name, int dim=0, SymInt[]? sizes=None) -> Tensor",
    check=check_gathers,
    shape=gathered,
    run=run_all_gather,
    adjoint=_all_gather_adjoint,
    stacked=_stacked_all_gather_into_tensor,
    uneven=_uneven_all_gather,
    wire_bytes=wire.ring,
    steps=wire.n_minus_1,
    replicates=True,
    own_dim=_own_dim,
    targets=torch_ops("all_gather_into_tensor", "_c10d_functional_autograd"),
    contiguous=True,
    native=Native(kernel=True, fast=("x", "group", "dim"), arena="whole"),
)


# -- gather: to one rank ---


def _check_gather(
    op: str, input: Tensor, dst: int, group_size: int, group_name: str,
    dim: int = 0, sizes: Sizes = None,
) -> None:  # fmt: skip
    check_rank(op, "dst", dst, group_name)
    check_gathers(op, input, group_size, group_name, dim, sizes)


def _run_gather(
    input: Tensor, dst: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> Tensor:
    g = by_name(group_name)
    x = input.reshape(1) if input.dim() == 0 else input
    out = input.new_zeros(gathered(input, g.n, dim, sizes))
    if g.n == 1:
        out.copy_(x)
        return out
    lengths = sizes or [x.shape[dim]] * g.n
    shapes = [resized(x.shape, dim, s) for s in lengths]
    receive = [math.prod(s) if g.rank == dst else 0 for s in shapes]
    send = [x.numel() if r == dst else 0 for r in range(g.n)]
    received = x.new_empty(sum(receive))
    work = carrier_of(g, x.device).exchange(received, flat(x), g, receive, send)
    if g.rank != dst:
        return issued(out, work)
    parts = [p.view(s) for p, s in zip(received.split(receive), shapes, strict=True)]
    return issued(out, work, lambda: concat(out, parts, dim, lengths))


def _gather_adjoint(grad: Tensor, a: Call) -> Tensor:
    back = a.call("scatter", grad, a.dst, a.group_size, a.group_name, a.dim, a.sizes)
    return back.reshape(a.input_shape)


@stacks.rule(moves=True)
def _stacked_gather(x_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    stacks.check_even_sizes("gather", args)
    dst = check_member("gather", "dst", args["dst"], groups.n)
    parts = groups.members(stacks.at_least_1d(x_W))
    return groups.only_on(dst, stacks.joined(parts, args.get("dim", 0)))


GATHER = declare(
    "gather",
    "(Tensor input, int dst, int group_size, str group_name, int dim=0,"
    " SymInt[]? sizes=None) -> Tensor",
    check=_check_gather,
    shape=gathered,
    run=_run_gather,
    adjoint=_gather_adjoint,
    stacked=_stacked_gather,
    wire_bytes=wire.ring,
    steps=wire.n_minus_1,
    own_dim=_own_dim,
)


# -- scatter: from one rank ---


def _check_scatter(
    op: str, input: Tensor, src: int, group_size: int, group_name: str,
    dim: int = 0, sizes: Sizes = None,
) -> None:  # fmt: skip
    check_rank(op, "src", src, group_name)
    check_scatters(op, input, group_size, group_name, dim, sizes)


def _run_scatter(
    input: Tensor, src: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> Tensor:
    g = by_name(group_name)
    out = input.new_empty(scattered(input, g.n, group_name, dim, sizes))
    if g.n == 1:
        out.copy_(input)
        return out
    parts = input.split(list(sizes), dim) if sizes else input.chunk(g.n, dim)
    send = [p.numel() if g.rank == src else 0 for p in parts]
    sent = torch.cat([p.reshape(-1) for p in parts]) if g.rank == src else input.new_empty(0)
    receive = [out.numel() if r == src else 0 for r in range(g.n)]
    return issued(out, carrier_of(g, out.device).exchange(out.view(-1), sent, g, receive, send))


def _scatter_adjoint(grad: Tensor, a: Call) -> Tensor:
    return a.call("gather", grad, a.src, a.group_size, a.group_name, a.dim, a.sizes)


@stacks.rule(moves=True)
def _stacked_scatter(x_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    stacks.check_even_sizes("scatter", args)
    src = check_member("scatter", "src", args["src"], groups.n)
    return groups.placed(stacks.cut(groups.members(x_W)[src], args.get("dim", 0), groups.n))


SCATTER = declare(
    "scatter",
    "(Tensor input, int src, int group_size, str group_name, int dim=0,"
    " SymInt[]? sizes=None) -> Tensor",
    check=_check_scatter,
    shape=scattered,
    run=_run_scatter,
    adjoint=_scatter_adjoint,
    stacked=_stacked_scatter,
    wire_bytes=wire.ring,
    steps=wire.n_minus_1,
)


# -- broadcast ---


def _check_broadcast(op: str, input: Tensor, src: int, group_name: str) -> None:
    check_device(op, input.device.type, group_name)
    check_rank(op, "src", src, group_name)


def _run_broadcast(input: Tensor, src: int, group_name: str) -> Tensor:
    g = by_name(group_name)
    own = g.rank == src  # new_empty and copy_ would take twice the time of a clone
    out = (
        input.clone(memory_format=torch.contiguous_format) if own else input.new_empty(input.shape)
    )
    if g.n == 1:
        return out
    return issued(out, carrier_of(g, out.device).broadcast_(out, src, g))


def _broadcast_adjoint(grad: Tensor, a: Call) -> Tensor:
    return a.call("reduce", grad, "sum", a.src, a.group_name)


def _transposed_broadcast(G_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    return stacks.on_one(G_W, "sum", args["src"], groups)


@stacks.rule(moves=True, transposed=_transposed_broadcast)
def _stacked_broadcast(x_W: Tensor, args: stacks.Args, groups: Partition) -> Tensor:
    src = check_member("broadcast", "src", args["src"], groups.n)
    return stacks.on_all(x_W, src, groups)


def _uneven_broadcast(xs: list[Tensor], args: list[dict[str, Any]]) -> list[Tensor]:
    return pieces.only(pieces.received("broadcast", [[x] for x in xs], root=args[0]["src"]))


BROADCAST = declare(
    "broadcast",
    "(Tensor input, int src, str group_name) -> Tensor",
    check=_check_broadcast,
    shape=same,
    run=_run_broadcast,
    adjoint=_broadcast_adjoint,
    stacked=_stacked_broadcast,
    uneven=_uneven_broadcast,
    wire_bytes=wire.everything,
    steps=wire.n_minus_1,
    one_shot_bytes=wire.to_each,
    replicates=True,
    targets=torch_ops("broadcast"),
    native=Native(kernel=True, fast=("x", "src", "group")),
)

ROWS = (ALL_GATHER_INTO_TENSOR, GATHER, SCATTER, BROADCAST)
