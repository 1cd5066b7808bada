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
        self._made_by: dict[Node, Node] = {}  # the node that made the memory that a value lies in
        self._writes: dict[Node, list[int]] = {}  # where that memory is written to
        for node in graph.nodes:
            self._note(node)

    def _note(self, node: Node) -> None:
        written = [arguments(node)[name] for _, name in _torch.op_writes(node.target)]
        written = [x for x in written if isinstance(x, Node)]
        views = is_wait(node) or node.target is operator.getitem or _torch.op_is_view(node.target)
        source = written[0] if written else node.args[0] if views and node.args else node
        self._made_by[node] = self._made_by.get(source, node)  # type: ignore[call-overload]
        for x in written:
            self._writes.setdefault(self._made_by[x], []).append(self._place[node])

    def is_kept(self, node: Node, reader: Node) -> bool:
        """Does the reader see what the node made: nobody writes to it between, maybe by a view."""
        begin, end = self._place[node], self._place[reader]
        return not any(begin < i < end for i in self._writes.get(self._made_by[node], ()))
