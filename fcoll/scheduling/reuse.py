"""Collectives that a program runs twice on the same data: the second is left out.

Sharded parameters are gathered for the forward and again for the backward pass, and so are the
activations of sequence parallelism: the result was freed meanwhile to save memory. Where the cap
leaves room it is kept instead. So sets of such collectives are proposed, planned like any graph,
and taken if the plan is faster (graph_changes.py).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fcoll.graph import _torch
from fcoll.graph.nodes import (
    effect_of,
    has_named_group,
    is_start,
    is_wait,
    row_of_node,
    waits_of,
    written_by,
)
from fcoll.scheduling.rewrite import Rewrite

aten = torch.ops.aten
#: What may lie between a tensor and the collective that sends it: it is looked through.
_PREPARES = {aten._to_copy.default, aten.clone.default, aten.cat.default}
DEPTH = 6  # of such ops in a row


@dataclass(frozen=True)
class Reuse:
    """A collective that is left out. ``collective`` is its start, ``instead`` the start of the one
    whose result is used; ``nodes`` are all nodes that are gone, each with the one that has its
    value."""

    collective: str
    instead: str
    nodes: tuple[tuple[str, str], ...]


# -- which ---


def repeated(graph_module: GraphModule) -> list[Reuse]:
    """Every collective that has run before on the same data, each with the last one that has."""
    nodes = list(graph_module.graph.nodes)
    memory = _Memory(nodes)
    last: dict[Any, Node] = {}
    found = []
    for node in nodes:
        if not _is_plain(node):
            continue
        key = _key(node)
        before = last.get(key)
        last[key] = node
        if before is not None and memory.is_safe(before, node):
            pairs = {node.name: before.name, waits_of(node)[0].name: waits_of(before)[0].name}
            _with_inputs(node, before, pairs)
            found.append(Reuse(node.name, before.name, tuple(pairs.items())))
    return found


def by_room(
    found: Sequence[Reuse], graph_module: GraphModule, us: Mapping[str, float]
) -> list[Reuse]:
    """Those first that save most for what they hold, and how long they hold it."""
    by_name = {node.name: node for node in graph_module.graph.nodes}
    at, now = {}, 0.0
    for node in graph_module.graph.nodes:
        at[node.name] = now
        now += us.get(node.name, 0.0)

    def price(reuse: Reuse) -> float:
        first = waits_of(by_name[reuse.instead])[0]
        used = max((at[user.name] for user in first.users), default=at[first.name])
        val = first.meta["val"]
        held = val.numel() * val.element_size() * max(at[reuse.collective] - used, 0.0)
        return held / max(us.get(reuse.collective, 0.0), 1e-9)

    return sorted(found, key=price)


def _is_plain(node: Node) -> bool:
    """A collective that gives one new tensor, and nothing but one wait takes it."""
    row = row_of_node(node)
    if row is None or row.is_wait or row.is_p2p or row.side_effect or row.functional:
        return False
    if _torch.op_writes(node.target) or not has_named_group(node):
        return False
    waits = waits_of(node)
    return len(waits) == 1 and list(node.users) == waits


def _key(node: Any, depth: int = DEPTH) -> Any:
    """Equal of nodes that compute the same, if no memory is written meanwhile."""
    if not isinstance(node, Node):
        return node
    if not depth or not (is_start(node) or _prepares(node)):
        return node
    below: list[Any] = []

    def give(x: Node) -> str:
        below.append(_key(x, depth - 1))
        return "_"

    shown = repr(map_arg((node.args, node.kwargs), give))
    return (node.target, shown, tuple(below))


def _prepares(node: Node) -> bool:
    if node.op != "call_function" or effect_of(node) or _torch.op_writes(node.target):
        return False
    return _torch.op_is_view(node.target) or node.target in _PREPARES


def _with_inputs(node: Node, other: Node, pairs: dict[str, str]) -> None:
    """What only the collective that is left out needs is gone with it."""
    for mine, theirs in zip(node.all_input_nodes, other.all_input_nodes, strict=True):
        if mine is not theirs and all(user.name in pairs for user in mine.users):
            pairs[mine.name] = theirs.name
            _with_inputs(mine, theirs, pairs)


class _Memory:
    """Who writes to what. Two inputs of the graph may be one memory."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.place = {node: i for i, node in enumerate(nodes)}
        self.writes: dict[Node | None, list[int]] = {}  # by root; None: an input of the graph
        for i, node in enumerate(nodes):
            for x in _written(node):
                self.writes.setdefault(_root(x), []).append(i)

    def is_safe(self, kept: Node, left_out: Node) -> bool:
        """Is what they send the same, and does nobody write to what they give?"""
        results = (waits_of(kept)[0], waits_of(left_out)[0])
        if any(map(_leaves_or_is_written, results)):
            return False
        leaves = list(_leaves(kept))
        begin = min((self.place[x] for x in _chain(kept)), default=0)
        end = self.place[left_out]
        return not any(begin < i < end for leaf in leaves for i in self.writes.get(_root(leaf), ()))


def _chain(node: Node, depth: int = DEPTH) -> Iterator[Node]:
    """A collective, and what prepares what it sends."""
    yield node
    for x in node.all_input_nodes:
        if depth and _prepares(x):
            yield from _chain(x, depth - 1)


def _leaves(node: Node) -> set[Node]:
    chain = set(_chain(node))
    return {x for n in chain for x in n.all_input_nodes if x not in chain}


def _root(node: Node) -> Node | None:
    """The node whose memory a value is; None: an input of the graph."""
    while node.op == "call_function" and node.all_input_nodes and _is_alias(node):
        node = node.all_input_nodes[0]
    return None if node.op in ("placeholder", "get_attr") else node


def _is_alias(node: Node) -> bool:
    if node.target is operator.getitem or is_wait(node):
        return True
    return _torch.op_is_view(node.target) or bool(_torch.op_writes(node.target))


def _written(node: Node) -> list[Node]:
    """The arguments that a call writes to; a wait only completes its own."""
    return [] if node.op != "call_function" or is_wait(node) else written_by(node)


def _leaves_or_is_written(result: Node) -> bool:
    """Does a result leave the graph, or is it written to, itself or as a view?"""
    seen, todo = {result}, [result]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.op == "output" or node in _written(user):
                return True
            if user.op != "call_function" or effect_of(user) == "barrier":
                return True
            if user not in seen and _is_alias(user):
                seen.add(user)
                todo.append(user)
    return False


# -- how ---


def without(graph_module: GraphModule, reuses: Sequence[Reuse]) -> GraphModule:
    """A new graph without the collectives that are left out."""
    rewrite = Rewrite(graph_module)
    gone = {name: instead for reuse in reuses for name, instead in reuse.nodes}
    for node in graph_module.graph.nodes:
        if node.name in gone:
            rewrite.made[node] = rewrite.made[rewrite.by_name[gone[node.name]]]
        else:
            rewrite.copy(node)
    return rewrite.finish()
