"""Does a graph with buckets and splits compute what the graph that came in does?

Asked of every plan that has them, by code that shares nothing with what makes them. Every node of
the changed graph is read as a *part* of a value of the other: all of it, or chunk j of k in so many
blocks (``x.reshape(blocks, k, -1)[:, j]``), or elements of a bucket. What a slice, a view or a cat
makes of a part follows from its arguments alone; a call on chunks must be one that acts on each row
by itself, with all its inputs cut in the same places.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch.fx import GraphModule, Node

from fcoll.graph.nodes import arguments, row_of_node
from fcoll.table.row import Collective

aten = torch.ops.aten
Fail = Callable[[str], NoReturn]


class Part(NamedTuple):
    """Of a node of the graph that came in: chunk j of k, all of it if k is 1."""

    of: str
    k: int = 1
    j: int = 0
    blocks: int = 1


def check_changes(
    source: GraphModule,
    changed: GraphModule,
    splits: Sequence[Any],
    buckets: Sequence[Any],
    fail: Fail,
) -> None:
    """Every node of ``source`` is there, or in chunks, or in a bucket, with the inputs it had."""
    _Reading(source, changed, splits, buckets, fail).check()


class _Reading:
    def __init__(
        self,
        source: GraphModule,
        changed: GraphModule,
        splits: Sequence[Any],
        buckets: Sequence[Any],
        fail: Fail,
    ) -> None:
        self.fail, self.buckets = fail, buckets
        self.source = {node.name: node for node in source.graph.nodes}
        self.nodes = {node.name: node for node in changed.graph.nodes}
        self.chunks = {
            f"{name}_c{j}": Part(name, split.chunks, j, blocks)
            for split in splits
            for name, blocks in zip(split.members, split.blocks, strict=True)
            for j in range(split.chunks)
        }
        self.sums = {name: split for split in splits for name in split.sums}
        self.whole = {f"{name}_c{split.chunks - 1}": name for name, split in self.sums.items()}
        self.parts: dict[Node, Part | None] = {}

    def check(self) -> None:
        gone = {part.of for part in self.chunks.values()}
        for name in self.sums:
            gone.add(name)
            _check_sum(self, name)
        gone.update(
            name
            for name, node in self.source.items()
            if node.users and all(user.name in self.sums for user in node.users)
        )
        for bucket in self.buckets:
            gone.update((*bucket.members, *bucket.waits))
            _check_bucket(self, bucket)
        bucketed = {name for b in self.buckets for name in (*b.members, *b.waits)}
        for name in self.chunks:
            if name not in bucketed:
                self.check_chunk(name)
        for name, node in self.source.items():
            if name in self.nodes and name not in bucketed:
                self.check_whole(node, self.nodes[name])
            elif name not in gone:
                self.fail(f"{name} is missing")

    # -- what a node of the changed graph has ---

    def part(self, node: Node) -> Part | None:
        if node not in self.parts:
            self.parts[node] = self.read(node)
        return self.parts[node]

    def read(self, node: Node) -> Part | None:
        if node.name in self.chunks:
            return self.chunks[node.name]
        if node.name in self.whole:
            return Part(self.whole[node.name])
        if node.name in self.source:
            return Part(node.name)
        if node.target in (aten.view.default, aten.clone.default):
            return self.part(node.args[0])  # type: ignore[arg-type]
        if node.target is aten.slice.Tensor:
            return self.sliced(node)
        if node.target is aten.cat.default:
            return self.joined(node)
        return None

    def sliced(self, node: Node) -> Part | None:
        x, dim, begin, end = node.args
        whole, shape = self.part(x), x.meta["val"].shape  # type: ignore[arg-type, union-attr]
        wide = end - begin  # type: ignore[operator]
        if whole is None or whole.k != 1 or begin % wide or shape[dim] % wide:  # type: ignore[operator]
            return None
        k, j = shape[dim] // wide, begin // wide  # type: ignore[operator]
        return Part(whole.of, k, j, prod(shape[:dim]))  # type: ignore[misc]

    def joined(self, node: Node) -> Part | None:
        dim = node.args[1] if len(node.args) > 1 else 0
        parts = [self.part(x) for x in node.args[0]]  # type: ignore[union-attr, arg-type]
        first = node.args[0][0].meta["val"].shape  # type: ignore[index, union-attr]
        blocks, k = prod(first[:dim]), len(parts)  # type: ignore[misc]
        of = parts[0].of if parts[0] else ""
        return Part(of) if parts == [Part(of, k, j, blocks) for j in range(k)] else None

    # -- is it right? ---

    def check_whole(self, node: Node, now: Node) -> None:
        """The same call, of all of what it took."""
        if (node.op, node.target) != (now.op, now.target):
            self.fail(f"{node.name} is another call")
        inputs = [self.part(x) for x in _inputs(now)]
        if inputs != [Part(x.name) for x in _inputs(node)]:
            self.fail(f"{node.name} takes other values than it did")
        if _literals(node) != _literals(now):
            self.fail(f"{node.name} has other arguments than it had")

    def check_chunk(self, name: str) -> None:
        mine = self.chunks[name]
        node, now = self.source.get(mine.of), self.nodes.get(name)
        if node is None or now is None:
            self.fail(f"chunk {mine.j} of {mine.of} is missing")
        if node.target is not now.target:
            self.fail(f"{name} is another call than {mine.of}")
        given = [self.part(x) for x in _inputs(now)]
        for part, x in zip(given, _inputs(node), strict=True):
            if part is None or part.of != x.name:
                self.fail(f"{name} does not take {x.name}, or not in one piece")
            if part.k > 1 and (part.k, part.j) != (mine.k, mine.j):
                self.fail(f"{name} takes chunk {part.j} of {part.k} of {x.name}")
        if why := _why_not(node, now, mine, [p for p in given if p is not None]):
            self.fail(f"{name}: {why}")


def _inputs(node: Node) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _literals(node: Node) -> str:
    return repr(torch.fx.map_arg((node.args, node.kwargs), lambda _: None))


# -- sums ---


def _check_sum(read: _Reading, name: str) -> None:
    """x.t() @ y is the sum over all chunks of x_j.t() @ y_j, each once, cut in the same places."""
    node, k, before = read.source.get(name), read.sums[name].chunks, None
    if node is None or node.target is not aten.mm.default:
        read.fail(f"{name} is no product")
    left, y = _inputs(node)
    if left.target is not aten.t.default:
        read.fail(f"{name} is no product over rows")
    x, cuts = left.args[0], set()
    for j in range(k):
        now = read.nodes.get(f"{name}_c{j}")
        want = aten.addmm.default if j else aten.mm.default
        if now is None or now.target is not want or now.kwargs or len(now.args) != 2 + (j > 0):
            read.fail(f"chunk {j} of {name} is missing, or another call")
        turned, right = now.args[-2:]
        if (j and now.args[0] is not before) or turned.target is not aten.t.default:  # type: ignore[union-attr]
            read.fail(f"{name}_c{j} is not added to the chunks before it")
        for whole, chunk in ((x, turned.args[0]), (y, right)):  # type: ignore[union-attr]
            part = read.part(chunk)  # type: ignore[arg-type]
            if part is None or part[:3] != (whole.name, k, j):  # type: ignore[union-attr]
                read.fail(f"{name}_c{j} does not take chunk {j} of {whole.name}")  # type: ignore[union-attr]
            if _cut(_shape(whole), _shape(chunk), k) != 0:  # type: ignore[arg-type]
                read.fail(f"{name}_c{j}: {chunk.name} is not cut in its rows")  # type: ignore[union-attr]
            cuts.add(part.blocks)
        before = now
    if len(cuts) != 1:
        read.fail(f"{name}: its inputs are cut in different places")


# -- buckets ---


def _check_bucket(read: _Reading, bucket: Any) -> None:
    """What is sent are its members in order, and each gets its own elements back."""
    starts = [_start(read, name) for name in bucket.members]
    sent, gets = read.nodes.get(bucket.name), [read.nodes.get(name) for name in bucket.waits]
    if sent is None or None in gets:
        read.fail(f"{bucket.name} is not in the graph")
    cat = _through(sent.all_input_nodes[0], aten.view.default)
    inputs = [read.part(x) for x in cat.args[0]]  # type: ignore[union-attr, arg-type]
    if inputs != [start[0] for start in starts]:
        read.fail(f"{bucket.name} does not send its members in their order")
    row, at = row_of_node(sent), 0
    n = _ranks(sent) if row is not None and row.replicates else 1
    _check_parts_of_ranks(read, bucket, sent, cat)
    for get, (_, whole) in zip(gets, starts, strict=True):
        piece = _through(get, aten.view.default, aten.clone.default)  # type: ignore[arg-type]
        wide = prod(whole) // n
        if piece.target is not aten.slice.Tensor or tuple(piece.args[1:]) != (1, at, at + wide):
            read.fail(f"{bucket.name}: {get.name} is not its part")  # type: ignore[union-attr]
        if tuple(get.meta["val"].shape) != tuple(whole):  # type: ignore[union-attr]
            read.fail(f"{bucket.name}: {get.name} has another shape")  # type: ignore[union-attr]
        at += wide


def _check_parts_of_ranks(read: _Reading, bucket: Any, sent: Node, cat: Node) -> None:
    """Of a reduce-scatter the rows of the table are the ranks' parts; of the others it has one."""
    row = row_of_node(sent)
    scattered = row is not None and not row.replicates and "group_size" in arguments(sent)
    rows = cat.args[0][0].meta["val"].shape[0]  # type: ignore[index, union-attr]
    if rows != (_ranks(sent) if scattered else 1) or (len(cat.args) > 1 and cat.args[1] != 1):
        read.fail(f"{bucket.name}: the parts of the ranks do not lie together")


