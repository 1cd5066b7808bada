"""Does a graph without repeated collectives compute what the graph that came in does?

Asked of every plan that leaves some out, by code that shares nothing with what chooses them. Two
nodes are *the same* if they are the same call, on inputs that are the same, and nothing in between
can have changed the memory that they read; nobody may write to the result, which now has two
readers, and it must not leave the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node

from fcoll.graph.nodes import row_of_node

Fail = Callable[[str], NoReturn]


def check_reuse(
    source: GraphModule, changed: GraphModule, reuses: Sequence[Any], fail: Fail
) -> None:
    """``changed`` is ``source`` without the nodes that ``reuses`` name."""
    _Check(source, reuses, fail).run(changed)


class _Check:
    def __init__(self, source: GraphModule, reuses: Sequence[Any], fail: Fail) -> None:
        self.fail = fail
        self.nodes = list(source.graph.nodes)
        self.by_name = {node.name: node for node in self.nodes}
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.gone = {name: instead for reuse in reuses for name, instead in reuse.nodes}
        self.memory = _memory_of(self.nodes)
        self.written = [(i, self.lies_in(_writes(node))) for i, node in enumerate(self.nodes)]
        self.written = [(i, where) for i, where in self.written if where]
        self.leaves = self.lies_in(x for n in self.nodes if n.op == "output" for x in _inputs(n))

    def run(self, changed: GraphModule) -> None:
        for name, instead in self.gone.items():
            node, other = self.by_name.get(name), self.by_name.get(instead)
            if node is None or other is None or self.place[other] >= self.place[node]:
                self.fail(f"{name} has nothing before it to be left out for")
            self.check_pair(node, other)
        left = [node for node in self.nodes if node.name not in self.gone]
        there = list(changed.graph.nodes)
        if [node.name for node in left] != [node.name for node in there]:
            self.fail("another node than those that are the same is gone, or new")
        for node, now in zip(left, there, strict=True):
            inputs = [self.same(x.name) for x in _inputs(node)]
            if _call(node) != _call(now) or inputs != [x.name for x in _inputs(now)]:
                self.fail(f"{node.name} takes other values than it did")

    def same(self, name: str) -> str:
        while name in self.gone:
            name = self.gone[name]
        return name

    def check_pair(self, node: Node, other: Node) -> None:
        mine = [self.same(x.name) for x in _inputs(node)]
        if _call(node) != _call(other) or mine != [self.same(x.name) for x in _inputs(other)]:
            self.fail(f"{node.name} is not what {other.name} is")
        row = row_of_node(node)
        if row is None and not str(node.target).startswith("aten."):
            self.fail(f"{node.name} may do more than give a value")
        if row is not None and (row.is_p2p or (row.side_effect and not row.is_wait)):
            self.fail(f"{node.name} may not be left out")
        waits = row is not None and row.is_wait
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if random or (_writes(node) and not waits):
            self.fail(f"{node.name} gives another value each time, or writes")
        self.check_memory(node, other)

    def check_memory(self, node: Node, other: Node) -> None:
        if row_of_node(node) is not None and {node, other} & self.leaves:
            self.fail(f"{node.name}: what it gives leaves the graph")
        read = self.lies_in((*_inputs(node), *_inputs(other)))
        first, last = self.place[other], self.place[node]
        for at, where in self.written:
            if where & {node, other} or (first < at < last and where & read):
                self.fail(f"{node.name}: {self.nodes[at].name} writes to its memory")

    def lies_in(self, values: Iterable[Node]) -> frozenset[Any]:
        """The memory that these values may lie in."""
        return frozenset().union(*(self.memory[x] for x in values))


def _memory_of(nodes: Sequence[Node]) -> dict[Node, frozenset[Any]]:
    """The memory that each value may lie in: its own, or that of the arguments it may alias. All
    inputs of the graph count as one: two of them may be the same tensor."""
    found: dict[Node, frozenset[Any]] = {}
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            found[node] = frozenset(["inputs"])
            continue
        mine: frozenset[Any] = frozenset([node])
        schema = getattr(node.target, "_schema", None)
        row = row_of_node(node)
        aliases = schema is None or any(r.alias_info for r in schema.returns)
        if aliases or (row is not None and row.is_wait):
            mine = frozenset().union(*(found[x] for x in _inputs(node)), [node])
        found[node] = mine
    return found


def _writes(node: Node) -> list[Node]:
    """The inputs that a call may write to; of a call that says nothing of it, all."""
    if node.op != "call_function":
        return [] if node.op in ("placeholder", "get_attr", "output") else _inputs(node)
    schema, row = getattr(node.target, "_schema", None), row_of_node(node)
    if schema is None or (row is not None and row.is_wait):
        return []
    found: list[Node] = []
    for i, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
            torch.fx.map_arg(given, found.append)
    return found


def _inputs(node: Node) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _call(node: Node) -> tuple[Any, ...]:
    literals = repr(torch.fx.map_arg((node.args, node.kwargs), lambda _: None))
    return node.op, node.target, literals
