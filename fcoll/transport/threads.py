"""The carrier between simulated ranks, which are threads of one process (fcoll/simulation).

A simulated group carries a collective out for all its ranks when the last has come. All dtypes and
reduce ops are taken as they are; a call of the table brings its signature, so that calls which
differ in any argument are told apart, as on shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcoll.groups import Group
from fcoll.reductions import Reduction
from fcoll.transport import messages
from fcoll.transport.protocol import Started, Transfer, running


def _start(g: Group, op: str, *facts: str, **part: Any) -> dist.Work:
    pg: Any = g.pg  # a SimulatedGroup
    return pg.carry(op, facts, _signature(), **part)


def _signature() -> Any:
    """What the ranks compare of the call of the table that this is part of; None if there is none:
    its row, shapes, dtypes and arguments, and how people read them."""
    if running.signed is None:
        return None
    made = running.signed()
    own = made.facts.own_dim
    shapes = [tuple(-1 if d == own else s for d, s in enumerate(x.shape)) for x in made.tensors]
    dtypes = [str(x.dtype) for x in made.tensors]
    shown = f"{made.row} of {', '.join(map(str, shapes))}"
    return made.row, tuple(shapes), tuple(dtypes), made.facts, tuple(made.more), shown


# -- the primitives ---


def all_reduce_(buf: Tensor, row: Reduction, g: Group) -> Started:
    return _start(g, "all_reduce", row.name, ins=[buf], outs=[buf], reduce_op=row.name), None


def reduce_(buf: Tensor, dst: int, row: Reduction, g: Group) -> Started:
    facts = row.name, f"to rank {dst}"
    return _start(g, "reduce", *facts, ins=[buf], outs=[buf], reduce_op=row.name, root=dst), None


def reduce_scatter(out: Tensor, chunks: Tensor, row: Reduction, g: Group) -> Started:
    ins = list(chunks.unbind())
    return _start(g, "reduce_scatter", row.name, ins=ins, outs=[out], reduce_op=row.name), None


def all_gather(out: Tensor, x: Tensor, g: Group) -> dist.Work | None:
    return _start(g, "all_gather", ins=[x], outs=_parts(out, g.n))


def exchange(
    out: Tensor,
    x: Tensor,
    g: Group,
    output_splits: Sequence[int] = (),
    input_splits: Sequence[int] = (),
) -> dist.Work | None:
    outs = out.split(list(output_splits)) if output_splits else _parts(out, g.n)
    ins = x.split(list(input_splits)) if input_splits else _parts(x, g.n)
    return _start(g, "all_to_all", ins=ins, outs=outs)


def broadcast_(buf: Tensor, src: int, g: Group) -> dist.Work | None:
    return _start(g, "broadcast", f"from rank {src}", ins=[buf], outs=[buf], root=src)


def barrier(g: Group) -> dist.Work | None:
    return _start(g, "barrier")


def transfer(transfers: Sequence[Transfer], g: Group) -> list[dist.Work]:
    pg: Any = g.pg
    return [pg.message(t.sends, t.buf, t.peer, t.tag % messages.PLAIN) for t in transfers]


def _parts(x: Tensor, n: int) -> list[Tensor]:
    """n equal parts of a contiguous tensor, as views."""
    size = x.numel() // n
    # not view(-1): one element is contiguous with any stride
    flat = x.as_strided((x.numel(),), (1,))
    return [flat[i * size : (i + 1) * size] for i in range(n)]
