"""How bytes move on a c10d process group: any dtype, asynchronously.

Every function starts its communication and returns a Work. What a backend cannot do by itself
(avg on gloo, bool, complex, narrow types) is done in a wire form that it can, and undone in a
``finish`` that runs when the result is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fcoll import _torch
from fcoll.groups import Group
from fcoll.reductions import REDUCTIONS, Reduction, fold

Tensor = torch.Tensor
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
_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


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
    """Tie the work to the tensor, for wait_tensor to find."""
    if work is not None:
        _torch.register_work(out, Then([work], finish) if finish else work)
    return out


def in_bytes(x: Tensor) -> Tensor:
    """The contiguous tensor in a dtype the backend moves: itself, or its bytes."""
    return x if x.dtype in NATIVE else x.reshape(-1).view(torch.uint8)


def rows_in_bytes(x: Tensor) -> Tensor:
    """Like in_bytes, keeping dim 0 as the unit of splits."""
    if x.dtype in NATIVE:
        return x
    return x.reshape(x.shape[0], math.prod(x.shape[1:])).view(torch.uint8)


def wire_form(buf: Tensor, row: Reduction, g: Group) -> tuple[Tensor, Any, bool] | None:
    """(a view of buf, the c10d op on it, must it be divided by n) that reduce buf; None if the
    backend has no such reduction."""
    if buf.dtype == torch.bool and row.on_bool:
        return buf.view(torch.uint8), REDUCTIONS[row.on_bool].c10d, False
    real = _REAL.get(buf.dtype)
    if real and row.name in ("sum", "avg"):
        buf = buf.view(real)
    if buf.dtype not in NATIVE:
        return None
    if row.name == "avg" and not _torch.has_native_avg(g.pg, buf.device):
        return buf, REDUCTIONS["sum"].c10d, True
    return buf, row.c10d, False


def all_reduce_(buf: Tensor, row: Reduction, g: Group) -> tuple[dist.Work, Finish | None]:
    """Reduce the contiguous buf in place."""
    wire = wire_form(buf, row, g)
    if wire is None:
        parts = buf.new_empty((g.n, *buf.shape))
        return all_gather(parts, buf, g), lambda: buf.data.copy_(fold(row, parts))
    view, op, divide = wire
    opts = dist.AllreduceOptions()
    opts.reduceOp = op
    work = g.pg.allreduce([view], opts)
    return work, (lambda: buf.data.div_(g.n)) if divide else None


def reduce_scatter(
    out: Tensor, chunks: Tensor, row: Reduction, g: Group
) -> tuple[dist.Work, Finish | None]:
    """Reduce the contiguous chunks [n, *out.shape] over the ranks, chunk r to rank r."""
    wire = wire_form(chunks, row, g)
    if wire is None:
        parts = torch.empty_like(chunks)
        return exchange(parts, chunks, g), lambda: out.data.copy_(fold(row, parts))
    view, op, divide = wire
    opts = dist.ReduceScatterOptions()
    opts.reduceOp = op
    out_view = out.view(view.dtype) if out.dtype != view.dtype else out
    work = g.pg._reduce_scatter_base(out_view.view(-1), view.view(-1), opts)
    return work, (lambda: out.data.div_(g.n)) if divide else None


def all_gather(out: Tensor, x: Tensor, g: Group) -> dist.Work:
    """Gather contiguous x of every rank into the contiguous out, in rank order."""
    return g.pg._allgather_base(in_bytes(out).view(-1), in_bytes(x).view(-1))


def exchange(
    out: Tensor,
    x: Tensor,
    g: Group,
    output_splits: Sequence[int] = (),
    input_splits: Sequence[int] = (),
) -> dist.Work:
    """Send split r of x's rows to rank r and receive its split for us; even without splits."""
    return g.pg.alltoall_base(
        rows_in_bytes(out), rows_in_bytes(x), list(output_splits), list(input_splits)
    )


def broadcast_(buf: Tensor, src: int, g: Group) -> dist.Work:
    opts = dist.BroadcastOptions()
    opts.rootRank = src
    return g.pg.broadcast([in_bytes(buf)], opts)


def reduce_(buf: Tensor, dst: int, row: Reduction, g: Group) -> tuple[dist.Work, Finish | None]:
    """Reduce buf in place on dst; on the other ranks it is scratch."""
    wire = wire_form(buf, row, g)
    if wire is None:
        return all_reduce_(buf, row, g)
    view, op, divide = wire
    opts = dist.ReduceOptions()
    opts.reduceOp = op
    opts.rootRank = dst
    work = g.pg.reduce([view], opts)
    return work, (lambda: buf.data.div_(g.n)) if divide else None
