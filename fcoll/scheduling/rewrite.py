"""A graph that is written anew, node by node: what buckets and splits have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fcoll.graph._torch import lazy_graph_module

_values: ContextVar[dict[Any, Any] | None] = ContextVar("values", default=None)


@contextmanager
def values_kept() -> Iterator[None]:
    """Graphs that are made of one another have many equal calls: their fake values are made once
    for all of them."""
    before = _values.set({})
    try:
        yield
    finally:
        _values.reset(before)


_STALE = ("tensor_meta", "val")  # of a node's meta: they are of its own value


class Rewrite:
    """``made`` has, for each node of the given graph, the one that has its value now."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.given = graph_module
        self.graph = Graph()
        self.made: dict[Node, Node] = {}
        self.by_name = {node.name: node for node in graph_module.graph.nodes}
        self.mode = fake_mode_of(graph_module.graph.nodes)
        kept = _values.get()
        self.known: dict[Any, Any] = {} if kept is None else kept

    def copy(self, node: Node) -> None:
        self.made[node] = self.graph.node_copy(node, self.whole)

    def whole(self, node: Node) -> Node:
        """The node in the new graph that has all of a given node's value."""
        return self.made[node]

    def call(self, name: str, op: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
        """Named, so that what is made again, of a plan from a file, are the same nodes. It is from
        where ``like`` is from."""
        node = self.graph.create_node("call_function", op, args, kwargs, name)
        node.meta = {k: v for k, v in like.meta.items() if k not in _STALE}
        node.meta["val"] = self.value(op, args, kwargs)
        return node

    def send(self, name: str, shape: Sequence[int], *args: Any, like: Node, **kwargs: Any) -> Node:
        """The collective, or wait, that ``like`` is, of other data: a tensor of this shape. It is
        not called: its group may be another process's."""
        node = self.graph.create_node("call_function", like.target, args, kwargs, name)
        node.meta = {k: v for k, v in like.meta.items() if k not in _STALE}
        val = like.meta["val"]
        key = ("empty", tuple(shape), val.dtype, val.device)
        if key not in self.known:
            with self.mode:
                self.known[key] = torch.empty(tuple(shape), dtype=val.dtype, device=val.device)
        node.meta["val"] = self.known[key]
        return node

    def value(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The fake value of a call. Equal calls have equal values, which are made once: it takes
        100 us."""
        key = (id(op), repr(torch.fx.map_arg((args, kwargs), self.facts)))
        if key not in self.known:
            values = torch.fx.map_arg((args, kwargs), lambda x: self.own(x.meta["val"]))
            with self.mode:
                self.known[key] = op(*values[0], **values[1])
        return self.known[key]

    def own(self, value: Any) -> Any:
        """A value in this graph's fake mode: those of a graph that was traced with real tensors
        have a mode each."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.own, value))
        if not isinstance(value, Tensor) or getattr(value, "fake_mode", None) is self.mode:
            return value
        with self.mode:
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        return made.requires_grad_(value.requires_grad)

    def facts(self, node: Node) -> _PrintedValue:
        """What a call's value depends on of one of its arguments."""
        val = node.meta["val"]
        key = ("facts", id(val))  # it is held, so no other value gets its id
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = _PrintedValue(val)
        return found

    def finish(self) -> GraphModule:
        self.graph._codegen = self.given.graph._codegen
        self.graph.lint()
        module = lazy_graph_module(self.given, self.graph)
        module.meta.update(self.given.meta)
        return module


class _PrintedValue:
    """What the value of a call depends on, printed: a tensor's sizes, strides, ..."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.text = _printed(value)

    def __repr__(self) -> str:
        return self.text


def _printed(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return str([_printed(v) for v in x])
    if not isinstance(x, Tensor):
        return repr(x)
    return f"{tuple(x.shape)}{x.stride()}{x.dtype}{x.device}{x.storage_offset()}"


def fake_mode_of(nodes: Iterable[Node]) -> Any:
    """The fake mode of a graph's values; None if they are not fake."""
    for node in nodes:
        val = node.meta.get("val")
        if (mode := getattr(val, "fake_mode", None)) is not None:
            return mode
    return None
