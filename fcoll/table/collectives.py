"""The table: one row a collective, and everything else is derived from it.

Kernels, gradients, vmap, prices, traces, checks and lowerings come from the rows. A family file
(reduce, gather, exchange, p2p) holds all that is to be known of its collectives; their forms on
lists and in place are in lists and writing; what users add comes through ``fcoll.register``.
"""

from __future__ import annotations

from typing import Any

from fcoll import _torch
from fcoll.table import exchange, gather, lists, p2p, reduce, writing
from fcoll.table.row import Collective

COLLECTIVES: dict[str, Collective] = {}
_BY_TARGET: dict[str, Collective] = {}


def add(row: Collective) -> None:
    """Put a row into the table."""
    COLLECTIVES[row.name] = row
    _BY_TARGET.update(dict.fromkeys((f"fcoll::{row.name}", *row.targets), row))


for _family in (reduce, gather, exchange, p2p, lists, writing):
    for _row in _family.ROWS:
        add(_row)


def row_of(op: Any) -> Collective | None:
    """The row that describes an op (or a graph node's target), or None if it is no collective.

    >>> row_of(torch.ops._c10d_functional.all_reduce.default).name
    'all_reduce'
    >>> row_of(torch.ops.aten.add.Tensor) is None
    True
    """
    return _BY_TARGET.get(_torch.op_name(op))


def row_named(name: str) -> Collective | None:
    """The row of the op of this name, "namespace::name"; None if it is no collective."""
    return _BY_TARGET.get(name)


def functional_row(row: Collective) -> Collective:
    """The row that returns new tensors; of one that does so already, itself."""
    return COLLECTIVES[row.functional] if row.functional else row


def single_row(row: Collective) -> Collective:
    """The row that sends the same for one tensor: of a form that writes, or of one on lists.

    >>> single_row(COLLECTIVES["all_reduce_coalesced_"]).name
    'all_reduce'
    """
    functional = functional_row(row)
    return COLLECTIVES[functional.single] if functional.single else functional
