"""Symbolic sizes: expressions, and the hints that stand for them where a number is needed.

A symbol of a shape has the value that it had in the trace. One that only a run knows (of what
``nonzero`` gives, of splits that are read from a tensor) is taken at its upper bound, if torch
knows one: from the op that made it, or from ``torch._check(n <= 4096)`` in the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from fcoll.errors import BadOption, MissingSize
from fcoll.graph import _torch
from fcoll.graph.nodes import SPLITS, arguments, row_of_node, tensors_of
from fcoll.graph.origin import Origin
from fcoll.source import lines_in
from fcoll.table.row import Collective


def values_of(size: Any) -> dict[str, int]:
    """The symbols of a size that have a value or a bound: {"s0": 128}."""
    node = getattr(size, "node", None)  # of a SymInt
    symbols = node.expr.free_symbols if node is not None else ()
    values = {str(s): _torch.symbol_value(node, s) for s in symbols}
    return {name: value for name, value in values.items() if value is not None}


def has_symbols(x: Any) -> bool:
    """Is there a size that only a run knows, in nested lists and dicts?"""
    if isinstance(x, dict):
        return has_symbols(list(x.values()))
    if isinstance(x, (list, tuple)):
        return any(map(has_symbols, x))
    return bool(getattr(x, "free_symbols", None))


SHOWN = 12  # symbols that an error names


class Hints:
    """A size as a number: ``hint(size)``. ``values`` by name go first."""

    def __init__(self, values: Mapping[str, int] | None = None) -> None:
        self.values = dict(values or {})

    def __call__(self, size: Any) -> int:
        node = getattr(size, "node", None)
        if node is None:
            return int(size)
        values = values_of(size) | self.values
        missing = sorted(str(s) for s in node.expr.free_symbols if str(s) not in values)
        if missing:
            raise MissingSize(symbols=", ".join(missing), first=missing[0])
        return int(node.expr.subs({s: values[str(s)] for s in node.expr.free_symbols}))


def born_at(graph: Graph) -> dict[str, str]:
    """The user's line that first has each symbol of a recorded graph: {"u0": "moe.py:31"}."""
    lines: dict[str, str] = {}
    for node in graph.nodes:
        origin = node.meta.get("origin")
        for name in _symbols_in(node.meta.get("val")):
            if name not in lines:
                lines[name] = origin.source if isinstance(origin, Origin) else ""
    return lines


def _symbols_in(value: Any) -> Iterator[str]:
    for x in value if isinstance(value, (list, tuple)) else (value,):
        for size in x.shape if isinstance(x, Tensor) else (x,):
            if isinstance(size, SymInt):
                yield from sorted(map(str, size.node.expr.free_symbols))


def by_symbol(sizes: Mapping[str, int], lines: Mapping[str, str]) -> dict[str, int]:
    """Sizes given by symbol, or by the line that reads them, as {symbol: size}.

    >>> by_symbol({"u0": 3, "moe.py:31": 64}, {"u0": "a.py:7", "u1": "src/moe.py:31"})
    {'u1': 64, 'u0': 3}
    """
    by_line: dict[str, int] = {}
    named: dict[str, int] = {}
    for key, size in sizes.items():
        if key in lines or not lines:
            named[key] = size
            continue
        at = [name for name, line in lines.items() if _is_named(key, line)]
        if not at:
            symbols = ", ".join(f"{name} ({line})" for name, line in list(lines.items())[:SHOWN])
            raise BadOption(op="trace", arg="sizes", value=key, known=symbols)
        by_line |= dict.fromkeys(at, size)
    return by_line | named


def _is_named(key: str, source: str) -> bool:
    return any(line == key or line.endswith("/" + key) for line in lines_in(source))


def to_text(expr: Any) -> str:
    """An expression such that from_text gives an equal one, assumptions of its symbols included.

    >>> n = sympy.Symbol("n", integer=True, positive=True)
    >>> from_text(to_text(4 * n + 1)) == 4 * n + 1
    True
    """
    return sympy.srepr(expr)


def from_text(text: str) -> Any:
    return sympy.sympify(text, locals=_torch.SYMPY_FUNCTIONS)


# -- what the symbols of a graph are taken to be ---

_SPLITS = (
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.split_with_sizes_copy.default,
)


def sizes_of(graph_module: GraphModule) -> dict[str, int]:
    """The values that the symbols of a graph's shapes had in its trace: {"s0": 128}; of those that
    only a run knows, the upper bounds. How many rows an exchange sends to and gets from each rank,
    a gather gets from each, and a split gives each part, has none: all are taken to be the same."""
    sizes: dict[str, int] = {}
    for node in graph_module.graph.nodes:
        for x in tensors_of(node):
            for size in x.shape:
                if type(size) is not int:
                    sizes |= values_of(size)
    for node in graph_module.graph.nodes:
        if (row := row_of_node(node)) is not None:
            sizes = _even_shares(node, row, sizes) | sizes
        elif node.target in _SPLITS:
            x, parts, *dim = node.args
            sizes = _shares(parts, x, dim[0] if dim else 0, len(parts), sizes) | sizes
    return sizes


def _even_shares(node: Node, row: Collective, sizes: Mapping[str, int]) -> dict[str, int]:
    """The symbols among a call's parts as if all ranks had the same: of an exchange the same share
    of its rows, of a gather as many as this rank."""
    exchanges = SPLITS[0] in row.position
    if not exchanges and not (row.replicates and "sizes" in row.position):
        return {}
    args = arguments(node)
    if exchanges:
        parts, dim, shares = [x for key in SPLITS for x in args[key]], 0, len(args[SPLITS[0]])
    else:
        parts, dim, shares = args.get("sizes") or [], args.get("dim", 0), 1
    return _shares(parts, args["input"], dim, shares, sizes)


def _shares(
    parts: Iterable[Any], of: Node, dim: int, shares: int, sizes: Mapping[str, int]
) -> dict[str, int]:
    """The symbols among sizes of parts, as equal shares of a dim."""
    symbols = [x for x in parts if isinstance(x, sympy.Symbol)]
    try:
        size = Hints(sizes)(of.meta["val"].shape[dim]) if symbols else 0
    except MissingSize:
        return {}
    return {str(x): size // shares for x in symbols}
