"""torch.distributed's own calls inside a simulation: they write each rank's result.

Each is the row that ``table/c10d.py`` says, copied into the tensors of the call. As on real ranks,
autograd does not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.errors import NotInBatch, fail
from fcoll.groups import group_size
from fcoll.reductions import PREMUL_SUM
from fcoll.simulation.batched import _torch
from fcoll.source import user_line
from fcoll.table.c10d import OPS, SEND_NOTHING, Message
from fcoll.table.collectives import COLLECTIVES, functional_row


def _refuse(why: str, hint: str) -> None:
    fail(NotInBatch, line=user_line(), why=why, hint=hint)


def _write(out: Tensor, y: Tensor) -> None:
    """Into the tensor of the call; one that all ranks share can take only what all share."""
    level = _torch.current_level()
    if _torch.is_stacked(y, level) and not _torch.is_stacked(out, level):
        why = "the tensor that is written to is one for all ranks, and their results differ"
        _refuse(why, "Make it from a tensor that differs between ranks, as in x.new_empty(shape)")
    out.copy_(y if y.shape == out.shape else y.reshape(out.shape))  # a reshape takes 6 us


def _check(op: str, message: Message) -> None:
    if COLLECTIVES[message.row].is_p2p:
        why = f"c10d::{op} is a message, which has another peer on each rank"
        _refuse(why, "Use fcoll.permute")
    if PREMUL_SUM in message.args[1:2]:
        _refuse("the factor of premul_sum is not known to the call", "Use the function of fcoll")
    if message.missing:
        hint = "All simulated ranks make one call: it needs the list, and the root is rank 0"
        _refuse(f"{message.missing} has 0 tensors", hint)


def run(
    name: str, name_of: Callable[[str], str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """c10d's op of this name; ``name_of`` gives the name of a group in the simulation."""
    if name in SEND_NOTHING:
        return None
    if name not in OPS:
        _refuse(f"it is not known which messages c10d::{name} sends", "Use a function of fcoll")

    def group(pg: Any) -> tuple[str, int]:
        found = name_of(pg.group_name)
        return found, group_size(found)

    op = OPS[name]
    with torch.no_grad():
        message = op.read(op.named(args, kwargs), group)
        _check(name, message)
        if message.outs:
            _carry_out(message)
    return op.returned(args)


def _carry_out(m: Message) -> None:
    row = functional_row(COLLECTIVES[m.row])
    where = None if m.root is None else row.position["group_name"]
    there = where and torch.ops.fcoll_simulation.rank(m.args[where]) == m.root
    for out, y in m.copies(getattr(torch.ops.fcoll, row.name)(*m.args)):
        # others than the root keep what they have
        _write(out, y if there is None else torch.where(there, y.reshape(out.shape), out))
