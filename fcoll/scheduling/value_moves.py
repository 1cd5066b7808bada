"""Where a value lies, and the ops that only move bytes: views, slices, joins, copies.

A *storage* has the pieces that lie in it now; a *value* is ranges of it, in bytes, row by row. What
is not worked out (transposed values, more ranges than ``MOST_ROWS``, sizes that only a run knows)
is a call like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

from torch import Tensor, dtype
from torch.fx import Node

from fcoll.graph.nodes import arguments
from fcoll.scheduling import _torch
from fcoll.scheduling.value_terms import Piece, Pieces, Range, joined, taken

MOST_ROWS = 1024  # that a slice or a join cuts: one a rank of a large group
Shape = tuple[int, ...]
Dtype = tuple[str, int]  # its name, and the bytes of an element


class Wrong(Exception):
    """A graph does something that none may do; ``nodes`` are the names of those that show it."""

    def __init__(self, text: str, *nodes: Node) -> None:
        super().__init__(text)
        self.nodes = tuple(node.name for node in nodes)


class Unsure(Exception):
    """What a graph does cannot be told."""


@dataclass(eq=False)
class Storage:
    """Memory, in the order of the first value that lay in it."""

    content: Pieces
    fills: Node | None = None  # the collective under way that gives it
    sends: list[Node] = field(default_factory=list)  # those under way that send it
    is_written: bool = False


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor. Its ranges are of its storage or, of a view by places that are not worked out, of
    what the call ``seen_by`` gives, of a value in that storage."""

    storage: Storage
    shape: Shape | None  # None: it is not known
    dtype: Dtype
    ranges: tuple[Range, ...]
    seen_by: tuple[Value, tuple[Any, ...], Any] | None = None  # a value, a call, its form

    @property
    def form(self) -> Any:
        return self.shape, self.dtype[0]

    @property
    def size(self) -> int:
        return nbytes(self.shape, self.dtype)


def form_of(val: Any) -> tuple[Shape | None, Dtype]:
    """Of a node's traced value."""
    if not isinstance(val, Tensor):
        return None, ("", 1)
    known = all(isinstance(size, int) for size in val.shape)
    return tuple(val.shape) if known else None, dtype_of(val.dtype)


@cache
def dtype_of(given: dtype) -> Dtype:
    return str(given), given.itemsize


def nbytes(shape: Shape | None, dtype: Dtype) -> int:
    """Of a shape that is not known, one: such a value is never cut."""
    return 1 if shape is None else prod(shape) * dtype[1]


def whole(pieces: Pieces, shape: Shape | None, dtype: Dtype) -> Value:
    """A new tensor with these pieces."""
    size, given = nbytes(shape, dtype), sum(piece.size for piece in pieces)
    if given != size:
        raise Unsure(f"a traced value of {size} bytes is made of {given}: its shape is another's")
    return Value(Storage(pieces), shape, dtype, ((0, size),))


# -- parts of values ---


