"""What the symbolic sizes of a graph are taken to be where a number is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from fcoll.errors import MissingSize
from fcoll.graph.issued import SPLITS
from fcoll.graph.nodes import arguments, row_of_node, tensors_of
from fcoll.graph.sizes import Hints, values_of
from fcoll.table.row import Collective

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
    given = arguments(node)
    if exchanges:
        parts, dim, shares = [x for key in SPLITS for x in given[key]], 0, len(given[SPLITS[0]])
    else:
        parts, dim, shares = given.get("sizes") or [], given.get("dim", 0), 1
    return _shares(parts, given["input"], dim, shares, sizes)


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
