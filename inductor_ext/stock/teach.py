"""``teach()``: tell the parts of torch's compiler that are in use about fcoll's ops.

fcoll's fake kernels call it for every op that is traced (``fcoll/plugins.py``), so that fcoll works
under stock Inductor and AOTAutograd. It costs two dictionary lookups when there is nothing new.
"""

from __future__ import annotations

import functools
from operator import getitem

from torch.fx import Node

from fcoll.graph.nodes import is_start, is_wait, row_of_node
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective
from inductor_ext.stock import _torch

_taught: set[str] = set()  # the rows whose ops Inductor knows; users register more at any time


def teach() -> None:
    """Teach the partitioner once, and Inductor each row once; neither before it is imported."""
    if _torch.partitioner_is_loaded():
        _teach_partitioner()
    if len(_taught) < len(COLLECTIVES) and _torch.inductor_is_loaded():
        from inductor_ext.stock.inductor import add_rows

        add_rows([row for name, row in COLLECTIVES.items() if name not in _taught])
        _taught.update(COLLECTIVES)


@functools.cache
def _teach_partitioner() -> None:
    """Have AOTAutograd's partitioner run each collective where the program does, torch's own too.

    It merges equal calls, copies into the forward and into the backward graph whatever could be
    computed there, and then removes what nobody uses. But what this rank has no use for, or has
    already, others may still wait for. Untaught, it would also run a send of the forward graph once
    more in the backward graph.
    """
    _torch.patch_partitioner(_has_effect, lambda node: _source(node) is not None, is_start)


def _has_effect(node: Node) -> bool:
    row = _source(node)
    return row is not None and row.side_effect


def _source(node: Node) -> Collective | None:
    """The row of the collective that a node calls, waits for, or is an element of the result of."""
    while is_wait(node) or node.target is getitem:
        node = node.args[0]  # type: ignore[assignment]
    return row_of_node(node)
