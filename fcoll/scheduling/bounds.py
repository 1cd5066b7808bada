"""What an order costs, and what no order can beat.

``run`` gives the time and the peak memory of an order. ``lower_bound_us`` is the best of three
bounds: the work of a stream, the longest chain of units that need one another, and, for each
stream, the least time in which it can do its work if it may interrupt it, where each unit has a
head (what must come before it) and a tail (what must follow).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from fcoll.scheduling.clock import Clock, alone
from fcoll.scheduling.problem import START, Problem


@dataclass(frozen=True, slots=True)
class Outcome:
    """An order, how long it takes and how much memory it holds at most."""

    order: tuple[int, ...]
    us: float
    peak_bytes: int


def run(problem: Problem, order: Sequence[int]) -> Outcome:
    """The same rules as a Timeline's: compute takes its units in order, a collective queues on its
    stream from where it is issued, and whoever needs its result blocks until it is there; with
    a machine's contention (fcoll/scheduling/contention.py) what is slower there is slower here."""
    us, _ = times(problem, order)
    return Outcome(tuple(order), us, peak_bytes(problem, order))


def times(problem: Problem, order: Sequence[int]) -> tuple[float, list[float]]:
    """The time of the whole, and when each unit ends."""
    if problem.contention is not None:
        rank = alone(problem, order)
        return rank.end_us, rank.ends
    clock = Clock(problem)
    clock.run(order)
    return clock.total_us, clock.ends


def memory_profile(problem: Problem, order: Sequence[int]) -> list[int]:
    """The bytes held while each unit of the order runs, the graph's inputs included."""
    size, pinned, touches = problem.size, problem.pinned, problem.touches
    left = problem.touch_counts()
    live = list(problem.live_first)
    held = problem.held_bytes + sum(b for b, first in zip(size, live, strict=True) if first)
    profile = []
    for u in order:
        freed = 0
        for b in touches[u]:
            if not live[b]:
                live[b] = True
                held += size[b]
            left[b] -= 1
            if not left[b] and not pinned[b]:
                freed += size[b]
        profile.append(held)
        held -= freed
    return profile


def peak_bytes(problem: Problem, order: Sequence[int]) -> int:
    return max(memory_profile(problem, order), default=problem.held_bytes)


def exposed_us(problem: Problem, order: Sequence[int]) -> dict[str, float]:
    """How long compute waits for each collective, by the name of its start."""
    found: dict[str, float] = {}
    for u, begin, end in alone(problem, order).exposed():
        begin = max(begin, end - problem.us[u])  # no longer than it takes
        found[problem.names[u]] = found.get(problem.names[u], 0.0) + end - begin
    return found


# -- bounds ---


def tails(problem: Problem, near: int = 0) -> list[float]:
    """For each unit the longest chain that follows it, itself not included.

    With ``near``, where several units follow: at least the time in which compute can do the nearest
    ones of all that follow, so many of them.
    """
    found = [0.0] * problem.n
    for u in range(problem.n - 1, -1, -1):
        longest, is_start = 0.0, problem.kind[u] == START
        for v in problem.after[u]:
            if (length := found[v] + problem.us[v]) > longest:
                if is_start and u not in problem.flights[v]:
                    continue  # that follows its issue: it may run long before this one ends
                longest = length
        if near and not is_start and len(problem.after[u]) > 1:
            longest = max(longest, _together(problem, u, problem.after, found, near))
        found[u] = longest
    return found


def heads(problem: Problem, near: int = 0) -> list[float]:
    """For each unit the longest chain that comes before it; ``near`` as in ``tails``."""
    found = [0.0] * problem.n
    for u in range(problem.n):
        longest = 0.0
        for v in problem.before[u]:
            if (length := found[v] + problem.us[v]) > longest:
                if problem.kind[v] == START and v not in problem.flights[u]:
                    # It need not be done, only issued; that nothing in flight holds up.
                    length = 0.0 if problem.flights[v] else found[v]
                longest = max(longest, length)
        if near and len(problem.before[u]) > 1:
            longest = max(longest, _together(problem, u, problem.before, found, near))
        found[u] = longest
    return found


def _together(
    problem: Problem, u: int, edges: list[list[int]], found: list[float], near: int
) -> float:
    """Compute does one thing at a time: the time in which it can be done with the units nearest to
    u that must come before it (or after it: see ``edges``), none of them before its own time."""
    stream, us = problem.stream, problem.us
    step = -1 if edges is problem.before else 1  # units are numbered in an order that is valid
    heap = [step * v for v in edges[u]]
    heapq.heapify(heap)
    seen = set(edges[u])
    jobs: list[tuple[float, float]] = []
    while heap and len(jobs) < near and len(seen) < 4 * near:
        v = step * heapq.heappop(heap)
        if stream[v] < 0 and us[v] > 0:
            jobs.append((found[v], us[v]))
        for w in edges[v]:
            if w not in seen:
                seen.add(w)
                heapq.heappush(heap, step * w)
    jobs.sort(reverse=True)
    work = best = 0.0
    for time, length in jobs:
        work += length
        best = max(best, time + work)
    return best


def lower_bound_us(problem: Problem) -> float:
    """No order of these units takes less."""
    near = 32 if problem.n <= 3000 else 8  # it takes about 1 us each: 0.1 s at 10,000 units
    head, tail = heads(problem, near), tails(problem, near)
    bound = max((h + t + p for h, t, p in zip(head, tail, problem.us, strict=True)), default=0.0)
    jobs: dict[int, list[tuple[float, float, float]]] = {}
    for u, p in enumerate(problem.us):
        if p > 0:
            jobs.setdefault(problem.stream[u], []).append((head[u], p, tail[u]))
    issued = problem.contention.host_us * sum(problem.launches) if problem.contention else 0.0
    return max([bound, issued, *(_preemptive(work) for work in jobs.values())])


def _preemptive(jobs: list[tuple[float, float, float]]) -> float:
    """Jackson's bound: of what is ready always do the one with the longest tail, interrupting."""
    jobs.sort()
    ready: list[list[float]] = []  # [-tail, time left]
    now, bound, i = 0.0, 0.0, 0
    while i < len(jobs) or ready:
        if not ready and jobs[i][0] > now:
            now = jobs[i][0]
        while i < len(jobs) and jobs[i][0] <= now:
            heapq.heappush(ready, [-jobs[i][2], jobs[i][1]])
            i += 1
        until = jobs[i][0] if i < len(jobs) else float("inf")
        tail, left = ready[0]
        if now + left <= until:
            heapq.heappop(ready)
            now += left
            bound = max(bound, now - tail)
        else:
            ready[0][1] -= until - now  # the tail is the same: it stays on top
            now = until
    return bound
