"""Register fcoll's ops in the parts of torch's compiler once they are imported, so that fcoll
works under stock Inductor and AOTAutograd (``fcoll/plugins.py``)."""

from __future__ import annotations

from operator import getitem

from torch.fx import Node

from fcoll.graph.nodes import is_start, is_wait, row_of_node
from fcoll.table.row import Collective
from inductor_ext.stock import _torch


def teach_inductor() -> None:
    """Have Inductor know all rows before each compile."""
    _torch.before_compiles(_add_rows)


def _add_rows() -> None:
    from inductor_ext.stock.inductor import add_rows  # needs all of Inductor

    add_rows()


def teach_partitioner() -> None:
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
