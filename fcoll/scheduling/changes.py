"""Graphs with splits and buckets, to be planned beside the one that came in.

What is proposed depends on the graph and the prices alone, not on the memory cap: so every proposal
is planned under every cap, and a larger cap never gives a slower plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.fx import GraphModule

from fcoll.costs.machine import Machine
from fcoll.costs.model import collective_us, number
from fcoll.graph.issued import Issued
from fcoll.scheduling import classic
from fcoll.scheduling.bounds import Outcome, memory_profile
from fcoll.scheduling.buckets import Bucket, merged, proposals
from fcoll.scheduling.node_order import node_order
from fcoll.scheduling.overlap import Overlap
from fcoll.scheduling.problem import START, Problem
from fcoll.scheduling.registry import Job
from fcoll.scheduling.reuse import Reuse, by_room, repeated, without
from fcoll.scheduling.rewrite import fake_mode_of
from fcoll.scheduling.runtime import CollectivePrice
from fcoll.scheduling.splits import Infeasible, Split, proposed, split_graph

_NEVER = float("inf")
#: (chunks, how much compute around a collective is split, in times of its own).
OPTIONS = ((2, 1.0), (4, 1.0), (2, 0.0), (4, 0.0), (2, 3.0))
FEWER = OPTIONS[:1]  # of large graphs
MANY = 1500  # units: beyond, few options are tried
#: Parts of the peak: a split holds more while it runs, so where the program holds that much already
#: it may not fit under a cap. There are proposals that leave such places out.
ROOM = (0.95, 0.8)
PARTS = (1.0, 0.75, 0.5, 0.25)  # of the time of repeated collectives that is saved


class Wanted(NamedTuple):
    """What may be changed."""

    buckets: bool
    splits: bool
    reuse: bool


@dataclass(frozen=True)
class Change:
    """A graph to plan, with what was changed in it, in this order, and given prices."""

    graph_module: GraphModule
    reuses: tuple[Reuse, ...]
    splits: tuple[Split, ...]
    buckets: tuple[Bucket, ...]
    costs: Mapping[str, float] | None  # of the changed graph, where prices are given by name


@dataclass(frozen=True)
class Priced:
    """A graph that has been read."""

    change: Change
    job: Job
    collectives: tuple[Issued, ...]


#: Sets of splits, the time that a quick schedule takes with them, and the graph.
Tried = dict[tuple[Split, ...], tuple[float, Priced]]
#: Reads and prices a changed graph.
Reader = Callable[[Change], Priced]


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
    for start in (base, *(_with_reuse(base, read) if wanted.reuse else ())):
        if start is not base:
            yield start.change
        found = [start]
        if wanted.splits:
            split = list(_split(start, machine, read))
            yield from (priced.change for priced in split)
            found += split[:1]
        if wanted.buckets:
            for priced in found:
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
            yield read(replace(base.change, graph_module=made, reuses=tuple(some)))


# -- splits ---


def _split(base: Priced, machine: Machine, read: Reader) -> Iterator[Priced]:
    """The best set of splits by a quick schedule without a cap, then the second best, then the best
    one without what stands where memory is short."""
    first = Overlap(base.job.problem, 0.0).quick()
    exposed = _exposed_us(base.job.problem, first)
    tried: Tried = {}
    for k, reach in OPTIONS if base.job.problem.n <= MANY else FEWER:
        _try(base, _proposed(base, exposed, machine, k, reach), machine, read, tried)
    _mix(base, machine, read, tried)
    better = sorted((us, i) for i, (us, _) in enumerate(tried.values()) if us < first.us)
    found = [priced for _, priced in tried.values()]
    best = [found[i] for _, i in better[:2]]
    yield from best
    if best:
        yield from _where_room_is(base, best[0], exposed, machine, read)


def _proposed(
    base: Priced, exposed: Mapping[str, float], machine: Machine, k: int, reach: float
) -> tuple[Split, ...]:
    return tuple(proposed(base.change.graph_module, exposed, base.job.us, machine, k, reach))


def _where_room_is(
    base: Priced, best: Priced, exposed: Mapping[str, float], machine: Machine, read: Reader
) -> Iterator[Priced]:
    """The splits of the best set, grown again from the collectives at which less is held."""
    problem = base.job.problem
    held = memory_profile(problem, range(problem.n))
    at = {name: held[u] - problem.held_bytes for u, name in enumerate(problem.names)}
    most = max(at.values())
    mine = {name for split in best.change.splits for name in split.collectives}
    k = best.change.splits[0].chunks
    for part in ROOM:
        some = {name: us for name, us in exposed.items() if name in mine and at[name] < part * most}
        tried: Tried = {}
        for reach in (1.0, 0.0):
            _try(base, _proposed(base, some, machine, k, reach), machine, read, tried)
        if tried:
            yield min(tried.values(), key=lambda x: x[0])[1]


def _try(
    base: Priced,
    made: tuple[Split, ...],
    machine: Machine,
    read: Reader,
    tried: Tried,
) -> None:
    if not made or made in tried:
        return
    try:
        graph_module = split_graph(base.change.graph_module, made)
    except Infeasible:
        return
    costs = base.change.costs
    if costs is not None:
        costs = split_costs(costs, made, base.collectives, machine)
    priced = read(replace(base.change, graph_module=graph_module, splits=made, costs=costs))
    tried[made] = (Overlap(priced.job.problem, 0.0).quick().us, priced)


def _mix(
    base: Priced,
    machine: Machine,
    read: Reader,
    tried: Tried,
) -> None:
    """To the best set, the splits of the others that lie elsewhere."""
    if len(tried) < 2:
        return
    sets = sorted(tried, key=lambda made: tried[made][0])
    best = sets[0]
    for other in sets[1:]:
        taken = {name for split in best for name in split.members}
        more = tuple(split for split in other if taken.isdisjoint(split.members))
        if not more:
            continue
        _try(base, best + more, machine, read, tried)
        best = min(tried, key=lambda made: tried[made][0])


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


# -- buckets ---


def _bucketed(priced: Priced, machine: Machine, us_of: CollectivePrice | None) -> Iterator[Change]:
    """Buckets for orders in which much is under way at once: waits late, and starts early too."""
    problem, given = priced.job.problem, priced.change
    early = classic.by_communication(problem, raise_comms=True)
    for order in (range(problem.n), early):
        names = priced.job.names(classic.waits_late(problem, order, _NEVER))
        nodes = node_order(given.graph_module, names)
        for found in proposals(nodes, priced.collectives, machine, us_of):
            costs = given.costs
            if costs is not None:
                costs = bucket_costs(costs, found, priced.collectives, machine)
            made = merged(given.graph_module, nodes, found)
            yield replace(given, graph_module=made, buckets=tuple(found), costs=costs)


# -- prices of what has none, where prices are given by name ---


def split_costs(
    costs: Mapping[str, float],
    splits: Sequence[Split],
    collectives: Sequence[Issued],
    machine: Machine,
) -> dict[str, float]:
    """A chunk takes its share of the given time, and its share of the machine's fixed cost of a
    kernel or a collective comes to a whole one again. So chunks never take less in all than what
    they are of. Copies are priced by the machine's model."""
    latency = {c.start: _latency_us(c, machine) for c in collectives}
    made = dict(costs)
    for split in splits:
        k = split.chunks
        for name in split.members:
            if not (given := made.pop(name, None)):
                chunk = given
            else:
                chunk = given / k + latency.get(name, machine.launch_us) * (1 - 1 / k)
            if chunk is not None:
                made.update((f"{name}_c{j}", chunk) for j in range(k))
    return made


def bucket_costs(
    costs: Mapping[str, float],
    buckets: Sequence[Bucket],
    collectives: Sequence[Issued],
    machine: Machine,
) -> dict[str, float]:
    """A bucket takes what its members take but the latencies of all but one: of each the part of
    its given time that is latency by the machine's model, and no more than the latency there."""
    calls = {c.start: c for c in collectives}
    made = dict(costs)
    for bucket in buckets:
        given = [made.get(name) for name in bucket.members]
        known = [us for us in given if us is not None]
        if len(known) < len(given):
            continue
        saved = []
        for name, us in zip(bucket.members, known, strict=True):
            latency = _latency_us(calls[name], machine)
            model = max(_model_us(calls[name], machine), latency, 1e-9)
            saved.append(min(latency, us * latency / model))
        made[bucket.name] = sum(known) - sum(sorted(saved)[:-1])
        made[f"{bucket.name}_wait"] = 0.0
    return made


def _model_us(call: Issued, machine: Machine) -> float:
    return number(collective_us(call.op, call.n, call.bytes, machine, call.ranks))


def _latency_us(call: Issued, machine: Machine) -> float:
    return float(collective_us(call.op, call.n, 1, machine, call.ranks))
