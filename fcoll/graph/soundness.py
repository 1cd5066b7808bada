"""Is a graph still one whose collectives are sound? Asked between passes that change it."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, Node

from fcoll.errors import NeverWaited
from fcoll.graph.nodes import arguments, collectives, describe, has_named_group, is_wait
from fcoll.groups import by_name
from fcoll.table.row import Collective


def verify(graph: Graph, is_complete: Callable[[Node], bool] = lambda node: False) -> None:
    """Raise unless every value is defined before it is used, and everything that is in flight is
    waited for. ``is_complete`` names starts whose result needs no wait."""
    graph.lint()
    for node, row in collectives(graph):
        if is_complete(node) or _needs_no_wait(node, row):
            continue
        if not any(is_wait(user) for user in node.users):
            raise NeverWaited(what=describe(node))


def _needs_no_wait(node: Node, row: Collective) -> bool:
    if row.mutates or row.on_lists or row.side_effect or not node.users:
        return True
    group = arguments(node).get("group_name")
    return group is None or (has_named_group(node) and by_name(group).n == 1)
