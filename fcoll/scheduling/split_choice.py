"""Which collectives are run in chunks: found by trying, kind by kind.

Layers repeat, so collectives that are alike (the same call, between the same calls) are split
together or not at all. Where compute in chunks lies between two kinds, as the products between a
gather and a scatter do, the chunks of both hide it: such pairs are tried, and put together as long
as that is faster by a quick schedule. So is a split of all that is exposed. Then one kind after the
other is left whole again. A choice names kinds, not collectives: what is found on a graph with few
layers (repeats.py) holds for all of them. How much may be tried is counted in nodes, so that the
same graph has the same splits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import Node

from fcoll.costs.machine import Machine
from fcoll.graph.nodes import is_start
from fcoll.scheduling.bounds import memory_profile
from fcoll.scheduling.priced import Budget, Priced, Reader, split_costs
from fcoll.scheduling.splits import Infeasible, Split, chained, grown, split_graph

#: (chunks, how much compute around a collective is split, in times of its own).
OPTIONS = ((2, 1.0), (4, 1.0), (2, 0.0))
REACHES = (3.0, 10.0)  # tried for the best: where more is in chunks less is put together again
PAIRS = 4  # the best ones, that are put together
#: Parts of the peak: a split holds more while it runs, so where the program holds that much already
#: it may not fit under a cap. There are proposals that leave such places out.
ROOM = (0.95, 0.8)


@dataclass(frozen=True)
class SplitChoice:
    """What was chosen: the kinds of collectives, in how many chunks, how far around them, and
    whether those of these kinds that a quick schedule hides are split, too."""

    kinds: frozenset[str]
    chunks: int
    reach: float
    hidden: bool = False
    sums: bool = False  # products over rows chunk by chunk, too

    def starts(self, base: Priced) -> list[str]:
        """The collectives of a graph that are to be split."""
        starts = (node for node in base.change.graph_module.graph.nodes if is_start(node))
        seen = base.exposed_us
        return [n.name for n in starts if kind(n) in self.kinds and (self.hidden or n.name in seen)]


@dataclass
class SplitSearch:
    """Sets of splits of a graph, and the time that a quick schedule takes with each."""

    base: Priced
    machine: Machine
    read: Reader
    budget: Budget
    sums: bool = False
    tried: dict[SplitChoice, Priced] = field(default_factory=dict)

    def run(self) -> list[SplitChoice]:
        """The choices that are faster than the graph as it is, the best first."""
        first, exposed = self.base.quick, self.base.exposed_us
        kind_of = {
            n.name: kind(n) for n in self.base.change.graph_module.graph.nodes if is_start(n)
        }
        everything = frozenset(kind_of[name] for name in exposed)
        for k, reach in OPTIONS:
            self.time(SplitChoice(everything, k, reach, sums=self.sums))
        if self.tried:
            self.join(self.pairs(everything), first.us)
            if self.time(self.best()) < first.us:
                self.time(replace(self.best(), hidden=True))
                self.leave_whole(self.best())
                kinds = frozenset(self.kind_of.values())
                self.leave_whole(SplitChoice(kinds, *OPTIONS[0], hidden=True, sums=self.sums))
                for reach in REACHES:
                    self.time(replace(self.best(), reach=reach))
        better = [choice for choice in self.tried if self.time(choice) < first.us]
        better.sort(key=lambda choice: (self.time(choice), len(choice.kinds)))
        return list({self.tried[c].change.splits: c for c in reversed(better)}.values())[::-1]

    def refined(self, choices: Sequence[SplitChoice]) -> list[Priced]:
        """The best of these choices, and with one kind after the other left whole."""
        if choices:
            best = min(choices, key=self.time)
            self.leave_whole(best)
        better = [made for made in self.tried.values() if made.quick_us < self.base.quick_us]
        return sorted(better, key=lambda made: made.quick_us)

    def pairs(self, exposed: frozenset[str]) -> list[SplitChoice]:
        """Two kinds, one behind the other in the splits of everything."""
        made = next(iter(self.tried.values()))
        nodes = self.base.change.graph_module.graph.nodes
        found = (
            frozenset([self.kind_of[one], self.kind_of[other]])
            for one, other in chained(nodes, made.change.splits)
        )
        return [
            SplitChoice(both, *OPTIONS[0], sums=self.sums)
            for both in dict.fromkeys(found)
            if both <= exposed
        ]

    def join(self, pairs: Sequence[SplitChoice], us: float) -> None:
        """The best pair, and to it each other one that makes it faster."""
        best: SplitChoice | None = None
        for pair in sorted(pairs, key=self.time)[:PAIRS]:
            both = pair if best is None else replace(pair, kinds=best.kinds | pair.kinds)
            if self.time(both) < us:
                best, us = both, self.time(both)

    def best(self) -> SplitChoice:
        return min(self.tried, key=self.time)

    def leave_whole(self, choice: SplitChoice) -> None:
        """One kind after the other, as long as that gets better; those first that are exposed
        least."""
        best, us = choice, self.time(choice)
        gone = True
        while gone:
            gone = False
            for one in self.least_exposed_first():
                fewer = replace(best, kinds=best.kinds - {one})
                if one in self.in_chunks(best) and fewer.kinds and self.time(fewer) < us:
                    best, us, gone = fewer, self.time(fewer), True

    def in_chunks(self, choice: SplitChoice) -> frozenset[str]:
        """Of a choice's kinds those that are split; all of them where the splits cannot be made."""
        if choice not in self.tried:
            return choice.kinds
        splits = self.tried[choice].change.splits
        return frozenset(self.kind_of[name] for split in splits for name in split.collectives)

    @cached_property
    def kind_of(self) -> dict[str, str]:
        nodes = self.base.change.graph_module.graph.nodes
        return {node.name: kind(node) for node in nodes if is_start(node)}

    def least_exposed_first(self) -> list[str]:
        us = dict.fromkeys(self.kind_of.values(), 0.0)
        for name, waited in self.base.exposed_us.items():
            us[self.kind_of[name]] += waited
        return sorted(us, key=us.__getitem__)

    def time(self, choice: SplitChoice) -> float:
        """What a quick schedule takes; for ever if the splits cannot be made or time is up."""
        if choice not in self.tried and self.budget.take(self.base.change.graph_module):
            made = with_splits(self.base, choice, self.machine, self.read)
            if made is not None:
                self.tried[choice] = made
        return self.tried[choice].quick_us if choice in self.tried else float("inf")


