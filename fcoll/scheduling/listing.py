"""List scheduling on a true timeline: at each moment run the most urgent unit that is ready.

Collectives are issued when their stream is about to idle; compute takes the ready unit with the
highest priority; a wait is passed as soon as its collective has arrived. With a cap, a unit may run
ahead of a reference order only if the rest of that order, from where it stands, still fits under
the cap with all that ran ahead held in memory. So the reference order can always be gone on with,
and no schedule gets stuck or goes over the cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from fcoll.scheduling.bounds import memory_profile
from fcoll.scheduling.clock import Clock
from fcoll.scheduling.problem import START, WAIT, Problem

TRIES = 6  # units that are tried for a slot before the reference order decides
_NEVER = float("inf")


class RangeMax:
    """The largest value between two positions, in constant time: of whole blocks by a table of
    their largest values, of the ends of a range by looking at them.

    >>> RangeMax([3, 1, 4, 1, 5]).most(1, 4)
    4
    """

    __slots__ = ("rows", "values")
    BLOCK = 8  # a table of all values took a fifth of a list schedule's time

    def __init__(self, values: Sequence[int]) -> None:
        self.values = values
        width = self.BLOCK
        self.rows = [[max(values[i : i + width]) for i in range(0, len(values), width)]]
        width = 1
        while 2 * width <= len(self.rows[0]):
            last = self.rows[-1]
            self.rows.append(list(map(max, last[:-width], last[width:])))
            width *= 2

    def most(self, begin: int, end: int) -> int:
        """Of values[begin:end], which must not be empty."""
        values, block = self.values, self.BLOCK
        if end - begin <= 2 * block:
            return max(values[begin:end])
        one, other = -(-begin // block), end // block  # whole blocks: at least one
        row = (other - one).bit_length() - 1
        table = self.rows[row]
        inside = max(table[one], table[other - (1 << row)])
        return max([inside, *values[begin : one * block], *values[other * block : end]])


class Reference:
    """An order that fits under the cap, and what of it the memory check asks for."""

    __slots__ = ("first", "first_at", "order", "peaks", "position")

    def __init__(
        self, problem: Problem, order: Sequence[int], profile: Sequence[int] | None = None
    ) -> None:
        """``profile`` is the order's memory_profile, where it is known."""
        self.order = order
        self.position = position = [0] * problem.n
        self.first = first = [-1] * len(problem.size)  # where each buffer is first touched
        self.first_at: list[list[int]] = [[] for _ in order]
        first_at, touches, live_first = self.first_at, problem.touches, problem.live_first
        for i, u in enumerate(order):
            position[u] = i
            for b in touches[u]:
                if first[b] < 0 and not live_first[b]:
                    first[b] = i
                    first_at[i].append(b)
        self.peaks = RangeMax(memory_profile(problem, order) if profile is None else profile)


