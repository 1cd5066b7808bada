"""Decisions that all ranks take alike: by values that a collective over all of them has made equal.

A value is the result of such a collective, or computed of such results and of plain numbers alone.
It has a digest, by which the decisions of different ranks are known to be the same one.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from hashlib import sha1
from typing import Any

import torch.distributed as dist
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fcoll.graph import _torch
from fcoll.graph.aliasing import Memory
from fcoll.graph.nodes import arguments, is_wait, row_of_node

SYMBOL = re.compile(r"\b(?:u|zuf)\d+\b")


def digest_of(condition: Any, graph: Graph) -> str | None:
    """The digest of a condition in which symbols stand for values that a graph has read; None if
    ranks may have different ones."""
    digests = _Digests(graph)
    values = {name: digests.of_symbol(name) for name in SYMBOL.findall(repr(condition))}
    if not values or None in values.values():
        return None
    return _digest(SYMBOL.sub(lambda match: str(values[match[0]]), repr(condition)))


def _digest(facts: Any) -> str:
    return sha1(repr(facts).encode(), usedforsecurity=False).hexdigest()


class _Digests:
    """The digests of all values in a graph that are the same on all ranks."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.memory = graph, Memory(graph)
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.calls: Counter[Any] = Counter()
        self.digests: dict[Node, str] = {}
        for node in graph.nodes:
            identity = self._identity(node) if node.op == "call_function" else None
            if identity is not None:
                self.digests[node] = _digest(identity)

    def of_symbol(self, name: str) -> str | None:
        births = (n for n in self.graph.nodes if name in _torch.symbols_of(n.meta.get("val")))
        birth = next(births, None)
        return None if birth is None else self.of(birth.args[0], birth)

    def of(self, node: Any, reader: Node) -> str | None:
        if not isinstance(node, Node) or node not in self.digests:
            return None
        return self.digests[node] if self.memory.is_kept(node, reader) else None

    def _identity(self, node: Node) -> Any:
        """The identity of a value among all others, if it is the same on all ranks."""
        row = row_of_node(node)
        if row is not None and not row.is_wait:
            group, instance = node.meta.get("group", (None, 0))
            self.calls[group and group.name] += 1
            if not row.replicates or group is None or group.n < self.size:
                return None
            return "result", instance, self.calls[group.name]
        read = {x: self.of(x, node) for x in node.all_input_nodes}
        name = _torch.op_name(node.target)
        if name == "aten::copy_":
            return read.get(arguments(node)["src"])
        if None in read.values():
            return None
        if is_wait(node):
            return next(iter(read.values()), None)
        if node.target is not operator.getitem and not _is_determined(node):
            return None
        return name, repr(map_arg((node.args, node.kwargs), lambda x: read[x]))


def _is_determined(node: Node) -> bool:
    """Is the result known by the arguments?"""
    op = node.target
    return not _torch.op_is_random(op) and not _torch.op_only_allocates(op)
