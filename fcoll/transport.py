"""How bytes move: over shared memory where the group has it, else on its c10d process group.

Shared memory is done when the function returns, and takes the common dtypes as they are. On a
process group the functions start the communication and return a Work. What a backend cannot do by
itself (avg on gloo, bool, complex, narrow types) is done in a wire form that it can, and undone in
a ``finish`` that runs when the result is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch
from fcoll.groups import Group
from fcoll.reductions import REDUCTIONS, Reduction, fold
from fcoll.symm_mem import handle_of

Finish = Callable[[], object]

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


# What shared memory reduces, as it is.
_SHARED = NATIVE | {torch.int16, torch.bool}

Started = tuple[dist.Work | None, Finish | None]
_DONE: Started = (None, None)


def _shared(x: Tensor, g: Group) -> int:
    """The handle of the group's shared memory if it serves x, else 0."""
    return handle_of(g) if x.device.type == "cpu" else 0


def _shared_to_reduce(x: Tensor, g: Group) -> int:
    fits = x.dtype in _SHARED or (x.is_complex() and x.dtype.itemsize > 4)
    return _shared(x, g) if fits else 0


class Then(dist.Work):
    """Waits for its works, then runs ``finish``: once, whoever waits first.

    Once, because a second wait for a gloo send waits for a second send.
    """

    def __init__(self, works: Sequence[dist.Work], finish: Finish | None = None) -> None:
        super().__init__()
        self.works = works
        self.finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        works, self.works = self.works, ()
        for work in works:
            if timeout:
                work.wait(timeout)
            else:
                work.wait()
        finish, self.finish = self.finish, None
        if finish:
            with torch.no_grad():
                finish()
        return True


def issued(out: Tensor, work: dist.Work | None, finish: Finish | None = None) -> Tensor:
    """Tie the work to the tensor, for wait_tensor to find; without one the bytes are here."""
    if work is not None:
        _torch.register_work(out, Then([work], finish) if finish else work)
    elif finish:
        finish()
    return out


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
    """Reduce the contiguous buf in place."""
    if handle := _shared_to_reduce(buf, g):
        torch.ops.fcoll_native.all_reduce_(buf, row.name, handle)
        return _DONE
    wire = wire_form(buf, row, g)
    if wire is None:
        parts = buf.new_empty((g.n, *buf.shape))
        return all_gather(parts, buf, g), lambda: buf.data.copy_(fold(row, parts))
    view, op, divide = wire
    opts = dist.AllreduceOptions()
    opts.reduceOp = op
    work = g.pg.allreduce([view], opts)
    return work, (lambda: buf.data.div_(g.n)) if divide else None


def reduce_scatter(out: Tensor, chunks: Tensor, row: Reduction, g: Group) -> Started:
    """Reduce the contiguous chunks [n, *out.shape] over the ranks, chunk r to rank r."""
    if handle := _shared_to_reduce(chunks, g):
        torch.ops.fcoll_native.reduce_scatter_(out, chunks, row.name, handle)
        return _DONE
    wire = wire_form(chunks, row, g)
    if wire is None:
        parts = torch.empty_like(chunks)
        return exchange(parts, chunks, g), lambda: out.data.copy_(fold(row, parts))
    view, op, divide = wire
    opts = dist.ReduceScatterOptions()
    opts.reduceOp = op
    out_view = torch.view_as_real(out) if out.is_complex() else out.view(view.dtype)
    work = g.pg._reduce_scatter_base(out_view.view(-1), view.view(-1), opts)
    return work, (lambda: out.data.div_(g.n)) if divide else None


def all_gather(out: Tensor, x: Tensor, g: Group) -> dist.Work | None:
    """Gather contiguous x of every rank into the contiguous out, in rank order."""
    if handle := _shared(x, g):
        torch.ops.fcoll_native.all_gather_(out, x, handle)
        return None
    return g.pg._allgather_base(in_bytes(out).view(-1), in_bytes(x).view(-1))


def exchange(
    out: Tensor,
    x: Tensor,
    g: Group,
    output_splits: Sequence[int] = (),
    input_splits: Sequence[int] = (),
) -> dist.Work | None:
    """Send split r of x's rows to rank r and receive its split for us; even without splits."""
    if handle := _shared(x, g):
        torch.ops.fcoll_native.exchange_(out, x, output_splits, input_splits, handle)
        return None
    return g.pg.alltoall_base(
        rows_in_bytes(out), rows_in_bytes(x), list(output_splits), list(input_splits)
    )


def broadcast_(buf: Tensor, src: int, g: Group) -> dist.Work | None:
    if handle := _shared(buf, g):
        torch.ops.fcoll_native.broadcast_(buf, src, handle)
        return None
    opts = dist.BroadcastOptions()
    opts.rootRank = src
    return g.pg.broadcast([in_bytes(buf)], opts)


def barrier(g: Group) -> dist.Work | None:
    if handle := handle_of(g):
        torch.ops.fcoll_native.barrier(handle)
        return None
    return g.pg.barrier()


def reduce_(buf: Tensor, dst: int, row: Reduction, g: Group) -> Started:
    """Reduce buf in place on dst; on the other ranks it is scratch."""
    wire = wire_form(buf, row, g)
    if wire is None or _shared_to_reduce(buf, g):
        return all_reduce_(buf, row, g)
    view, op, divide = wire
    opts = dist.ReduceOptions()
    opts.reduceOp = op
    opts.rootRank = dst
    work = g.pg.reduce([view], opts)
    return work, (lambda: buf.data.div_(g.n)) if divide else None
