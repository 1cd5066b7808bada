"""Which collectives are run in chunks: found by trying, kind by kind.

Layers repeat, so collectives that are alike (the same call, between the same calls) are split
together or not at all. Where compute in chunks lies between two kinds, as the products between a
gather and a scatter do, the chunks of both hide it: such pairs are tried, and put together as long
as that is faster by a quick schedule. So is a split of all that is exposed. Then one kind after the
other is left whole again. How much may be tried is counted in nodes, so that the same graph has the
same splits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node

from fcoll.costs.machine import Machine
from fcoll.scheduling.bounds import Outcome, memory_profile
from fcoll.scheduling.overlap import Overlap
from fcoll.scheduling.priced import Budget, Priced, Reader, split_costs
from fcoll.scheduling.problem import START, Problem
from fcoll.scheduling.splits import Infeasible, Split, chained, grown, split_graph

#: (chunks, how much compute around a collective is split, in times of its own).
OPTIONS = ((2, 1.0), (4, 1.0), (2, 0.0))
PAIRS = 4  # the best ones, that are put together
#: Parts of the peak: a split holds more while it runs, so where the program holds that much already
#: it may not fit under a cap. There are proposals that leave such places out.
ROOM = (0.95, 0.8)


@dataclass(frozen=True)
class Choice:
    """What was chosen: the collectives, in how many chunks, and how far around them."""

    starts: frozenset[str]
    chunks: int
    reach: float


@dataclass
class Search:
    """Sets of splits of a graph, and the time that a quick schedule takes with each."""

    base: Priced
    machine: Machine
    read: Reader
    budget: Budget
    tried: dict[Choice, Priced] = field(default_factory=dict)

    def run(self) -> list[Choice]:
        """The choices that are faster than the graph as it is, the best first."""
        problem = self.base.job.problem
        first = Overlap(problem, 0.0).quick()
        exposed = _exposed_us(problem, first)
        kind_of = _kinds(self.base.change.graph_module.graph.nodes, exposed)
        everything = frozenset(exposed)
        for k, reach in OPTIONS:
            self.time(Choice(everything, k, reach))
        if self.tried:
            self.join(self.pairs(kind_of), first.us)
            if self.time(self.best()) < first.us:
                self.leave_whole(self.best(), list(dict.fromkeys(kind_of.values())))
        better = [choice for choice in self.tried if self.time(choice) < first.us]
        return sorted(better, key=self.time)

    def pairs(self, kind_of: Mapping[str, frozenset[str]]) -> list[Choice]:
        """Two kinds, one behind the other in the splits of everything."""
        made = next(iter(self.tried.values()))
        nodes = self.base.change.graph_module.graph.nodes
        found = (
            kind_of[one] | kind_of[other]
            for one, other in chained(nodes, made.change.splits)
            if one in kind_of and other in kind_of
        )
        return [Choice(starts, *OPTIONS[0]) for starts in dict.fromkeys(found)]

    def join(self, pairs: Sequence[Choice], us: float) -> None:
        """The best pair, and to it each other one that makes it faster."""
        best: Choice | None = None
        for pair in sorted(pairs, key=self.time)[:PAIRS]:
            both = pair if best is None else replace(pair, starts=best.starts | pair.starts)
            if self.time(both) < us:
                best, us = both, self.time(both)

    def best(self) -> Choice:
        return min(self.tried, key=self.time)

    def leave_whole(self, choice: Choice, kinds: Sequence[frozenset[str]]) -> None:
        """One kind after the other, as long as that gets better."""
        best, us = choice, self.time(choice)
        gone = True
        while gone:
            gone = False
            for kind in kinds:
                fewer = replace(best, starts=best.starts - kind)
                if kind <= best.starts and fewer.starts and self.time(fewer) < us:
                    best, us, gone = fewer, self.time(fewer), True

    def time(self, choice: Choice) -> float:
        """What a quick schedule takes; for ever if the splits cannot be made or time is up."""
        if choice not in self.tried and self.budget.take(self.base.change.graph_module):
            made = self.made(choice)
            if made is not None:
                self.tried[choice] = made
        return self.tried[choice].quick_us if choice in self.tried else float("inf")

    def made(self, choice: Choice) -> Priced | None:
        return with_splits(self.base, choice, self.machine, self.read)

    def where_room_is(self, choice: Choice) -> Iterator[Priced]:
        """The same without the collectives at which much is held."""
        problem = self.base.job.problem
        held = memory_profile(problem, range(problem.n))
        at = {name: held[u] - problem.held_bytes for u, name in enumerate(problem.names)}
        most = max(at.values())
        for part in ROOM:
            some = frozenset(name for name in choice.starts if at[name] < part * most)
            if some and some != choice.starts and self.budget.take(self.base.change.graph_module):
                made = self.made(replace(choice, starts=some))
                if made is not None:
                    yield made


def with_splits(base: Priced, choice: Choice, machine: Machine, read: Reader) -> Priced | None:
    """The graph with a choice's splits; None where they cannot be made, or there are none."""
    change, us = base.change, base.job.us
    found: tuple[Split, ...] = tuple(
        grown(change.graph_module, choice.starts, us, choice.chunks, choice.reach)
    )
    if not found:
        return None
    try:
        graph_module = split_graph(change.graph_module, found)
    except Infeasible:
        return None
    costs = change.costs
    if costs is not None:
        costs = split_costs(costs, found, base.collectives, machine)
    return read(replace(change, graph_module=graph_module, splits=found, costs=costs))


