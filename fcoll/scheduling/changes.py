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
from fcoll.scheduling.priced import Change, Priced, Reader, Wanted, bucket_costs
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
    us_of: CollectivePrice | None = None,
) -> Iterator[Change]:
    """What is worth planning; ``us_of`` prices collectives before the machine does."""
    if fake_mode_of(base.change.graph_module.graph.nodes) is None:
        return
    search = Search(base, machine, read)
    choices = search.run() if wanted.splits else []
    found = [base, *(search.tried[choice] for choice in choices[:2])]
    found += [made for choice in choices[:1] for made in search.where_room_is(choice)]
    if wanted.reuse:
        for start in _with_reuse(base, read):
            made = with_splits(start, choices[0], machine, read) if choices else None
            found += [start] if made is None else [start, made]
    yield from (priced.change for priced in found[1:])
    if wanted.buckets:
        best = min(found, key=lambda priced: priced.quick_us)
        for priced in found[:1] if best is base else (base, best):
            yield from _bucketed(priced, machine, us_of)


def _with_reuse(base: Priced, read: Reader) -> Iterator[Priced]:
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
        if some and some != before:
            before = some
            made = without(graph_module, some)
            priced = read(replace(base.change, graph_module=made, reuses=tuple(some)))
            if priced.quick_us >= base.quick_us:
                return  # it gains nothing even where memory is no matter
            yield priced


# -- buckets ---


def _bucketed(priced: Priced, machine: Machine, us_of: CollectivePrice | None) -> Iterator[Change]:
    """Buckets for orders in which much is under way at once: waits late, and starts early too."""
    problem, given = priced.job.problem, priced.change
    early = classic.by_communication(problem, raise_comms=True)
    seen: list[list[Bucket]] = []
    for order in (range(problem.n), early):
        names = priced.job.names(classic.waits_late(problem, order, _NEVER))
        nodes = node_order(given.graph_module, names)
        for found in proposals(nodes, priced.collectives, machine, us_of):
            if found in seen:
                continue
            seen.append(found)
            costs = given.costs
            if costs is not None:
                costs = bucket_costs(costs, found, priced.collectives, machine)
            made = merged(given.graph_module, nodes, found)
            yield replace(given, graph_module=made, buckets=tuple(found), costs=costs)
