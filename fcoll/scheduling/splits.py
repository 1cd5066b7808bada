"""Collectives and matrix products in chunks, so that one chunk travels while another is computed.

A *split* is a part of the graph that runs in k chunks of its rows: collectives, the products before
and behind them, and what lies in between (chunks.py says what can). What is needed in whole outside
is put together again; that is a copy, as is taking every k-th part of what comes in. The launches
of smaller kernels and messages are paid for, too. So splits are proposed where a collective is
exposed, made, planned like any graph, and kept if the plan is faster (graph_changes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fcoll.graph.nodes import arguments, has_named_group, is_start, is_wait, waits_of
from fcoll.scheduling.chunks import (
    WHOLE,
    Recipe,
    blocks_after,
    chunk_dim,
    chunk_shape,
    is_view,
    multiplies,
    recipe,
    shape_of,
    with_inputs,
)
from fcoll.scheduling.rewrite import Rewrite

aten = torch.ops.aten


@dataclass(frozen=True)
class Split:
    """Nodes that are run in ``chunks`` chunks.

    ``members`` are in the order of the graph, ``blocks`` say where the rows of the chunks of each
    are (chunks.py), ``collectives`` are those members that start one. Chunk j of a member is the
    node ``{member}_c{j}``; where it is needed in whole there is ``{member}_whole``. ``sums`` are
    products of two members over their rows, ``x.t() @ y``, as the gradients of weights are: chunk j
    is added to those before it, and the last one is the whole.
    """

    name: str
    chunks: int
    members: tuple[str, ...]
    blocks: tuple[int, ...]
    collectives: tuple[str, ...]
    sums: tuple[str, ...] = ()


class Infeasible(Exception):
    """A split that looked right and is not: a view of a chunk that its strides do not allow."""


# -- which ---


class Growth:
    """Grows splits from collectives: forward and backward until there is as much compute in chunks
    as the collective takes times ``reach``, and at least one product. Splits of different numbers
    of chunks may touch: what passes from one to the other is whole."""

    def __init__(
        self,
        graph_module: GraphModule,
        us: Mapping[str, float],
        chunks: Mapping[str, int],
        reach: float,
    ) -> None:
        self.nodes = list(graph_module.graph.nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.us, self.chunks, self.reach = us, chunks, reach
        self.k = 1  # of the split that grows
        self.of: dict[Node, int] = {}  # member -> the chunks of its split
        self.blocks: dict[Node, int] = {}
        self.recipes: dict[Node, Recipe] = {}
        self.seeds: dict[Node, Node] = {}  # start -> its wait

    def grow(self) -> dict[Node, int]:
        """The members of all splits around the collectives, with their blocks."""
        for node in self.nodes:
            if node.name in self.chunks and is_start(node) and has_named_group(node):
                waits = waits_of(node)
                if len(waits) == 1 and list(node.users) == waits:
                    self.seeds[node] = waits[0]
        for start in self.seeds:
            self.around(start)
        self.trim()
        return self.blocks

    def around(self, start: Node) -> None:
        self.k = self.chunks[start.name]
        if start in self.blocks or any(self.add_pair(start, q) for q in self.choices(start)):
            budget = self.reach * self.us.get(start.name, 0.0)
            self.forward(self.seeds[start], budget)
            self.backward(start, budget)

    def choices(self, start: Node) -> list[int]:
        """The blocks that a collective may begin with: rows, or a dimension behind the batch's."""
        shape = shape_of(start.all_input_nodes[0]) or ()
        found = []
        for d in range(max(len(shape) - 1, 0)):
            for q in (1, int(arguments(start).get("group_size") or 1)):
                found.append(prod(shape[:d]) * q)
        exchanged = arguments(start).get("input_split_sizes")
        return [len(exchanged)] if exchanged else list(dict.fromkeys(found))

    def add_pair(self, start: Node, blocks: int) -> bool:
        wait = self.seeds[start]
        if not self.add(start, blocks):
            return False
        if not self.add(wait, blocks):
            self.drop(start)
            return False
        return True

    def add(self, node: Node, blocks: int) -> bool:
        """Take a node in if its chunks fit to those of its neighbours."""
        made = recipe(node, blocks, self.k)
        if made is None or any(
            made.needs[x] != self.blocks[x] for x in made.needs if self.of.get(x) == self.k
        ):
            return False
        for user in node.users:
            if self.of.get(user) == self.k and self.recipes[user].needs[node] != blocks:
                return False
        self.blocks[node], self.recipes[node], self.of[node] = blocks, made, self.k
        return True

    def forward(self, wait: Node, budget: float) -> None:
        def after(node: Node, seen: set[Node]) -> Iterator[tuple[Node, int]]:
            for user in node.users:
                if user not in seen and user.op == "call_function":
                    blocks = blocks_after(user, node, self.blocks[node], self.k)
                    yield from [(user, blocks)] if blocks else []

        self.spread(wait, budget, after, self.index.__getitem__)

    def backward(self, start: Node, budget: float) -> None:
        def before(node: Node, seen: set[Node]) -> Iterator[tuple[Node, int]]:
            for x, blocks in self.recipes[node].needs.items():
                if blocks != WHOLE and x not in seen and x.op == "call_function":
                    yield x, blocks

        self.spread(start, budget, before, lambda node: -self.index[node])

    def spread(
        self,
        first: Node,
        budget: float,
        neighbours: Callable[[Node, set[Node]], Iterable[tuple[Node, int]]],
        place: Callable[[Node], int],
    ) -> None:
        """Take in neighbours, the nearest first, until there is enough compute. Collectives have a
        turn of their own."""
        spent, multiplied = 0.0, False
        heap: list[tuple[int, int, Node, int]] = []  # (place, a counter, node, its blocks)
        seen = {first}

        def push(node: Node) -> None:
            for other, blocks in neighbours(node, seen):
                seen.add(other)
                heappush(heap, (place(other), len(seen), other, blocks))

        push(first)
        while heap and not (multiplied and spent >= budget):
            _, _, node, blocks = heappop(heap)
            if not self.takes(node, blocks) or is_wait(node) or is_start(node):
                continue
            spent += self.us.get(node.name, 0.0)
            multiplied |= multiplies(node)
            push(node)

    def takes(self, node: Node, blocks: int) -> bool:
        """Is a node in the split that grows, or can it be? Other collectives only if they are to be
        split as well, and into as many chunks."""
        if node in self.of:
            return self.of[node] == self.k
        start = node.all_input_nodes[0] if is_wait(node) else node
        if is_start(start):
            wanted = start in self.seeds and self.chunks[start.name] == self.k
            return wanted and node in (start, self.seeds[start]) and self.add_pair(start, blocks)
        return self.add(node, blocks)

    def trim(self) -> None:
        """At its ends a split has products and collectives: the rest gains nothing there. All
        parts of a list are in it, or none."""
        before = -1
        while len(self.blocks) != before:
            before = len(self.blocks)
            for node in reversed(self.nodes):
                if node in self.blocks and self.is_loose(node):
                    self.drop(node)
            for node in self.nodes:
                if node in self.blocks and self.is_loose(node):
                    self.drop(node)

    def is_loose(self, node: Node) -> bool:
        if isinstance(node.meta.get("val"), (list, tuple)):
            return any(self.of.get(user) != self.of[node] for user in node.users)
        if multiplies(node) or is_wait(node) or is_start(node):
            return False
        k = self.of[node]
        used = any(self.of.get(user) == k for user in node.users)
        return not used or not any(self.of.get(x) == k for x in node.all_input_nodes)

    def drop(self, node: Node) -> None:
        for found in (self.blocks, self.recipes, self.of):
            found.pop(node, None)  # type: ignore[attr-defined]