def _start(read: _Reading, name: str) -> tuple[Part, Sequence[int]]:
    """What a member sends, and the shape of what it gives."""
    if name in read.source:
        node = read.source[name]
        return Part(node.all_input_nodes[0].name), node.meta["val"].shape
    # It is a chunk: it sends that chunk of what the collective sends.
    mine = read.chunks.get(name)
    if mine is None:
        read.fail(f"{name} is no collective of the graph")
    node = read.source[mine.of]
    sent, shape = node.all_input_nodes[0], list(node.meta["val"].shape)
    row, n, blocks, before = row_of_node(node), _ranks(node), mine.blocks, 1
    if "group_size" in arguments(node):
        blocks = blocks // n if row is not None and row.replicates else blocks * n
    for d, size in enumerate(shape):  # the dimension in which its blocks end is cut
        if mine.blocks % before == 0 and size % (mine.blocks // before * mine.k) == 0:
            shape[d] //= mine.k
            break
        before *= size
    return Part(sent.name, mine.k, mine.j, blocks), shape


def _through(node: Node, *targets: Any) -> Node:
    while node.target in targets:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _ranks(node: Node) -> int:
    return int(arguments(node).get("group_size") or 1)


# -- chunks ---


def _why_not(node: Node, now: Node, mine: Part, given: list[Part]) -> str:
    """Why a call on these chunks does not give the chunk of the result; empty if it does."""
    if node.target is operator.getitem:
        return "" if node.args[1:] == now.args[1:] else "another element"
    whole, chunk = _shape(node), _shape(now)
    d = _cut(whole, chunk, mine.k)
    if d is None:
        return f"{chunk} is no chunk of {whole}"
    row = row_of_node(node)
    ratio = [(mine.blocks, part.blocks) for part in given if part.k > 1]
    if not ratio:
        return "none of its inputs is in chunks"
    if row is not None:
        return _why_no_collective(node, now, row, ratio)
    if node.target not in _SIZED and _literals(node) != _literals(now):
        return "other arguments"
    if node.target in (aten.mm.default, aten.addmm.default):
        right = given[-2].k == mine.k and all(p.k == 1 for p in (*given[:-2], given[-1]))
        return "" if right and d == 0 and ratio[0][0] == ratio[0][1] else "other rows"
    if node.target is aten.cat.default:
        counts = {mine.blocks, mine.blocks // len(given)}
        return "" if len(ratio) == len(given) and {b for _, b in ratio} <= counts else "other rows"
    if node.target in _BY_DIM:
        dims = _ints(node.args[1:3] if node.target is aten.transpose.int else node.args[1:2])
        if not dims or any(i % len(_shape(_inputs(node)[0])) <= d for i in dims):
            return "it acts on rows of several chunks"
    if node.target in _SAME_ORDER:
        return "" if ratio[0][0] == ratio[0][1] else "other rows"
    return _why_no_rows(node, mine, given, d)


#: The elements stay in their order, or the dimensions that are acted on are arguments.
_BY_DIM = {
    *(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default),
    *(aten._softmax.default, aten._log_softmax.default, aten.slice.Tensor, aten.transpose.int),
}
#: They have sizes as arguments, and those are a chunk's: the shape of the result says if rightly.
_SIZED = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.split.Tensor),
}
_SAME_ORDER = _BY_DIM | _SIZED | {aten.clone.default, aten._to_copy.default, aten.detach.default}


