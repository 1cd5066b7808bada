"""Which values of a graph lie in the same memory, and where it is written to."""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from fcoll.graph import _torch
from fcoll.graph.nodes import arguments, is_wait


class Memory:
    """The memory of the values of a graph, through views and writes in place."""

    def __init__(self, graph: Graph) -> None:
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._owner: dict[Node, Node] = {}  # the node that allocated a value's memory
        self._writes: dict[Node, list[int]] = {}  # where that memory is written to
        for node in graph.nodes:
            self._note(node)

    def _note(self, node: Node) -> None:
        targets = [arguments(node)[name] for _, name in _torch.op_writes(node.target)]
        targets = [x for x in targets if isinstance(x, Node)]
        views = is_wait(node) or node.target is operator.getitem or _torch.op_is_view(node.target)
        source = targets[0] if targets else node.args[0] if views and node.args else node
        self._owner[node] = self._owner.get(source, node)  # type: ignore[call-overload]
        for x in targets:
            self._writes.setdefault(self._owner[x], []).append(self._place[node])

    def is_kept(self, node: Node, reader: Node) -> bool:
        """Does the reader see the node's value: is there no write between them, through a view?"""
        begin, end = self._place[node], self._place[reader]
        return not any(begin < i < end for i in self._writes.get(self._owner[node], ()))