def grown(
    graph_module: GraphModule,
    chunks: Mapping[str, int],
    us: Mapping[str, float],
    reach: float,
    sums: bool = False,
) -> list[Split]:
    """Splits around collectives, into so many chunks each, whether they pay or not; ``sums``: may
    products over rows be summed chunk by chunk? That rounds once more for each chunk."""
    growth = Growth(graph_module, us, chunks, reach)
    blocks = growth.grow()
    found: list[Split] = []
    inside: dict[Node, tuple[int, int]] = {}
    for members in _connected(growth.nodes, growth.of):
        k = growth.of[members[0]]
        started = [node.name for node in members if is_start(node)]
        if started and any(map(multiplies, members)):
            names = tuple(node.name for node in members)
            where = tuple(blocks[node] for node in members)
            found.append(Split(f"split_{started[0]}", k, names, where, tuple(started)))
            inside.update((node, (k, blocks[node])) for node in members)
    by_name = {node.name: node for node in inside} if sums else {}
    return [
        replace(split, sums=_sums([by_name[name] for name in split.members], inside))
        if sums
        else split
        for split in found
    ]


def _sums(members: Iterable[Node], inside: Mapping[Node, tuple[int, int]]) -> tuple[str, ...]:
    """Products over rows of these and of nodes of any split that are cut in the same places."""
    found: dict[str, None] = {}
    for y in members:
        for node in y.users:
            x = summed_over(node)
            if x is None or node.args[1] is not y or node in inside or inside.get(x) != inside[y]:
                continue
            k, blocks = inside[y]
            if [chunk_dim(shape_of(v), blocks, k) for v in (x, y)] == [0, 0]:
                found[node.name] = None
    return tuple(found)