def _why_no_rows(node: Node, mine: Part, given: list[Part], d: int) -> str:
    """Pointwise: every operand has the same rows as the result, or one for all."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return f"{node.target} need not act on each row by itself"
    if node.target._schema.is_mutable and len(_inputs(node)[0].users) > 1:  # type: ignore[union-attr]
        return f"it writes to {_inputs(node)[0].name}, which others use"
    out = _shape(node)
    each = mine.blocks // prod(out[:d])
    for part, x in zip(given, _inputs(node), strict=True):
        shape = _shape(x)
        at = d - len(out) + len(shape)
        if part.k == 1:
            if at >= 0 and shape[at] != 1:
                return f"all rows of {x.name} with those of a chunk"
        elif at < 0 or part.blocks != prod(shape[:at]) * each:
            return f"other rows of {x.name}"
    return ""


def _why_no_collective(node: Node, now: Node, row: Collective, ratio: list[tuple[int, int]]) -> str:
    (mine, theirs), n = ratio[0], _ranks(node)
    if row.is_wait:
        return "" if mine == theirs else "other rows"
    if "group_size" not in arguments(node):
        sizes = arguments(node).get("input_split_sizes")
        aligned = mine == theirs and (sizes is None or mine % len(sizes) == 0)
    else:
        aligned = mine == theirs * n if row.replicates else theirs == mine * n
    names = ("group_name", "reduce_op", "group_size", "dim")
    same = all(arguments(node).get(x) == arguments(now).get(x) for x in names)
    return "" if aligned and same else "other rows, or another group"


def _shape(node: Node) -> tuple[int, ...]:
    val = node.meta["val"]
    return tuple(
        _inputs(node)[0].meta["val"].shape if isinstance(val, (list, tuple)) else val.shape
    )


def _cut(whole: Sequence[int], chunk: Sequence[int], k: int) -> int | None:
    """The one dimension that is k times smaller."""
    if len(whole) != len(chunk):
        return None
    differ = [i for i, (a, b) in enumerate(zip(whole, chunk, strict=True)) if a != b]
    return differ[0] if len(differ) == 1 and whole[differ[0]] == k * chunk[differ[0]] else None


def _ints(values: Iterable[Any]) -> list[int]:
    found: list[int] = []
    for value in values:
        found.extend(value if isinstance(value, (list, tuple)) else [value])
    return [x for x in found if isinstance(x, int)]
