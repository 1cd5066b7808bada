"""Changes of a graph that several passes make."""

from __future__ import annotations

from torch.fx import Node


def replace(node: Node, by: Node) -> None:
    """Use one value wherever another one was, and remove the node of that."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
