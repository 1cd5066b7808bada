"""Collectives that are sent as one: which, and how a graph is changed for it.

A bucket pays where messages are small: n of them take n latencies, and a link is saturated only by
messages of several times its latency times its bandwidth. It costs copies, and it ties the members
together: none arrives before all have been sent. So buckets are proposed, made, planned like any
graph, copies priced, and kept if the plan is faster (planner.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fcoll.costs.machine import Machine
from fcoll.costs.model import collective_us
from fcoll.graph.issued import Issued
from fcoll.graph.nodes import arguments, has_named_group, is_start, is_wait, row_of_node
from fcoll.scheduling.rewrite import Rewrite
from fcoll.scheduling.runtime import CollectivePrice
from fcoll.table.gather import ALL_GATHER_INTO_TENSOR
from fcoll.table.reduce import ALL_REDUCE, REDUCE_SCATTER_TENSOR

aten = torch.ops.aten

MERGED = (ALL_REDUCE, ALL_GATHER_INTO_TENSOR, REDUCE_SCATTER_TENSOR)
SATURATED = (4.0, 32.0)  # messages of so many latencies: 80 and 97 % of the link's bandwidth


@dataclass(frozen=True)
class Bucket:
    """Collectives of one kind, group and dtype that become one message.

    ``name`` is the node that starts it, ``members`` are the starts that it replaces, in the order
    of their parts, ``waits`` their waits, whose names its parts have. ``bytes`` go in.
    """

    name: str
    op: str
    group: str
    dtype: str
    members: tuple[str, ...]
    waits: tuple[str, ...]
    bytes: int


# -- which ---


def saturating_bytes(call: Issued, machine: Machine, us_of: CollectivePrice | None = None) -> float:
    """Latency times bandwidth of a collective's group: at this size half of its time is latency."""

    def price(nbytes: int) -> Any:
        us = us_of(call, nbytes) if us_of is not None else None
        return us if us is not None else collective_us(call.op, call.n, nbytes, machine, call.ranks)

    latency, large = price(1), 1 << 28
    slope = (price(large) - latency) / large
    return float(latency / slope) if slope > 0 else math.inf


def proposals(
    order: Sequence[Node],
    collectives: Sequence[Issued],
    machine: Machine,
    us_of: CollectivePrice | None = None,
    sizes: Sequence[float] = SATURATED,
) -> Iterator[list[Bucket]]:
    """Sets of buckets for an order of nodes, each for another of the sizes."""
    calls = {c.start: c for c in collectives}

    def full_bytes(start: str) -> float:
        return saturating_bytes(calls[start], machine, us_of)

    seen: list[list[Bucket]] = []
    for times in sizes:
        found = list(_buckets(order, full_bytes, times))
        if found and found not in seen:
            seen.append(found)
            yield found


def _buckets(
    order: Sequence[Node], full_bytes: Callable[[str], float], times: float
) -> Iterator[Bucket]:
    """Runs of collectives that are alike, up to the size; the first must not be waited for before
    the last is issued."""
    waits = {node.args[0]: node for node in order if is_wait(node)}
    place = {node: i for i, node in enumerate(order)}
    sizes: dict[Any, float] = {}
    open_: dict[Any, list[Node]] = {}
    for node in order:
        key = _key(node, waits)
        if key is None:
            continue
        if key not in sizes:
            sizes[key] = times * full_bytes(node.name)
        run = open_.setdefault(key, [])
        total = sum(map(_sent, run)) + _sent(node)
        used = min((place[waits[member]] for member in run), default=math.inf)
        if run and (total > sizes[key] or used < place[node]):
            yield from _closed(run, waits)
            open_[key] = run = []
        run.append(node)
    for run in open_.values():
        yield from _closed(run, waits)


def small_runs(order: Sequence[Node], limit_bytes: int) -> Iterator[Bucket]:
    """Runs of all-reduces that are alike and small, with no other collective among them: sent as
    one they keep the order of collectives. None is waited for before the last is issued."""
    waits = {node.args[0]: node for node in order if is_wait(node)}
    run: list[Node] = []
    for node in order:
        small = row_of_node(node) is ALL_REDUCE and _is_small(node, waits, limit_bytes)
        alike = small and bool(run) and _key(node, waits) == _key(run[0], waits)
        waited = is_wait(node) and node.args[0] in run
        if run and (waited or (is_start(node) and not alike)):
            yield from _closed(run, waits)
            run = []
        if small:
            run.append(node)
    yield from _closed(run, waits)


def _is_small(node: Node, waits: dict[Any, Node], limit_bytes: int) -> bool:
    return _key(node, waits) is not None and _sent(node) <= limit_bytes


def _closed(run: list[Node], waits: dict[Any, Node]) -> Iterator[Bucket]:
    if len(run) > 1:
        given, row = arguments(run[0]), row_of_node(run[0])
        yield Bucket(
            name=f"bucket_{run[-1].name}",
            op=row.name if row else "",
            group=str(given["group_name"]),
            dtype=str(run[0].meta["val"].dtype).removeprefix("torch."),
            members=tuple(node.name for node in run),
            waits=tuple(waits[node].name for node in run),
            bytes=sum(map(_sent, run)),
        )


