"""Graphs with splits and buckets, to be planned beside the one that came in.

What is proposed depends on the graph and the prices alone, not on the memory cap: so every proposal
is planned under every cap, and a larger cap never gives a slower plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fcoll.costs.machine import Machine
from fcoll.scheduling import classic
from fcoll.scheduling.buckets import Bucket, merged, proposals
from fcoll.scheduling.node_order import node_order
from fcoll.scheduling.priced import Budget, Change, Priced, Reader, Wanted, bucket_costs
from fcoll.scheduling.reuse import Reuse, by_room, repeated, without
from fcoll.scheduling.rewrite import fake_mode_of
from fcoll.scheduling.runtime import CollectivePrice
from fcoll.scheduling.split_choice import Search, with_splits

_NEVER = float("inf")
PARTS = (1.0, 0.75, 0.5, 0.25)  # of the time of repeated collectives that is saved


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
    if fake_mode_of(base.change.graph_module.graph.nodes) is None:
        return
    left_out = list(_with_reuse(base, read, budget)) if wanted.reuse else []
    yield from (priced.change for priced in left_out)
    if wanted.buckets:
        yield from _bucketed(base, machine, budget, us_of)
    search = Search(base, machine, read, budget)
    choices = search.run() if wanted.splits else []
    split = [search.tried[choice] for choice in choices[:2]]
    split += [made for choice in choices[:1] for made in search.where_room_is(choice)]
    for start in left_out if choices else ():
        if budget.take(start.change.graph_module):
            made = with_splits(start, choices[0], machine, read)
            split += [made] if made is not None else []
    yield from (priced.change for priced in split)
    best = min([base, *left_out, *split], key=lambda priced: priced.quick_us)
    if wanted.buckets and best is not base:
        yield from _bucketed(best, machine, budget, us_of)


def _with_reuse(base: Priced, read: Reader, budget: Budget) -> Iterator[Priced]:
    """Without all collectives that have run before, then with more and more of them."""
    graph_module, us = base.change.graph_module, base.job.us
    found = by_room(repeated(graph_module), graph_module, us)
    saved = sum(us.get(reuse.collective, 0.0) for reuse in found)
    before: list[Reuse] = []
    for part in PARTS:
        some, left = [], part * saved
        for reuse in found:
            left -= us.get(reuse.collective, 0.0)
            if left >= -1e-9 * saved:
                some.append(reuse)
        if some and some != before and budget.take(graph_module):
            before = some
            made = without(graph_module, some)
            priced = read(replace(base.change, graph_module=made, reuses=tuple(some)))
            if priced.quick_us >= base.quick_us:
                return  # it gains nothing even where memory is no matter
            yield priced


# -- buckets ---


def _bucketed(
    priced: Priced, machine: Machine, budget: Budget, us_of: CollectivePrice | None
) -> Iterator[Change]:
    """Buckets for orders in which much is under way at once: waits late, and starts early too."""
    problem, given = priced.job.problem, priced.change
    early = classic.by_communication(problem, raise_comms=True)
    seen: list[list[Bucket]] = []
    for order in (range(problem.n), early):
        names = priced.job.names(classic.waits_late(problem, order, _NEVER))
        nodes = node_order(given.graph_module, names)
        for found in proposals(nodes, priced.collectives, machine, us_of):
            if found in seen or not budget.take(given.graph_module):
                continue
            seen.append(found)
            costs = given.costs
            if costs is not None:
                costs = bucket_costs(costs, found, priced.collectives, machine)
            made = merged(given.graph_module, nodes, found)
            yield replace(given, graph_module=made, buckets=tuple(found), costs=costs)
