"""Where the sizes come from that a program reads from tensors: which element of what.

Small tensors of integers are followed element by element, back through views, sums and
collectives. An element is a *term*; equal terms are equal values:

    ("own", rank, node, i)             element i of what a rank computed
    ("sent", group, k, rank, i)        element i of what a rank put into the group's k-th call
    ("same", group, k, i)              element i of a result that all ranks of the group have
    ("op", name, arguments, terms, i)  element i of what an op makes of elements
    ("sum", *terms)                    their sum
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fcoll.graph import _torch
from fcoll.graph.aliasing import Memory
from fcoll.graph.issued import SPLITS, GroupKey, Issued
from fcoll.graph.nodes import arguments, is_wait, row_of_node

Term = tuple[Any, ...]
Terms = Any  # an array of terms, or a list of arrays
CallKey = tuple[GroupKey, int]  # and which call on it

MOST_ELEMENTS = 2**16  # of a tensor that is followed: the counts of 256 ranks for one another


@dataclass(frozen=True)
class Origins:
    """Where the sizes in a rank's calls come from; empty if it reads none."""

    symbols: Mapping[str, Term] = field(default_factory=dict)  # "u3" -> the element that it is
    sent: Mapping[CallKey, tuple[Term, ...]] = field(default_factory=dict)  # put into a call


def origins_of(graph: Graph, calls: tuple[Issued, ...], rank: int) -> Origins:
    """The origins of the symbols of a trace, and of the integers that it sends to other ranks."""
    elements = _Elements(graph, calls, rank)
    symbols: dict[str, Term] = {}
    sent: dict[CallKey, tuple[Term, ...]] = {}
    for node in graph.nodes:
        name = _torch.symbol_name(node.meta.get("val"))
        if name is not None and (read := elements.of(node.args[0], node)) is not None:
            symbols[name] = read.item()
        payload = _sent_by(node) if node.name in elements.keys else None
        if payload is not None and (read := elements.of(payload, node)) is not None:
            sent[elements.keys[node.name]] = tuple(read.reshape(-1))
    return Origins(symbols, sent)


def call_keys(calls: Iterable[Issued]) -> dict[str, CallKey]:
    """Which call on its group each collective is, by the name of the node that starts it."""
    counts: Counter[GroupKey] = Counter()
    keys: dict[str, CallKey] = {}
    for call in calls:
        if not call.row.is_p2p:
            keys[call.start] = call.group_key, counts[call.group_key]
            counts[call.group_key] += 1
    return keys


def _sent_by(node: Node) -> Node | None:
    """The one tensor that a collective sends, None of one on a list."""
    tensors = [x for k, x in arguments(node).items() if isinstance(x, Node) and k != "out"]
    return tensors[0] if len(tensors) == 1 else None


# -- elements ---


class _Elements:
    """The terms of the tensors of a graph, computed on demand."""

    def __init__(self, graph: Graph, calls: tuple[Issued, ...], rank: int) -> None:
        self.rank, self.keys = rank, call_keys(calls)
        self._known: dict[Node, Terms] = {}
        self._memory = Memory(graph)

    def of(self, node: Node, reader: Node) -> Terms | None:
        """The terms of a tensor as ``reader`` sees it; None if it is too large, or written to
        between the node and its reader, maybe through a view."""
        if not _is_small(node):
            return None
        if not self._memory.is_kept(node, reader):
            return None
        if node not in self._known:
            self._known[node] = self._terms(node)
        return self._known[node]

    def _terms(self, node: Node) -> Terms:
        terms = self._received(node) if node.name in self.keys else self._computed(node)
        if terms is None:
            terms = [self._own(node, x, i) for i, x in enumerate(_parts(node))]
            return terms if isinstance(node.meta["val"], (list, tuple)) else terms[0]
        return terms

    def _own(self, node: Node, x: Tensor, part: int) -> Terms:
        name = f"{node.name}.{part}" if part else node.name
        return _array([("own", self.rank, name, i) for i in range(x.numel())], x.shape)

    def _received(self, node: Node) -> Terms | None:
        """The result of a collective, in terms of what ranks put into it."""
        row = row_of_node(node)
        key, x = self.keys[node.name], node.meta["val"]
        assert row is not None
        ranks, (payload, n) = key[0][0], (_sent_by(node), len(key[0][0]))
        gathers = row.replicates and "group_size" in row.position
        if payload is None or not isinstance(x, Tensor):
            return None
        if gathers and x.numel() == n * payload.meta["val"].numel():
            each, first = x.numel() // n, 0
        elif SPLITS[0] in row.position and _is_even(node, n):
            each = x.numel() // n
            first = each * ranks.index(self.rank)
        elif row.replicates:
            return _array([("same", *key, i) for i in range(x.numel())], x.shape)
        else:
            return None
        terms = [("sent", *key, rank, first + i) for rank in ranks for i in range(each)]
        return _array(terms, x.shape)

    def _computed(self, node: Node) -> Terms | None:
        """The result of an op, in terms of its arguments."""
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            whole = self.of(node.args[0], node)  # type: ignore[arg-type]
            return whole[node.args[1]] if isinstance(whole, list) else None
        args = arguments(node)
        read = {x: self.of(x, node) for x in node.all_input_nodes}
        terms: dict[Node, Any] = {x: t for x, t in read.items() if t is not None}
        if not terms or len(terms) < len(read):
            return None
        name = _torch.op_name(node.target)
        if is_wait(node) or name in _SAME_ORDER:
            return terms[node.all_input_nodes[0]].reshape(tuple(node.meta["val"].shape))
        if name in _ON_TERMS:
            result = _ON_TERMS[name](*map_arg(list(args.values()), terms.__getitem__))
            return [*map(_wrapped, result)] if isinstance(result, list) else _wrapped(result)
        if _torch.op_is_random(node.target) or not isinstance(node.meta["val"], Tensor):
            return None
        plain = repr([x for x in args.values() if not isinstance(x, (Node, list))])
        key = name, plain, tuple(t for x in terms.values() for t in x.reshape(-1))
        shape = node.meta["val"].shape
        return _array([("op", *key, i) for i in range(shape.numel())], shape)


