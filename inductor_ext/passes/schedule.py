"""``schedule``: collectives start early and are waited for late, so that work overlaps them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node

from fcoll.graph.nodes import collectives, is_wait, row_of_node
from inductor_ext.config import config


def schedule(graph: Graph) -> list[str]:
    """Move a start right after what it sends, but after all starts before it, and a wait right
    before its first use. What a collective sends is freed no later for that if it is read in
    place, since its memory is the arena's: others stay where they are."""
    if not config.overlap:
        return []
    return [*_starts_early(graph), *_waits_late(graph)]


def _starts_early(graph: Graph) -> Iterator[str]:
    last: Node | None = None  # the ranks of a group start collectives in one order
    for node, row in collectives(graph):
        after = [*node.all_input_nodes, *([last] if last is not None else [])]
        last = node
        if row.native.arena is None or not after:
            continue
        latest = max(after)
        if latest.op == "call_function" and latest.next is not node:
            yield f"{node.name}: right after {latest.name}"
            latest.append(node)


def _waits_late(graph: Graph) -> Iterator[str]:
    for node in list(graph.nodes):
        if is_wait(node) and node.users and _may_be_read_in_place(node.args[0]):
            first = min(node.users)
            if node.next is not first:
                yield f"{node.name}: right before {first.name}"
                first.prepend(node)


def _may_be_read_in_place(node: Any) -> bool:
    row = row_of_node(node)
    return row is not None and row.native.arena is not None