def _sent(node: Node) -> int:
    val = node.all_input_nodes[0].meta["val"]
    return val.numel() * val.element_size()


def _key(node: Node, waits: dict[Any, Node]) -> Any:
    """What must be equal in collectives that are sent together; None if it is sent alone."""
    row = row_of_node(node)
    if row not in MERGED or list(node.users) != [waits.get(node)] or not has_named_group(node):
        return None
    given = arguments(node)
    val = node.all_input_nodes[0].meta.get("val")
    plain = isinstance(val, Tensor) and all(isinstance(s, int) for s in val.shape)
    if not plain or not hasattr(val, "fake_mode") or val.numel() == 0 or not val.is_contiguous():
        return None
    others = {k: v for k, v in given.items() if not isinstance(v, Node)}
    if others.get("dim") or others.get("sizes") or others.get("factor") is not None:
        return None
    return (node.target, repr(sorted(others.items(), key=str)), val.dtype, val.device)


# -- how ---


def merged(
    graph_module: GraphModule, order: Sequence[Node], buckets: Sequence[Bucket]
) -> GraphModule:
    """A new graph in this order, with each bucket where its last member starts."""
    return _Merge(graph_module, buckets).run(order)


def made_again(
    graph_module: GraphModule, order: Sequence[str], buckets: Sequence[Bucket]
) -> GraphModule:
    """The graph with its buckets, from the graph without them and the names of all its nodes."""
    by_name = {node.name: node for node in graph_module.graph.nodes}
    members = {bucket.name: bucket.members for bucket in buckets}
    names = (x for name in order for x in members.get(name, (name,)))
    return merged(graph_module, [by_name[name] for name in names if name in by_name], buckets)


class _Merge(Rewrite):
    def __init__(self, graph_module: GraphModule, buckets: Sequence[Bucket]) -> None:
        super().__init__(graph_module)
        self.last = {b.members[-1]: b for b in buckets}
        self.member = {name for b in buckets for name in b.members}
        self.bucket_of = {wait: b for b in buckets for wait in b.waits}
        self.results: dict[str, Node] = {}  # bucket -> its wait

    def run(self, order: Sequence[Node]) -> GraphModule:
        for node in order:
            if node.name in self.member:
                if node.name in self.last:
                    self.merge(self.last[node.name])
            elif node.name in self.bucket_of:
                self.take_out(node, self.bucket_of[node.name])
            else:
                self.copy(node)
        return self.finish()

    def merge(self, bucket: Bucket) -> None:
        """One input, one collective, one wait."""
        starts = [self.by_name[name] for name in bucket.members]
        inputs = [self.made[node.all_input_nodes[0]] for node in starts]
        n = self.ranks(starts[0]) if bucket.op == REDUCE_SCATTER_TENSOR.name else 1
        # Of a reduce-scatter each rank's part of every member must lie together.
        name, row = bucket.name, starts[-1]
        flat = [
            self.call(f"{name}_flat_{i}", aten.view.default, x, [n, -1], like=node)
            for i, (x, node) in enumerate(zip(inputs, starts, strict=True))
        ]
        whole = self.call(f"{name}_cat", aten.cat.default, flat, 1, like=row)
        whole = self.call(f"{name}_sent", aten.view.default, whole, [-1], like=row)
        args = tuple(whole if isinstance(a, Node) else a for a in row.args)
        shape = [sum(node.meta["val"].numel() for node in starts)]
        started = self.send(name, shape, *args, like=row, **row.kwargs)
        wait = self.by_name[bucket.waits[-1]]
        self.results[name] = self.send(f"{name}_wait", shape, started, like=wait)

    def take_out(self, wait: Node, bucket: Bucket) -> None:
        """A member's part of the result, by the name of its wait."""
        starts = [self.by_name[name] for name in bucket.members]
        position, whole = bucket.waits.index(wait.name), self.results[bucket.name]
        n = self.ranks(starts[0]) if bucket.op == ALL_GATHER_INTO_TENSOR.name else 1
        counts = [node.meta["val"].numel() // n for node in starts]
        end = list(itertools.accumulate(counts))[position]
        name, begin = wait.name, end - counts[position]
        table = [n, sum(counts)]
        part = self.call(f"{name}_table", aten.view.default, whole, table, like=wait)
        part = self.call(f"{name}_part", aten.slice.Tensor, part, 1, begin, end, like=wait)
        if n > 1:
            kind = torch.contiguous_format
            copy = f"{name}_copy"
            part = self.call(copy, aten.clone.default, part, memory_format=kind, like=wait)
        shape = list(wait.meta["val"].shape)
        self.made[wait] = self.call(name, aten.view.default, part, shape, like=wait)

    def ranks(self, start: Node) -> int:
        return int(arguments(start)["group_size"])
