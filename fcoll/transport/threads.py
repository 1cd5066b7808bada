"""The carrier between simulated ranks, which are threads of one process (fcoll/simulation).

A simulated group carries a collective out for all its ranks when the last has come. All dtypes and
reduce ops are taken as they are, so every primitive is the group's own method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcoll.groups import Group
from fcoll.reductions import Reduction
from fcoll.transport import messages
from fcoll.transport.protocol import Started, Transfer


def _options(made: Any, row: Reduction | None = None, root: int | None = None) -> Any:
    if row is not None:
        made.reduceOp = row.c10d
    if root is not None:
        made.rootRank = root
    return made


def all_reduce_(buf: Tensor, row: Reduction, g: Group) -> Started:
    return g.pg.allreduce([buf], _options(dist.AllreduceOptions(), row)), None


def reduce_(buf: Tensor, dst: int, row: Reduction, g: Group) -> Started:
    return g.pg.reduce([buf], _options(dist.ReduceOptions(), row, dst)), None


def reduce_scatter(out: Tensor, chunks: Tensor, row: Reduction, g: Group) -> Started:
    options = _options(dist.ReduceScatterOptions(), row)
    return g.pg.reduce_scatter([out], [list(chunks.unbind())], options), None


def all_gather(out: Tensor, x: Tensor, g: Group) -> dist.Work | None:
    return g.pg.allgather([_parts(out, g.n)], [x])


def exchange(
    out: Tensor,
    x: Tensor,
    g: Group,
    output_splits: Sequence[int] = (),
    input_splits: Sequence[int] = (),
) -> dist.Work | None:
    outs = list(out.split(list(output_splits))) if output_splits else _parts(out, g.n)
    ins = list(x.split(list(input_splits))) if input_splits else _parts(x, g.n)
    return g.pg.alltoall(outs, ins)


def broadcast_(buf: Tensor, src: int, g: Group) -> dist.Work | None:
    return g.pg.broadcast([buf], _options(dist.BroadcastOptions(), root=src))


def barrier(g: Group) -> dist.Work | None:
    return g.pg.barrier()


def transfer(transfers: Sequence[Transfer], g: Group) -> list[dist.Work]:
    pg: Any = g.pg  # a SimulatedGroup
    return [pg.message(t.sends, t.buf, t.peer, t.tag % messages.PLAIN) for t in transfers]


def _parts(x: Tensor, n: int) -> list[Tensor]:
    """n equal parts of a contiguous tensor, as views."""
    size = x.numel() // n
    # not view: one element is contiguous with any stride; 32 slices would take 28 us, not 13
    return list(x.as_strided((n, size), (size, 1)).unbind())