def where_room_is(
    base: Priced, choice: SplitChoice, machine: Machine, read: Reader, budget: Budget
) -> Iterator[Priced]:
    """A choice's splits without the collectives at which much is held."""
    problem, module = base.job.problem, base.change.graph_module
    held = memory_profile(problem, range(problem.n))
    at = {name: held[u] - problem.held_bytes for u, name in enumerate(problem.names)}
    most = max(at.values())
    starts = choice.starts(base)
    for part in ROOM:
        some = [name for name in starts if at[name] < part * most]
        if some and len(some) < len(starts) and budget.take(module):
            made = with_splits(base, choice, machine, read, some)
            if made is not None:
                yield made


def with_splits(
    base: Priced,
    choice: SplitChoice,
    machine: Machine,
    read: Reader,
    starts: Sequence[str] | None = None,
) -> Priced | None:
    """The graph with a choice's splits, or of those only these; None where they cannot be made, or
    there are none."""
    change, us = base.change, base.job.us
    if starts is None:
        starts = choice.starts(base)
    chunks = dict.fromkeys(starts, choice.chunks)
    found: tuple[Split, ...] = tuple(
        grown(change.graph_module, chunks, us, choice.reach, choice.sums)
    )
    if not found:
        return None
    try:
        graph_module = split_graph(change.graph_module, found)
    except Infeasible:
        return None
    costs = change.costs
    if costs is not None:
        out_bytes = {step.name: step.out_bytes for step in base.job}
        costs = split_costs(costs, found, base.collectives, machine, out_bytes)
    return read(replace(change, graph_module=graph_module, splits=found, costs=costs))


def kind(node: Node) -> str:
    """Equal of collectives that are alike: the same call and sizes, between the same calls."""
    sent = node.all_input_nodes[0] if node.all_input_nodes else node
    behind = [user for wait in node.users for user in wait.users]
    around = [_call(x) for x in (node, sent, *sent.all_input_nodes)]
    return repr((around, sorted(_call(x) for x in behind)))


def _call(node: Node) -> str:
    val = node.meta.get("val")
    return f"{node.target if node.op == 'call_function' else node.op} {getattr(val, 'shape', '')}"
