"""The carrier that every group has: its c10d process group.

What a backend cannot do by itself (avg on gloo, bool, complex, narrow types) is done in a wire form
that it can.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch
from fcoll.groups import Group
from fcoll.reductions import REDUCTIONS, Reduction
from fcoll.transport import messages
from fcoll.transport.protocol import (
    Started,
    Transfer,
    all_reduce_by_gather,
    reduce_scatter_by_exchange,
)

# What every c10d backend sends and reduces; all else travels as bytes or is folded here.
NATIVE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)

_self: Any = sys.modules[__name__]  # this module as a Carrier


def in_bytes(x: Tensor) -> Tensor:
    """The contiguous tensor in a dtype the backend moves: itself, or its bytes."""
    return x if x.dtype in NATIVE else _bytes(x, (x.numel(),))


def rows_in_bytes(x: Tensor) -> Tensor:
    """Like in_bytes, keeping dim 0 as the unit of splits."""
    if x.dtype in NATIVE:
        return x
    return _bytes(x, (x.shape[0], math.prod(x.shape[1:])))


def _bytes(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    # as_strided: one element is contiguous with any stride, and view wants its stride to be 1
    strides = (1,) if len(shape) == 1 else (shape[1], 1)
    return x.as_strided(shape, strides).view(torch.uint8)


def wire_form(buf: Tensor, row: Reduction, g: Group) -> tuple[Tensor, Any, bool] | None:
    """(a view of buf, the c10d op on it, must it be divided by n) that reduce buf; None if the
    backend has no such reduction."""
    if buf.dtype == torch.bool and row.on_bool:
        return buf.view(torch.uint8), REDUCTIONS[row.on_bool].c10d, False
    if buf.is_complex() and row.name in ("sum", "avg"):
        buf = torch.view_as_real(buf)
    if buf.dtype not in NATIVE:
        return None
    if row.name == "avg" and not _torch.has_native_avg(g.pg, buf.device):
        return buf, REDUCTIONS["sum"].c10d, True
    return buf, row.c10d, False


def all_reduce_(buf: Tensor, row: Reduction, g: Group) -> Started:
    wire = wire_form(buf, row, g)
    if wire is None:
        return all_reduce_by_gather(_self, buf, row, g)
    view, op, divide = wire
    opts = dist.AllreduceOptions()
    opts.reduceOp = op
    work = g.pg.allreduce([view], opts)
    return work, (lambda: view.data.div_(g.n)) if divide else None


def reduce_(buf: Tensor, dst: int, row: Reduction, g: Group) -> Started:
    wire = wire_form(buf, row, g)
    if wire is None:
        return all_reduce_(buf, row, g)
    view, op, divide = wire
    opts = dist.ReduceOptions()
    opts.reduceOp = op
    opts.rootRank = dst
    work = g.pg.reduce([view], opts)
    return work, (lambda: view.data.div_(g.n)) if divide else None


def reduce_scatter(out: Tensor, chunks: Tensor, row: Reduction, g: Group) -> Started:
    wire = wire_form(chunks, row, g)
    if wire is None:
        return reduce_scatter_by_exchange(_self, out, chunks, row, g)
    view, op, divide = wire
    opts = dist.ReduceScatterOptions()
    opts.reduceOp = op
    out_view = torch.view_as_real(out) if out.is_complex() else out.view(view.dtype)
    work = g.pg.reduce_scatter_single(out_view.view(-1), view.view(-1), opts)
    return work, (lambda: out_view.data.div_(g.n)) if divide else None


def all_gather(out: Tensor, x: Tensor, g: Group) -> dist.Work | None:
    return g.pg.all_gather_single(in_bytes(out).view(-1), in_bytes(x).view(-1))


def exchange(
    out: Tensor,
    x: Tensor,
    g: Group,
    output_splits: Sequence[int] = (),
    input_splits: Sequence[int] = (),
) -> dist.Work | None:
    return g.pg.all_to_all_single(
        rows_in_bytes(out), rows_in_bytes(x), list(output_splits), list(input_splits)
    )


def broadcast_(buf: Tensor, src: int, g: Group) -> dist.Work | None:
    opts = dist.BroadcastOptions()
    opts.rootRank = src
    return g.pg.broadcast([in_bytes(buf)], opts)


def barrier(g: Group) -> dist.Work | None:
    return g.pg.barrier()


def transfer(transfers: Sequence[Transfer], g: Group) -> list[dist.Work]:
    plain = any(t.tag >= messages.PLAIN for t in transfers)
    if not plain and _torch.is_gloo(g.pg) and all(t.buf.device.type == "cpu" for t in transfers):
        sides = [(messages.Sent if t.sends else messages.Received, t) for t in transfers]
        return [side(t.buf, in_bytes(t.buf), t.peer, t.tag, g) for side, t in sides]
    ops = [
        dist.P2POp(
            dist.isend if t.sends else dist.irecv,
            in_bytes(t.buf),
            group=g.pg,
            tag=t.tag % messages.PLAIN,
            group_peer=t.peer,
        )
        for t in transfers
    ]
    return dist.batch_isend_irecv(ops)