def reshaped(value: Value, given: Any) -> Value | None:
    """The same bytes in another shape."""
    if value.shape is None or not all(isinstance(size, int) for size in given):
        return None
    shape, count = tuple(given), prod(value.shape)
    if -1 in shape:
        rest = -prod(shape)
        shape = tuple((count // rest if rest else 0) if size == -1 else size for size in shape)
    return replace(value, shape=shape) if prod(shape) == count else None


def cut(value: Value, dim: int, begin: int, end: int) -> Value | None:
    """``value[begin:end]`` in a dimension."""
    if value.shape is None or not value.shape or not isinstance(begin, int):
        return None
    dim %= len(value.shape)
    size, rows = value.shape[dim], prod(value.shape[:dim])
    begin, end = (min(max(x + size if x < 0 else x, 0), size) for x in (begin, end))
    end = max(end, begin)
    shape = (*value.shape[:dim], end - begin, *value.shape[dim + 1 :])
    if rows > MOST_ROWS:
        return None
    inner = prod(value.shape[dim + 1 :]) * value.dtype[1]
    wanted = [((row * size + begin) * inner, (end - begin) * inner) for row in range(rows)]
    ranges = taken(value.ranges, wanted)
    return replace(value, shape=shape, ranges=tuple((b, s) for b, s in ranges))


def cut_up(value: Value, sizes: Sequence[int], dim: int) -> list[Value] | None:
    made, at = [], 0
    for size in sizes:
        part = cut(value, dim, at, at + size) if isinstance(size, int) else None
        if part is None:
            return None
        made.append(part)
        at += size
    return made


def rows_joined(parts: Sequence[tuple[Pieces, int]], rows: int) -> Pieces:
    """Row by row, of each part its bytes of that row; parts come with the bytes of a row."""
    found: list[Any] = []
    for row in range(rows):
        for pieces, size in parts:
            found += taken(pieces, [(row * size, size)])
    return joined(Piece(*p) for p in found)


# -- ops: each gives None where it cannot tell ---


def _view(walk: Any, node: Node) -> Any:
    x, shape = walk.env[node.args[0]], node.args[1]
    made = reshaped(x, shape)
    if made is None and x.shape is not None and all(isinstance(size, int) for size in shape):  # type: ignore[union-attr]
        raise Wrong(f"{node.name} gives {shape}, which {x.shape} is not", node)
    return made


def _same(walk: Any, node: Node) -> Any:
    return walk.env[node.args[0]]


def _in_traced_shape(walk: Any, node: Node) -> Any:
    shape, _ = form_of(node.meta.get("val"))
    return None if shape is None else reshaped(walk.env[node.args[0]], shape)


def _view_as_dtype(walk: Any, node: Node) -> Any:
    x, new = walk.env[node.args[0]], dtype_of(node.args[1])  # type: ignore[arg-type]
    if not x.shape or x.shape[-1] * x.dtype[1] % new[1]:
        return None
    last = x.shape[-1] * x.dtype[1] // new[1]
    return replace(x, shape=(*x.shape[:-1], last), dtype=new)


def _slice(walk: Any, node: Node) -> Any:
    given = arguments(node)
    begin, end = given["start"] or 0, given["end"]
    if given["step"] != 1:
        return None
    x, dim = walk.env[given["self"]], given["dim"]
    if x.shape is None or not isinstance(dim, int):
        return None
    return cut(x, dim, begin, x.shape[dim] if end is None else end)


def _narrow(walk: Any, node: Node) -> Any:
    x, dim, begin, size = node.args
    return cut(walk.env[x], dim, begin, begin + size)  # type: ignore[arg-type, operator]


def _select(walk: Any, node: Node) -> Any:
    x, dim, i = walk.env[node.args[0]], node.args[1], node.args[2]
    if x.shape is None or not isinstance(i, int) or not isinstance(dim, int):
        return None
    dim, i = dim % len(x.shape), i % x.shape[dim]
    part = cut(x, dim, i, i + 1)
    return part and reshaped(part, (*x.shape[:dim], *x.shape[dim + 1 :]))


def _split(walk: Any, node: Node) -> Any:
    given = arguments(node)
    x, size, dim = walk.env[given["self"]], given["split_size"], given["dim"] or 0
    if x.shape is None or not isinstance(size, int) or not size:
        return None
    total = x.shape[dim]
    return cut_up(x, [min(size, total - at) for at in range(0, total, size)], dim)


def _split_with_sizes(walk: Any, node: Node) -> Any:
    given = arguments(node)
    x, sizes, dim = walk.env[given["self"]], given["split_sizes"], given["dim"] or 0
    if x.shape is None or not all(isinstance(size, int) for size in sizes):
        return None
    if sum(sizes) != x.shape[dim]:
        raise Wrong(f"{node.name} splits {x.shape[dim]} into {sizes}", node)
    return cut_up(x, sizes, dim)


def _split_into(walk: Any, node: Node) -> Any:
    """``split_with_sizes_copy(x, sizes, out=)``, by which torch 2.15 empties buckets of gathers."""
    parts, outs = _split_with_sizes(walk, node), [walk.env[x] for x in arguments(node)["out"]]
    if parts is None or any(x.shape is None for x in outs):
        return None
    shapes = [[x.shape for x in of] for of in (parts, outs)]
    if shapes[0] != shapes[1]:
        raise Wrong(f"{node.name} writes parts of {shapes[0]} to memory of {shapes[1]}", node)
    return [_copy(walk, node, x, part) for x, part in zip(outs, parts, strict=True)]


def _cat(walk: Any, node: Node) -> Any:
    given = arguments(node)
    values = [walk.env[x] for x in given["tensors"]]
    return joined_in(walk, node, values, given["dim"] or 0)


def joined_in(walk: Any, node: Node, values: Sequence[Value], dim: int) -> Value | None:
    shapes: list[Any] = [v.shape for v in values]
    alike = len({(v.dtype, len(v.shape or ())) for v in values}) == 1
    if not alike or not all(shapes):
        return None
    first = shapes[0]
    dim %= len(first)
    rows = prod(first[:dim])
    outside = {(*s[:dim], *s[dim + 1 :]) for s in shapes}
    if rows > MOST_ROWS or len(outside) > 1 or not rows:
        return None
    parts = [(walk.pieces(v, node), v.size // rows) for v in values]
    shape = (*first[:dim], sum(s[dim] for s in shapes), *first[dim + 1 :])
    return whole(rows_joined(parts, rows), shape, values[0].dtype)


def _copied(walk: Any, node: Node) -> Any:
    x = walk.env[node.args[0]]
    return whole(walk.pieces(x, node), x.shape, x.dtype)


def _converted(walk: Any, node: Node) -> Any:
    given = arguments(node)
    x, to = walk.env[node.args[0]], given.get("dtype")
    elsewhere = any(given.get(name) is not None for name in ("device", "layout", "pin_memory"))
    if to is None or elsewhere or x.shape is None:
        return None
    return as_dtype(walk, node, x, dtype_of(to))


def as_dtype(walk: Any, node: Node, x: Value, new: Dtype) -> Value:
    pieces = walk.terms.cast(walk.pieces(x, node), x.dtype, new)
    return whole(pieces, x.shape, new)


def _empty(walk: Any, node: Node) -> Any:
    shape, dtype = form_of(node.meta.get("val"))
    return whole((Piece(walk.uninitialized, 0, nbytes(shape, dtype)),), shape, dtype)


def _copy_into(walk: Any, node: Node) -> Any:
    given = arguments(node)
    return _copy(walk, node, walk.env[given["self"]], walk.env.get(given["src"]))


def _copy(walk: Any, node: Node, x: Value, source: Any) -> Value | None:
    if not isinstance(source, Value) or x.shape is None or x.shape != source.shape:
        return None
    walk.write(x, walk.terms.cast(walk.pieces(source, node), source.dtype, x.dtype), node)
    return x


def _copy_each_into(walk: Any, node: Node) -> Any:
    given = arguments(node)
    pairs = [(walk.env[x], walk.env[y]) for x, y in zip(given["self"], given["src"], strict=True)]
    if any(x.shape is None or x.shape != y.shape for x, y in pairs):
        return None
    return [_copy(walk, node, x, y) for x, y in pairs]


# -- what torch makes buckets with ---


def _copied_in(walk: Any, node: Node) -> Any:
    """``fsdp.all_gather_copy_in``: inputs one behind the other, in this rank's part of a table."""
    inputs, out, _, count, rank = node.args
    into = cut(walk.env[out], 0, rank * count, rank * count + count)  # type: ignore[operator]
    values = [_flat(walk.env[x]) for x in inputs]  # type: ignore[union-attr]
    given = None if None in values else joined_in(walk, node, values, 0)
    if into is None or given is None or _copy(walk, node, into, given) is None:
        raise Unsure(f"{node.name} writes to {out}, where cannot be told")
    return [into, walk.env[out]]


def _flat(value: Value) -> Any:
    return reshaped(value, [-1])


def _bucket_to_gather(walk: Any, node: Node) -> Any:
    """A table of all ranks' parts, of which this rank's is there."""
    inputs, n, to, dtypes, rank = node.args[:5]
    new, known = dtype_of(to), _torch.bucket_dtypes()  # type: ignore[arg-type]
    values = [walk.env[x] for x in inputs]  # type: ignore[union-attr]
    if any(v.shape is None for v in values):
        return None
    pieces: list[Piece] = []
    for value, index in zip(values, dtypes, strict=True):  # type: ignore[arg-type]
        pieces += as_dtype(walk, node, value, dtype_of(known[index])).storage.content
    size = sum(piece.size for piece in pieces)
    before, behind = rank * size, (n - rank - 1) * size  # type: ignore[operator]
    gap = walk.uninitialized
    parts = [Piece(gap, 0, before), *pieces, Piece(gap, before + size, behind)]
    return whole(joined(parts), (n * size // new[1],), new)  # type: ignore[operator]


def _bucket_to_scatter(walk: Any, node: Node) -> Any:
    """All ranks' parts, in each all inputs."""
    inputs, n = node.args
    tables = [reshaped(walk.env[x], [n, -1]) for x in inputs]  # type: ignore[union-attr]
    made = None if None in tables else joined_in(walk, node, tables, 1)  # type: ignore[arg-type]
    return made and _flat(made)


_BY_OP: dict[Callable[[Any, Node], Any], Iterable[str]] = {
    _view: ["aten.view.default", "aten._unsafe_view.default"],
    _same: ["aten.detach.default", "aten.alias.default"],
    _in_traced_shape: [
        *("aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims"),
        "aten.squeeze.default",
    ],
    _view_as_dtype: ["aten.view.dtype"],
    _slice: ["aten.slice.Tensor"],
    _narrow: ["aten.narrow.default"],
    _select: ["aten.select.int"],
    _split: ["aten.split.Tensor"],
    _split_with_sizes: ["aten.split_with_sizes.default"],
    _split_into: ["aten.split_with_sizes_copy.out"],
    _cat: ["aten.cat.default"],
    _copied: ["aten.clone.default"],
    _converted: ["prims.convert_element_type.default", "aten._to_copy.default"],
    _empty: [
        *("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"),
        *("aten.empty_strided.default", "aten.new_empty_strided.default"),
    ],
    _copy_into: ["aten.copy_.default"],
    _copy_each_into: ["aten._foreach_copy_.default"],
    _copied_in: ["fsdp.all_gather_copy_in.default"],
    _bucket_to_gather: ["bucketing._pre_bucket_all_gather.default"],
    _bucket_to_scatter: ["bucketing._pre_bucket_reduce_scatter.default"],
}
#: They cut or join each row, so that there may be too many.
OF_ROWS = {
    *("aten.slice.Tensor", "aten.narrow.default", "aten.select.int", "aten.split.Tensor"),
    *("aten.split_with_sizes.default", "aten.split_with_sizes_copy.out", "aten.cat.default"),
}
#: They have a view's schema but may copy.
MAY_COPY = {
    *("aten.reshape.default", "aten.contiguous.default", "aten.flatten.using_ints"),
    *("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.to.other"),
}
MOVES = {name: move for move, names in _BY_OP.items() for name in names}