class FreeReference(Reference):
    """The same for schedules without a cap, which ask for nothing but the order."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.order = order
        self.position = [0] * problem.n
        for i, u in enumerate(order):
            self.position[u] = i


class ListScheduler:
    """One pass over the units. ``priority`` says how urgent each is; ``cap`` is in bytes."""

    def __init__(
        self,
        problem: Problem,
        priority: Sequence[float],
        reference: Reference,
        cap: float = _NEVER,
    ) -> None:
        self.problem, self.reference, self.cap = problem, reference, cap
        self.capped = cap != _NEVER  # without a cap nothing is asked of memory
        position = reference.position
        self.key = [(-p, position[u], u) for u, p in enumerate(priority)]
        self.clock = Clock(problem)
        self.ends, self.free = self.clock.ends, self.clock.free
        self.order: list[int] = []
        self.done = [False] * problem.n
        self.missing = [len(b) for b in problem.before]
        self.ready: list[tuple[float, int, int]] = []  # compute
        self.to_issue: list[list[tuple[float, int, int]]] = [[] for _ in problem.streams]
        self.flying: list[tuple[float, int]] = []  # (arrival, unit that waits for it)
        self.live = list(problem.live_first)
        self.left = problem.touch_counts()
        self.held = problem.held_bytes + sum(
            size for size, live in zip(problem.size, self.live, strict=True) if live
        )
        self.frontier = 0  # in the reference order all before it is done
        self.ahead = [False] * len(problem.size)  # buffers of units that ran ahead of it
        self.ahead_bytes = 0

    def run(self) -> list[int]:
        for u, missing in enumerate(self.missing):
            if not missing:
                self.release(u)
        n = self.problem.n
        while len(self.order) < n:
            self.pass_arrived()
            self.issue()
            chosen = self.first_that_fits(self.ready)
            if chosen is None:
                chosen = self.at_frontier()
            if chosen is not None:
                self.execute(chosen)
            elif self.flying:
                self.clock.now = max(self.clock.now, self.flying[0][0])
        return self.order

    # -- what is ready ---

    def release(self, u: int) -> None:
        """Everything before the unit is done."""
        problem = self.problem
        kind, flights = problem.kind[u], problem.flights[u]
        if kind == START:
            heappush(self.to_issue[problem.stream[u]], self.key[u])
        elif flights:
            ends = self.ends
            at = ends[flights[0]] if len(flights) == 1 else max([ends[v] for v in flights])
            heappush(self.flying, (at, u))
        elif kind == WAIT:
            heappush(self.flying, (self.clock.now, u))
        else:
            heappush(self.ready, self.key[u])

    def pass_arrived(self) -> None:
        """Pass the waits for what has arrived: they cost nothing and free what was sent."""
        flying, kind, us, done = self.flying, self.problem.kind, self.problem.us, self.done
        while flying and flying[0][0] <= self.clock.now:
            u = heappop(flying)[1]
            if done[u]:
                continue
            if kind[u] == WAIT and not us[u]:
                self.execute(u)
            else:
                heappush(self.ready, self.key[u])

    def issue(self) -> None:
        """Give each stream that idles before the next compute ends its most urgent collective."""
        ready, free, done = self.ready, self.free, self.done
        while ready and done[ready[0][2]]:
            heappop(ready)
        if ready:
            until = self.clock.now + self.problem.us[ready[0][2]]
        else:
            until = self.flying[0][0] if self.flying else self.clock.now
        for s, waiting in enumerate(self.to_issue):
            while waiting and (free[s] < until or free[s] <= self.clock.now):
                u = self.first_that_fits(waiting)
                if u is None:
                    break
                self.execute(u)

    def first_that_fits(self, heap: list[tuple[float, int, int]]) -> int | None:
        """Take the most urgent unit of a heap that the memory allows, of the first few."""
        refused: list[tuple[float, int, int]] = []
        found, done, capped = None, self.done, self.capped
        while heap and len(refused) < TRIES:
            key = heappop(heap)
            if done[key[2]]:
                continue
            if not capped or self.fits(key[2]):
                found = key[2]
                break
            refused.append(key)
        for key in refused:
            heappush(heap, key)
        return found

    def at_frontier(self) -> int | None:
        """The next unit of the reference order, if nothing has to arrive for it first."""
        self.pass_arrived()
        if self.frontier >= self.problem.n:
            return None
        u = self.reference.order[self.frontier]
        if self.problem.kind[u] == START:
            return u
        arrival = max([self.ends[v] for v in self.problem.flights[u]], default=0.0)
        return u if arrival <= self.clock.now else None

    # -- memory ---

    def fits(self, u: int) -> bool:
        if not self.capped:
            return True
        reference, live, frontier, cap = self.reference, self.live, self.frontier, self.cap
        if reference.position[u] == frontier:
            return True
        need, last = 0, -1
        for b in self.problem.touches[u]:
            if not live[b]:
                need += self.problem.size[b]
                if reference.first[b] > last:
                    last = reference.first[b]
        if not need:
            return True
        if self.held + need > cap:
            return False
        if last <= frontier:
            return True
        return reference.peaks.most(frontier, last) + self.ahead_bytes + need <= cap

    def execute(self, u: int) -> None:
        """Spend the unit's time on its stream, touch its buffers, release what it held up."""
        missing = self.missing
        self.order.append(u)
        self.done[u] = True
        self.clock.run((u,))
        if self.capped:
            self.touch(u)
        if self.reference.order[self.frontier] == u:
            self.advance()
        for v in self.problem.after[u]:
            missing[v] -= 1
            if not missing[v]:
                self.release(v)

    def touch(self, u: int) -> None:
        """Allocate what the unit is the first to touch, free what it is the last to."""
        problem, live, left, ahead = self.problem, self.live, self.left, self.ahead
        size, pinned, frontier = problem.size, problem.pinned, self.frontier
        first, is_ahead = self.reference.first, self.reference.position[u] != frontier
        for b in problem.touches[u]:
            if not live[b]:
                live[b] = True
                self.held += size[b]
                if is_ahead and first[b] >= frontier:
                    ahead[b] = True
                    self.ahead_bytes += size[b]
            left[b] -= 1
            if not left[b] and not pinned[b]:
                self.held -= size[b]
                if ahead[b]:
                    ahead[b] = False
                    self.ahead_bytes -= size[b]

    def advance(self) -> None:
        """Move the frontier to the first unit of the reference order that is not done."""
        order, done, ahead, at = self.reference.order, self.done, self.ahead, self.frontier
        begin, n = at, len(order)
        while at < n and done[order[at]]:
            at += 1
        self.frontier = at
        if self.ahead_bytes:
            for buffers in self.reference.first_at[begin:at]:
                for b in buffers:
                    if ahead[b]:
                        ahead[b] = False
                        self.ahead_bytes -= self.problem.size[b]


def list_schedule(
    problem: Problem, priority: Sequence[float], reference: Reference, cap: float = _NEVER
) -> list[int]:
    """An order that a list scheduler finds. The reference must fit under the cap."""
    return ListScheduler(problem, priority, reference, cap).run()