def _kinds(nodes: Iterable[Node], exposed: Mapping[str, float]) -> dict[str, frozenset[str]]:
    """Of each collective those that are alike: the same call and sizes, between the same calls.
    Those first that are exposed least."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if node.name in exposed:
            found.setdefault(_kind(node), []).append(node.name)

    def exposed_us(names: list[str]) -> float:
        return sum(exposed[name] for name in names)

    alike = map(frozenset, sorted(found.values(), key=exposed_us))
    return {name: kind for kind in alike for name in sorted(kind)}


def _kind(node: Node) -> str:
    sent = node.all_input_nodes[0] if node.all_input_nodes else node
    behind = [user for wait in node.users for user in wait.users]
    around = [_call(x) for x in (node, sent, *sent.all_input_nodes)]
    return repr((around, sorted(_call(x) for x in behind)))


def _call(node: Node) -> str:
    val = node.meta.get("val")
    return f"{node.target if node.op == 'call_function' else node.op} {getattr(val, 'shape', '')}"


def _exposed_us(problem: Problem, outcome: Outcome) -> dict[str, float]:
    """How long compute waits for each collective, by the name of its start."""
    free = [0.0] * len(problem.streams)
    ends = [0.0] * problem.n
    last = [-1] * len(problem.streams)
    before: dict[int, int] = {}  # the collective that another one queued behind
    found: dict[str, float] = {}
    now = 0.0
    for u in outcome.order:
        begin = max([now, *(ends[v] for v in problem.flights[u])])
        if problem.kind[u] == START:
            s = problem.stream[u]
            if free[s] > begin:
                before[u] = last[s]
            begin = max(begin, free[s])
            ends[u] = free[s] = begin + problem.us[u]
            last[s] = u
            continue
        if begin > now and problem.flights[u]:
            v: int | None = max(problem.flights[u], key=ends.__getitem__)
            end = begin
            while v is not None and end > now:  # what it queued for is theirs
                low = max(now, ends[v] - problem.us[v])
                found[problem.names[v]] = found.get(problem.names[v], 0.0) + max(end - low, 0.0)
                end, v = min(end, low), before.get(v)
        ends[u] = now = begin + problem.us[u]
    return {name: us for name, us in found.items() if us > 0}
