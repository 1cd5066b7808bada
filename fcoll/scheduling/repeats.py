"""Layers repeat: a graph with few of them, on which changes are chosen for all.

The nodes of a model's layers follow one another in the same order, forward and again backward: a
*run* is a stretch of the graph in which every node is like the one a period before it. A smaller
graph has the first and the last instances of each run; who used a value of an instance that is gone
uses that of the last one kept before it. It computes something else, and nobody runs it: it takes
its time in the same way, so what is worth changing in it is worth changing in all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fcoll.graph._torch import lazy_graph_module

KEPT = 2  # instances of a run at each end
PERIODS = 8  # lengths that are tried


@dataclass(frozen=True, order=True)
class Repetition:
    """``count`` instances of ``period`` nodes each, from ``begin`` on."""

    begin: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.begin + self.period * self.count


def fewer_layers(graph_module: GraphModule) -> GraphModule | None:
    """The graph with the first and last instances of each run, its nodes named as they were; None
    where that is most of it."""
    nodes = list(graph_module.graph.nodes)
    calls = [node for node in nodes if node.op == "call_function"]
    instead: dict[Node, Node] = {}
    for run in runs([like(node) for node in calls]):
        kept = run.begin + KEPT * run.period
        for i in range(kept, run.end - KEPT * run.period):
            at = (i - run.begin) % run.period
            instead[calls[i]] = calls[kept - run.period + at]
    if 3 * len(instead) < len(calls):
        return None
    return _without(graph_module, nodes, instead)


def _without(
    graph_module: GraphModule, nodes: Sequence[Node], instead: dict[Node, Node]
) -> GraphModule:
    graph = Graph()
    made: dict[Node, Node] = {}

    def give(node: Node) -> Node:
        return made[instead.get(node, node)]

    for node in nodes:
        if node.op == "output":
            args = map_arg(tuple(_there(node.args[0], instead)), give)
            graph.output(args)
        elif node not in instead:
            made[node] = graph.node_copy(node, give)
    graph.lint()
    module = lazy_graph_module(graph_module, graph)
    module.meta.update(graph_module.meta)
    return module


def _there(output: Any, instead: dict[Node, Node]) -> list[Any]:
    """What of a graph's results is left."""
    given = output if isinstance(output, (list, tuple)) else [output]
    return [x for x in given if not isinstance(x, Node) or x not in instead]


def like(node: Node) -> Any:
    """Equal of calls that are alike: the same op, sizes and other arguments."""
    val = node.meta.get("val")
    literals = repr(map_arg((node.args, node.kwargs), lambda x: None))
    # as text: sizes may be symbols, which have no hash
    return (node.target, literals, str(getattr(val, "shape", None)), getattr(val, "dtype", None))


def runs(kinds: Sequence[Any]) -> list[Repetition]:
    """The longest runs of a sequence that do not overlap, with more instances than are kept.

    >>> runs("xabcabcabcabcabcabcy")
    [Repetition(begin=1, period=3, count=6)]
    """
    number: dict[Any, int] = {}
    row = [number.setdefault(kind, len(number)) for kind in kinds]
    found = [run for period in _periods(row) for run in _of_period(row, period)]
    found.sort(key=lambda run: (run.begin - run.end, run.period))
    taken: list[Repetition] = []
    for run in found:
        if all(run.end <= other.begin or other.end <= run.begin for other in taken):
            taken.append(run)
    return sorted(taken)


def _periods(row: Sequence[int]) -> list[int]:
    """Distances between one kind's neighbours that cover most of the sequence."""
    last: dict[int, int] = {}
    covered: Counter[int] = Counter()
    for i, kind in enumerate(row):
        if kind in last:
            covered[i - last[kind]] += i - last[kind]
        last[kind] = i
    return [period for period, _ in covered.most_common(PERIODS)]


def _of_period(row: Sequence[int], period: int) -> Iterator[Repetition]:
    begin = 0
    for i in range(period, len(row) + 1):
        if i < len(row) and row[i] == row[i - period]:
            continue
        count = (i - begin) // period
        if count > 2 * KEPT:
            yield Repetition(begin, period, count)
        begin = i - period + 1