def summed_over(node: Node) -> Node | None:
    """x of ``x.t() @ y``."""
    if node.target is not aten.mm.default or not isinstance(node.args[0], Node):
        return None
    left = node.args[0]
    x = left.args[0] if left.target is aten.t.default else None
    return x if isinstance(x, Node) and x is not node.args[1] else None


def chained(nodes: Iterable[Node], splits: Iterable[Split]) -> Iterator[tuple[str, str]]:
    """(one, other) of collectives of a split, where the other sends what is computed in chunks from
    the one's result."""
    member = {name for split in splits for name in split.members}
    behind: dict[Node, frozenset[str]] = {}  # member -> the collectives right before it
    for node in nodes:
        if node.name not in member:
            continue
        before = frozenset().union(*(behind.get(x, ()) for x in node.all_input_nodes))
        if is_start(node):
            yield from ((name, node.name) for name in sorted(before))
            before = frozenset([node.name])
        behind[node] = before


def _connected(nodes: Sequence[Node], of: Mapping[Node, int]) -> list[list[Node]]:
    """Members that hang together and have as many chunks, in the order of the graph."""
    above: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while above[node] is not node:
            above[node] = node = above[above[node]]
        return node

    for node in nodes:
        if node in of:
            above[node] = node
            for x in node.all_input_nodes:
                if of.get(x) == of[node]:
                    above[root(x)] = node
    found: dict[Node, list[Node]] = {}
    for node in above:
        found.setdefault(root(node), []).append(node)
    return list(found.values())


# -- how ---


def split_graph(graph_module: GraphModule, splits: Sequence[Split]) -> GraphModule:
    """A new graph with the splits made, else in the order that it has."""
    return _Splitting(graph_module, splits).run()


def is_left_of_sums(node: Node, sums: Collection[str]) -> bool:
    """Is it x.t() of such products, and of nothing else?"""
    turned = node.target is aten.t.default and bool(node.users)
    return turned and all(u.name in sums and u.args[0] is node for u in node.users)


