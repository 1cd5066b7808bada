"""An order of steps -> an order of all nodes of the graph: views and sizes in between."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import SymBool, SymFloat, SymInt
from torch.fx import GraphModule, Node


def node_order(graph_module: GraphModule, steps: Iterable[str]) -> list[Node]:
    """Inputs come first and the output last. Views come right before their first use; what gives no
    tensor, and elements of lists, right after what they are of: they keep no memory then."""
    nodes = list(graph_module.graph.nodes)
    by_name = {node.name: node for node in nodes}
    steps = list(steps)
    placing = _Placing(set(steps))
    for node in nodes:
        if node.op == "placeholder":
            placing.place(node)
    for name in steps:
        placing.place(by_name[name])
    for node in nodes:
        if node.op != "output":
            placing.place(node)
    return [*placing.order, *(n for n in nodes if n.op == "output")]


class _Placing:
    def __init__(self, steps: set[str]) -> None:
        self.steps = steps
        self.order: list[Node] = []
        self.done: set[Node] = set()

    def place(self, node: Node) -> None:
        """A node, and before it all that it needs. No recursion: chains of views may be long."""
        stack, done = [node], self.done
        while stack:
            at = stack[-1]
            if at in done:
                stack.pop()
                continue
            if missing := [n for n in at.all_input_nodes if n not in done]:
                stack.extend(missing)
                continue
            stack.pop()
            done.add(at)
            self.order.append(at)
            stack.extend([user for user in at.users if self.comes_along(user)])

    def comes_along(self, node: Node) -> bool:
        """Is it a number or an element of a list, of which all is there?"""
        if node in self.done or node.name in self.steps or not _is_light(node):
            return False
        return self.done.issuperset(node.all_input_nodes)


def _is_light(node: Node) -> bool:
    """An element of a list, or something that gives a number: it keeps no memory."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.meta.get("val"), (int, float, bool, SymInt, SymFloat, SymBool))
