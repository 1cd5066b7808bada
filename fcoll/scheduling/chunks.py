"""Values in chunks: which ops can be run chunk by chunk, and on what chunks of their inputs.

A value of k chunks lies, in the order of its elements, in so many *blocks*, and every chunk has the
j-th of k equal parts of each block: ``x.reshape(blocks, k, -1)[:, j]``. One number is enough to say
where the rows of a chunk are, and views leave it as it is:

- rows that are cut into k stretches are 1 block;
- what is gathered from n ranks in chunks has n times the blocks of what they send;
- what is to be scattered to n ranks in chunks has n times the blocks of what they get.

So all_gather -> matmul -> reduce_scatter run chunk by chunk without moving a row in between. A
chunk has the shape of the whole, but for one dimension that is k times smaller.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fcoll.graph import _torch
from fcoll.graph.issued import SPLITS
from fcoll.graph.nodes import arguments, effect_of, row_of_node
from fcoll.table.exchange import ALL_TO_ALL_SINGLE
from fcoll.table.gather import ALL_GATHER_INTO_TENSOR
from fcoll.table.reduce import ALL_REDUCE, REDUCE_SCATTER_TENSOR

aten = torch.ops.aten
WHOLE = 0  # of an input: all of it is needed for each chunk


class Recipe(NamedTuple):
    """How a chunk of a node is made: the blocks of its inputs (or WHOLE), and the arguments of the
    call, with sizes that are a chunk's."""

    needs: dict[Node, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def shape_of(node: Node) -> tuple[int, ...] | None:
    """Of a node whose value is a tensor of known sizes."""
    if node.target is _LIST:  # a list of parts: its chunks are those of what it is of
        return shape_of(node.args[0]) if isinstance(node.args[0], Node) else None
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        return None
    shape = tuple(val.shape)
    for size in shape:
        if type(size) is not int:
            return None
    return shape


def chunk_dim(shape: Sequence[int] | None, blocks: int, k: int) -> int | None:
    """The dimension that is smaller in a chunk.

    >>> chunk_dim((8, 4), 1, 2), chunk_dim((8, 4), 4, 2), chunk_dim((8, 4), 8, 2)
    (0, 0, 1)
    """
    before = 1
    for d, size in enumerate(shape or ()):
        if blocks % before == 0 and size > 0 and size % (blocks // before * k) == 0:
            return d
        before *= size
    return None


def chunk_shape(shape: Sequence[int], blocks: int, k: int) -> tuple[int, ...]:
    d = chunk_dim(shape, blocks, k)
    return tuple(size // k if i == d else size for i, size in enumerate(shape))


def recipe(node: Node, blocks: int, k: int) -> Recipe | None:
    """How to make ``node`` in k chunks of so many blocks; None where that cannot be."""
    if node.op != "call_function" or chunk_dim(shape_of(node), blocks, k) is None:
        return None
    row = row_of_node(node)
    if row is not None:
        rule = _COLLECTIVES.get(row.name, _same if row.is_wait else None)
    else:
        rule = _rule_of(node)
    waits = row is not None and row.is_wait
    if rule is None or (_torch.op_writes(node.target) and not waits and not _writes_its_own(node)):
        return None
    made = rule(node, blocks, k)
    if made is None or any(not _can_be_cut(x, q, k) for x, q in made.needs.items()):
        return None
    return made


def blocks_after(user: Node, given: Node, blocks: int, k: int) -> int | None:
    """The blocks of a user's result if ``given`` has ``blocks``; None where that cannot be."""
    row = row_of_node(user)
    if row is ALL_GATHER_INTO_TENSOR:
        return blocks * _ranks(user)
    if row is REDUCE_SCATTER_TENSOR:
        n = _ranks(user)
        return None if blocks % n else blocks // n
    d = chunk_dim(shape_of(given), blocks, k)
    if user.target is aten.cat.default and d is not None:
        inside = _cat_dim(user) <= d
        return blocks * len(user.args[0]) if inside else blocks  # type: ignore[arg-type]
    if user.target is operator.getitem and d is not None:
        parts = _parts(user.args[0])  # type: ignore[arg-type]
        inside = parts is not None and _split_dim(user.args[0]) <= d  # type: ignore[arg-type]
        if parts is None or (inside and blocks % parts):
            return None
        return blocks // parts if inside else blocks
    # A broadcast operand (one value a row) has fewer dimensions in front, and so fewer blocks.
    if _is_pointwise(user) and (out := shape_of(user)) is not None and d is not None:
        shape = shape_of(given) or ()
        mine = prod(shape[:d])
        return prod(out[: d + len(out) - len(shape)]) * (blocks // max(mine, 1))
    return blocks


def multiplies(node: Node) -> bool:
    """Is it a matrix product, which takes its time by its rows?"""
    return node.op == "call_function" and any([node.target is op for op in _PRODUCTS])


def is_view(node: Node) -> bool:
    """Is it its input's memory, or an element of a list?"""
    return node.target is operator.getitem or _torch.op_is_view(node.target)


# -- rules ---

Rule = Callable[[Node, int, int], Recipe | None]


def _can_be_cut(node: Node, blocks: int, k: int) -> bool:
    return blocks == WHOLE or chunk_dim(shape_of(node), blocks, k) is not None


def _same(node: Node, blocks: int, k: int) -> Recipe | None:
    """One tensor in, one out, the same elements in the same order or each by itself."""
    if len(node.all_input_nodes) != 1:
        return None
    return Recipe({node.all_input_nodes[0]: blocks}, node.args, dict(node.kwargs))


def _view(node: Node, blocks: int, k: int) -> Recipe | None:
    """The sizes are a chunk's."""
    if len(node.all_input_nodes) != 1:
        return None
    x, shape = node.all_input_nodes[0], shape_of(node)
    return Recipe({x: blocks}, (x, list(chunk_shape(shape or (), blocks, k))), {})


def _pointwise(node: Node, blocks: int, k: int) -> Recipe | None:
    """Operands of the same rows in the same chunks; those with one row for all are whole."""
    out = shape_of(node) or ()
    d = chunk_dim(out, blocks, k)
    if d is None:
        return None
    each = blocks // max(prod(out[:d]), 1)
    needs: dict[Node, int] = {}
    for x in node.all_input_nodes:
        shape = shape_of(x)
        if shape is None:
            return None
        mine = d - (len(out) - len(shape))
        if mine < 0 or shape[mine] == 1:
            needs[x] = WHOLE
            continue
        needs[x] = max(prod(shape[:mine]), 1) * each
        if chunk_dim(shape, needs[x], k) != mine:
            return None
    return Recipe(needs, node.args, dict(node.kwargs))


def _product(node: Node, blocks: int, k: int) -> Recipe | None:
    """Rows of the left matrix; all of the right one, and of a bias."""
    *bias, left, right = node.args
    both = isinstance(left, Node) and isinstance(right, Node) and left is not right
    if not both or chunk_dim(shape_of(node), blocks, k) != 0 or left in bias:
        return None
    if chunk_dim(shape_of(left), blocks, k) != 0:  # type: ignore[arg-type]
        return None
    if any(not isinstance(b, Node) or len(shape_of(b) or (0, 0)) != 1 for b in bias):
        return None
    needs = {x: WHOLE for x in node.all_input_nodes} | {left: blocks}
    return Recipe(needs, node.args, dict(node.kwargs))  # type: ignore[arg-type]


def _behind(dims_of: Callable[[Node], Any]) -> Rule:
    """Of ops with dimensions as an argument: they are all behind the one that is cut."""

    def rule(node: Node, blocks: int, k: int) -> Recipe | None:
        x = node.args[0]
        shape = shape_of(x) if isinstance(x, Node) else None
        d, given = chunk_dim(shape, blocks, k), dims_of(node)
        dims = given if isinstance(given, (list, tuple)) else [given]
        if d is None or not dims or not all(type(i) is int for i in dims):
            return None
        if chunk_dim(shape_of(node), blocks, k) != d or any(
            i % len(shape or ()) <= d for i in dims
        ):
            return None
        return _same(node, blocks, k)

    return rule


def _dim_of(node: Node, position: int = 1, default: Any = 0) -> Any:
    """The argument ``dim``."""
    return node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)


def _cat(node: Node, blocks: int, k: int) -> Recipe | None:
    """Of equal parts, along any dimension."""
    parts = node.args[0]
    if not isinstance(parts, (list, tuple)) or len({shape_of(p) for p in parts}) != 1:
        return None
    d, e = chunk_dim(shape_of(node), blocks, k), _cat_dim(node)
    if d is None or len(set(parts)) != len(parts):
        return None
    if e <= d and blocks % len(parts):
        return None
    mine = blocks // len(parts) if e <= d else blocks
    inner = chunk_dim(shape_of(parts[0]), mine, k)
    if inner is None or (e <= d) != (e <= inner):
        return None
    return Recipe(dict.fromkeys(parts, mine), node.args, dict(node.kwargs))


def _cat_dim(node: Node) -> int:
    return int(_dim_of(node)) % len(shape_of(node) or (0,))


def _list(node: Node, blocks: int, k: int) -> Recipe | None:
    """A tensor as equal parts."""
    x = node.args[0]
    parts, d, e = _parts(node), chunk_dim(shape_of(node), blocks, k), _split_dim(node)
    if parts is None or d is None:
        return None
    size = node.args[1]
    if e == d:
        if blocks % parts or size % k:  # type: ignore[operator]
            return None
        size //= k  # type: ignore[operator]
    return Recipe({x: blocks}, (x, size, e), {})  # type: ignore[dict-item]


def _item(node: Node, blocks: int, k: int) -> Recipe | None:
    """One of the parts."""
    whole = node.args[0]
    parts = _parts(whole) if isinstance(whole, Node) else None
    d = chunk_dim(shape_of(node), blocks, k)
    if parts is None or d is None:
        return None
    mine = blocks * parts if _split_dim(whole) <= d else blocks  # type: ignore[arg-type]
    return Recipe({whole: mine}, node.args, {})  # type: ignore[dict-item]


def _parts(node: Node) -> int | None:
    """How many equal parts a tensor is split into."""
    if node.target is not _LIST or not isinstance(node.args[1], int):
        return None
    size = (shape_of(node) or ())[_split_dim(node)]
    return None if size % node.args[1] else size // node.args[1]


def _split_dim(node: Node) -> int:
    return int(_dim_of(node, 2)) % len(shape_of(node) or (0,))


# -- collectives ---


def _collective(scale: Callable[[int, int], int | None]) -> Rule:
    """``scale(blocks, n)`` are the blocks of what is sent."""

    def rule(node: Node, blocks: int, k: int) -> Recipe | None:
        if len(node.all_input_nodes) != 1 or not _is_plain(node):
            return None
        x, n = node.all_input_nodes[0], _ranks(node)
        mine, dim = scale(blocks, n), arguments(node).get("dim") or 0
        shape = shape_of(x)
        d = chunk_dim(shape, mine, k) if mine else None
        if mine is None or d is None or dim % max(len(shape or ()), 1) > d:
            return None
        return Recipe({x: mine}, node.args, dict(node.kwargs))

    return rule


def _exchange(node: Node, blocks: int, k: int) -> Recipe | None:
    """Every rank gets the same number of rows from each, in blocks that lie within those."""
    given = arguments(node)
    sizes = [*given[SPLITS[0]], *given[SPLITS[1]]]
    n = len(given[SPLITS[0]])
    if len(node.all_input_nodes) != 1 or not all(type(s) is int for s in sizes):
        return None
    if len(set(sizes)) != 1 or blocks % n or chunk_dim(shape_of(node), blocks, k) != 0:
        return None
    if sizes[0] % (blocks // n * k):
        return None

    def smaller(value: Any) -> Any:
        is_sizes = isinstance(value, (list, tuple)) and list(value) == [sizes[0]] * n
        return [sizes[0] // k] * n if is_sizes else value

    args = tuple(smaller(a) for a in node.args)
    kwargs = {name: smaller(a) for name, a in node.kwargs.items()}
    return Recipe({node.all_input_nodes[0]: blocks}, args, kwargs)


def _is_plain(node: Node) -> bool:
    """No uneven parts, no tensor but the one that is sent."""
    given = arguments(node)
    return not given.get("sizes") and not isinstance(given.get("factor"), Node)


def _ranks(node: Node) -> int:
    return int(arguments(node).get("group_size") or 1)


_COLLECTIVES: dict[str, Rule] = {
    ALL_GATHER_INTO_TENSOR.name: _collective(lambda q, n: None if q % n else q // n),
    REDUCE_SCATTER_TENSOR.name: _collective(lambda q, n: q * n),
    ALL_REDUCE.name: _collective(lambda q, n: q),
    ALL_TO_ALL_SINGLE.name: _exchange,
}
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_LIST = aten.split.Tensor
_BY_DIM = (
    *(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default),
    *(aten._softmax.default, aten._log_softmax.default),
)
_BY_OP: dict[Any, Rule] = {
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_BY_DIM, _behind(lambda node: _dim_of(node, default=None))),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    _LIST: _list,
    **dict.fromkeys((aten.clone.default, aten._to_copy.default, aten.detach.default), _same),
    operator.getitem: _item,
    aten.cat.default: _cat,
    aten.slice.Tensor: _behind(_dim_of),
    aten.transpose.int: _behind(lambda node: node.args[1:3]),
}


_BY_ID = {id(op): rule for op, rule in _BY_OP.items()}  # hashing an op is slow: 1 us


def _is_pointwise(node: Node) -> bool:
    return _torch.op_is_pointwise(node.target) and not effect_of(node)


def _writes_its_own(node: Node) -> bool:
    """Does it write to nothing but a value that nobody else sees, as ``mean.add_(eps)``?"""
    x = node.args[0] if node.args else None
    if _torch.op_writes(node.target) != ((0, "self"),) or not isinstance(x, Node):
        return False
    made = x.op == "call_function" and not is_view(x) and row_of_node(x) is None
    return made and list(x.users) == [node] and not _torch.op_writes(x.target)


def _rule_of(node: Node) -> Rule | None:
    return _BY_ID.get(id(node.target)) or (_pointwise if _is_pointwise(node) else None)


def with_inputs(made: Recipe, give: Callable[[Node], Node]) -> tuple[Any, Any]:
    """The arguments of a chunk's call, each input replaced."""
    return map_arg((made.args, made.kwargs), give)