class _Splitting(Rewrite):
    def __init__(self, graph_module: GraphModule, splits: Sequence[Split]) -> None:
        super().__init__(graph_module)
        self.member = {
            name: (split.chunks, blocks)
            for split in splits
            for name, blocks in zip(split.members, split.blocks, strict=True)
        }
        self.sums = {name: split.chunks for split in splits for name in split.sums}
        self.chunks: dict[Node, list[Node]] = {}
        self.cut: dict[Any, list[Node]] = {}  # of nodes that come in

    def run(self) -> GraphModule:
        for node in self.given.graph.nodes:
            try:
                if node.name in self.member:
                    self.chunk(node, *self.member[node.name])
                elif node.name in self.sums:
                    self.add_up(node, self.sums[node.name])
                elif not is_left_of_sums(node, self.sums):
                    self.copy(node)
            except RuntimeError as error:  # torch says that it is no view
                raise Infeasible(f"{node.name}: {error}") from error
        return self.finish()

    def chunk(self, node: Node, k: int, blocks: int) -> None:
        made = recipe(node, blocks, k)
        if made is None:
            raise Infeasible(f"{node.name} cannot be run in {k} chunks")
        shape = chunk_shape(shape_of(node) or (), blocks, k)
        self.chunks[node] = []
        for j in range(k):

            def give(x: Node, j: int = j) -> Node:
                return self.part(x, made.needs[x], k, j)

            args, kwargs = with_inputs(made, give)
            name = f"{node.name}_c{j}"
            if is_start(node) or is_wait(node):
                call = self.send(name, shape, *args, like=node, **kwargs)
            else:
                call = self.call(name, node.target, *args, like=node, **kwargs)
            self.chunks[node].append(call)
        val = self.chunks[node][0].meta["val"]
        if hasattr(val, "shape") and tuple(val.shape) != shape:
            raise Infeasible(f"a chunk of {node.name} has the shape {tuple(val.shape)}")

    def add_up(self, node: Node, k: int) -> None:
        """x.t() @ y, chunk by chunk."""
        left, y = node.args
        made: Node | None = None
        for j in range(k):
            x = self.chunks[left.args[0]][j]  # type: ignore[union-attr, index]
            turned = self.call(f"{node.name}_t{j}", aten.t.default, x, like=left)  # type: ignore[arg-type]
            both = (turned, self.chunks[y][j])  # type: ignore[index]
            op, args = (
                (aten.mm.default, both) if made is None else (aten.addmm.default, (made, *both))
            )
            made = self.call(f"{node.name}_c{j}", op, *args, like=node)
        assert made is not None
        self.made[node] = made

    def part(self, node: Node, blocks: int, k: int, j: int) -> Node:
        """Chunk j of an input, or all of it."""
        if blocks == WHOLE:
            return self.whole(node)
        if self.member.get(node.name) == (k, blocks):
            return self.chunks[node][j]
        key = (node, blocks, k)
        if key not in self.cut:
            self.cut[key] = [self.take_out(node, blocks, k, i) for i in range(k)]
        return self.cut[key][j]

    def take_out(self, node: Node, blocks: int, k: int, j: int) -> Node:
        """Chunk j of a tensor that is whole."""
        x, name = self.whole(node), f"{node.name}_part{j}"
        shape = shape_of(node) or ()
        d = chunk_dim(shape, blocks, k) or 0
        each = blocks // prod(shape[:d])
        wide = shape[d] // each // k
        if each > 1:
            table = [*shape[:d], each, shape[d] // each, *shape[d + 1 :]]
            x = self.call(f"{name}_table", aten.view.default, x, table, like=node)
        at = d + (each > 1)
        x = self.call(f"{name}_rows", aten.slice.Tensor, x, at, j * wide, (j + 1) * wide, like=node)
        if blocks > 1:
            kind = torch.contiguous_format
            x = self.call(f"{name}_copy", aten.clone.default, x, memory_format=kind, like=node)
        if each > 1:
            whole = list(chunk_shape(shape, blocks, k))
            x = self.call(name, aten.view.default, x, whole, like=node)
        return x

    def whole(self, node: Node) -> Node:
        if node in self.chunks and node not in self.made:
            self.made[node] = self.put_together(node)
        return self.made[node]

    def put_together(self, node: Node) -> Node:
        """All chunks of a member, in their places; of a view, what it is of, seen so again."""
        k, blocks = self.member[node.name]
        shape, parts = shape_of(node) or (), self.chunks[node]
        if is_view(node):
            return self.graph.node_copy(node, self.whole)
        if is_start(node):
            raise Infeasible(f"{node.name} is needed in whole")
        d, name = chunk_dim(shape, blocks, k) or 0, f"{node.name}_whole"
        each = blocks // prod(shape[:d])
        if each == 1:
            return self.call(name, aten.cat.default, parts, d, like=node)
        table = [*shape[:d], each, shape[d] // each // k, *shape[d + 1 :]]
        rows = [
            self.call(f"{node.name}_rows{j}", aten.view.default, x, table, like=node)
            for j, x in enumerate(parts)
        ]
        joined = self.call(f"{node.name}_joined", aten.cat.default, rows, d + 1, like=node)
        return self.call(name, aten.view.default, joined, list(shape), like=node)
