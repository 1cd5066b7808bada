"""Graphs with splits and buckets, to be planned beside the one that came in.

What gains is found out on a graph with few layers (repeats.py), by quick schedules without a cap;
that is then done in all layers. So what is proposed depends on the graph and the prices alone, not
on the memory cap: every proposal is planned under every cap, and a larger cap never gives a slower
plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node

from fcoll.costs.machine import Machine
from fcoll.scheduling import classic
from fcoll.scheduling.buckets import SATURATED, Bucket, merged, proposals
from fcoll.scheduling.node_order import node_order
from fcoll.scheduling.priced import Budget, Change, Priced, Reader, Wanted, bucket_costs
from fcoll.scheduling.repeats import fewer_layers
from fcoll.scheduling.reuse import Reuse, by_room, repeated, without
from fcoll.scheduling.rewrite import fake_mode_of
from fcoll.scheduling.runtime import CollectivePrice
from fcoll.scheduling.split_choice import SplitChoice, SplitSearch, where_room_is, with_splits

_NEVER = float("inf")
#: Of the time of repeated collectives that is saved: what fits under a cap is not known before.
PARTS = (0.25, 1.0, 0.5, 0.75)
CHOICES = 3  # sets of splits that are made in all layers, each with and without hidden collectives
REFINED = 40  # graphs that may still be made: then the choices are tried on the whole graph, too
#: Orders in which much is under way at once: waits late, and starts early too.
LATE, EARLY = "waits late", "starts early"
Packing = tuple[str, float]  # an order, and the size of buckets


@dataclass
class ProfitableChanges:
    """What gains on a graph with few layers."""

    reuse: bool = False
    choices: list[SplitChoice] = field(default_factory=list)
    packings: list[Packing] = field(default_factory=list)  # of the graph with neither
    packings_of_best: list[Packing] = field(default_factory=list)  # and with both


def changes(
    base: Priced,
    machine: Machine,
    read: Reader,
    wanted: Wanted,
    budget: Budget,
    us_of: CollectivePrice | None = None,
) -> Iterator[Change]:
    """What is worth planning, as far as the budget goes; ``us_of`` prices collectives before the
    machine does."""
    module = base.change.graph_module
    if fake_mode_of(module.graph.nodes) is None:
        return
    tool = _Tool(machine, read, us_of)
    small = fewer_layers(module)
    few = base if small is None else read(replace(base.change, graph_module=small))
    found = _found(few, tool, wanted, Budget(budget.tries))
    made = []
    for priced in _split_and_reused(base, tool, found, budget):
        made.append(priced)
        yield priced.change
    yield from tool.bucketed(base, found.packings, budget)
    if made and found.packings_of_best:
        best = min(made, key=lambda priced: priced.quick_us)
        yield from tool.bucketed(best, found.packings_of_best, budget)


def _found(few: Priced, tool: _Tool, wanted: Wanted, budget: Budget) -> ProfitableChanges:
    """Try it on a graph with few layers."""
    found, best = ProfitableChanges(), few
    if wanted.reuse and budget.take(few.change.graph_module):
        less = tool.without(few, repeated(few.change.graph_module))
        if less is not None and less.quick_us < few.quick_us:
            found.reuse, best = True, less
    if wanted.splits:
        search = SplitSearch(few, tool.machine, tool.read, budget, wanted.sums)
        found.choices = search.run()[:CHOICES]
        for choice in found.choices[:1]:
            made = search.tried[choice]
            if best is not few and budget.take(few.change.graph_module):
                made = with_splits(best, choice, tool.machine, tool.read) or made
            best = min(best, made, key=lambda priced: priced.quick_us)
    if wanted.buckets:
        found.packings = tool.packings(few, budget)
        found.packings_of_best = tool.packings(best, budget) if best is not few else []
    return found


def _split_and_reused(
    base: Priced, tool: _Tool, found: ProfitableChanges, budget: Budget
) -> Iterator[Priced]:
    """With splits, then without more and more of the collectives that have run before."""
    module = base.change.graph_module

    def split(priced: Priced, choice: SplitChoice) -> Iterator[Priced]:
        if budget.take(module):
            made = with_splits(priced, choice, tool.machine, tool.read)
            yield from [made] if made is not None else []

    best = _with_and_without_sums(found.choices[:1])
    for choice in best:
        yield from split(base, choice)
    for less in tool.reused(base, budget) if found.reuse else ():
        yield less
        for choice in found.choices[:1]:
            yield from split(less, choice)
    for choice in best:
        yield from where_room_is(base, choice, tool.machine, tool.read, budget)
    every = dict.fromkeys(replace(c, hidden=h) for c in found.choices for h in (False, True))
    if budget.nodes > REFINED * len(module.graph.nodes):
        yield from SplitSearch(base, tool.machine, tool.read, budget).refined(list(every))[:CHOICES]
    else:
        for choice in every:
            if choice != found.choices[0]:
                yield from split(base, choice)


def _with_and_without_sums(choices: list[SplitChoice]) -> list[SplitChoice]:
    """Sums by chunks hold more, and may not fit under a cap."""
    return list(dict.fromkeys(replace(c, sums=sums) for c in choices for sums in (c.sums, False)))


@dataclass
class _Tool:
    """Makes and prices changed graphs."""

    machine: Machine
    read: Reader
    us_of: CollectivePrice | None

    def without(self, base: Priced, reuses: list[Reuse]) -> Priced | None:
        if not reuses:
            return None
        made = without(base.change.graph_module, reuses)
        return self.read(replace(base.change, graph_module=made, reuses=tuple(reuses)))

    def reused(self, base: Priced, budget: Budget) -> Iterator[Priced]:
        """Without parts of the collectives that have run before."""
        graph_module, us = base.change.graph_module, base.job.us
        found = by_room(repeated(graph_module), graph_module, us)
        saved = sum(us.get(reuse.collective, 0.0) for reuse in found)
        seen: list[list[Reuse]] = []
        for part in PARTS:
            some, left = [], part * saved
            for reuse in found:
                left -= us.get(reuse.collective, 0.0)
                if left >= -1e-9 * saved:
                    some.append(reuse)
            if some and some not in seen and budget.take(graph_module):
                seen.append(some)
                if (made := self.without(base, some)) is not None:
                    yield made

    # -- buckets ---

    def packings(self, few: Priced, budget: Budget) -> list[Packing]:
        """Those that gain, the best first."""
        every = [(order, size) for order in (LATE, EARLY) for size in SATURATED]
        us = {
            packing: self.read(change).quick_us
            for packing, change in self.packed(few, every, budget)
        }
        return sorted((p for p in us if us[p] < few.quick_us), key=us.__getitem__)

    def bucketed(
        self, priced: Priced, packings: Collection[Packing], budget: Budget
    ) -> Iterator[Change]:
        yield from (change for _, change in self.packed(priced, packings, budget))

    def packed(
        self, priced: Priced, packings: Collection[Packing], budget: Budget
    ) -> Iterator[tuple[Packing, Change]]:
        given = priced.change
        seen: list[list[Bucket]] = []
        for packing in packings:
            nodes = self.order(priced, packing[0])
            sizes = packing[1:]
            for found in proposals(nodes, priced.collectives, self.machine, self.us_of, sizes):
                if found in seen or not budget.take(given.graph_module):
                    continue
                seen.append(found)
                costs = given.costs
                if costs is not None:
                    costs = bucket_costs(costs, found, priced.collectives, self.machine)
                made = merged(given.graph_module, nodes, found)
                yield packing, replace(given, graph_module=made, buckets=tuple(found), costs=costs)

    def order(self, priced: Priced, name: str) -> list[Node]:
        problem = priced.job.problem
        order: Sequence[int] = range(problem.n)
        if name == EARLY:
            order = classic.by_communication(problem, raise_comms=True)
        names = priced.job.names(classic.waits_late(problem, order, _NEVER))
        return node_order(priced.change.graph_module, names)