def _parts(node: Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in values if isinstance(x, Tensor)]


def _is_small(node: Any) -> bool:
    """Are these integers, few and of a known number?"""
    parts = _parts(node) if isinstance(node, Node) else []
    sizes = [n for x in parts for n in x.shape]
    if not parts or any(x.is_floating_point() or x.is_complex() for x in parts):
        return False
    return all(isinstance(n, int) for n in sizes) and sum(x.numel() for x in parts) <= MOST_ELEMENTS


def _is_even(node: Node, n: int) -> bool:
    """Does an exchange send the same number of rows to all and from all?"""
    splits = [x for name in SPLITS for x in arguments(node).get(name) or ()]
    return len(splits) == 2 * n and all(isinstance(x, int) and x == splits[0] for x in splits)


def _wrapped(result: Any) -> Any:
    """numpy gives the element itself, a tuple, in place of an array of no dimensions."""
    return result if isinstance(result, numpy.ndarray) else _array([result], ())


def _array(terms: list[Term], shape: Iterable[int]) -> Any:
    array = numpy.empty(len(terms), dtype=object)
    array[:] = terms
    return array.reshape(tuple(shape))


# -- ops that only move elements, or add them ---

_SAME_ORDER = {
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "reshape", "flatten", "squeeze", "unsqueeze"),
        *("clone", "detach", "alias", "contiguous", "_to_copy", "lift_fresh_copy"),
    )
}


def add(*terms: Term) -> Term:
    """Their sum; sums of sums are one."""
    flat = [t for term in terms for t in (term[1:] if term[0] == "sum" else (term,))]
    return flat[0] if len(flat) == 1 else ("sum", *sorted(flat, key=repr))


def _sum(x: Any, dims: Any = None, keepdim: bool = False, *_: Any) -> Any:
    """Terms summed along dims, all of them if none is named."""
    axes = sorted(d % x.ndim for d in dims) if dims else list(range(x.ndim))
    rest = [d for d in range(x.ndim) if d not in axes]
    rows = x.transpose(*rest, *axes).reshape(*(x.shape[d] for d in rest), -1)
    flat = rows.reshape(-1, rows.shape[-1])
    shape = [1 if d in axes else x.shape[d] for d in range(x.ndim) if keepdim or d in rest]
    return _array([add(*row) for row in flat], shape)


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _pieces(x: Any, size: Any, dim: int = 0) -> list[Any]:
    even = range(size, x.shape[dim], size) if isinstance(size, int) else None
    return numpy.split(x, even or list(numpy.cumsum(size))[:-1], axis=dim)


_ON_TERMS: dict[str, Callable[..., Any]] = {
    "aten::select": lambda x, dim, i: x.take(i, dim),
    "aten::slice": _slice,
    "aten::unbind": lambda x, dim=0: list(numpy.moveaxis(x, dim, 0)),
    "aten::split": _pieces,
    "aten::split_with_sizes": _pieces,
    "aten::t": lambda x: x.T,
    "aten::transpose": lambda x, a, b: x.swapaxes(a, b),
    "aten::permute": lambda x, dims: x.transpose(dims),
    "aten::cat": lambda xs, dim=0: numpy.concatenate(xs, axis=dim),
    "aten::stack": lambda xs, dim=0: numpy.stack(xs, axis=dim),
    "aten::sum": _sum,
    "aten::copy_": lambda x, source, *_: numpy.broadcast_to(source, x.shape),
}
