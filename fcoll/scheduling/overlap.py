"""``overlap``: the best of several list schedules, forward and backward, and of the simple rules.

A backward schedule does everything as late as it can and a forward one as early; taking the times
of one as the priorities of the other, in turn, removes idle time from both ends. A third schedule
keeps compute in the order that came in and only brings collectives forward, as torch's scheduler
does. The order that came in, those of the simple rules and those of ``seeds`` (other schedulers,
asked for) are candidates, too. Candidates are made for a ladder of memory caps, all of those up to
the cap that is asked for. The ladder depends on the problem and the seeds alone, so a larger cap
has all candidates of a smaller one and never gives a slower plan. Nothing is random and no clock is
read: the same steps give the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fcoll.scheduling import classic
from fcoll.scheduling.bounds import (
    Outcome,
    lower_bound_us,
    memory_profile,
    peak_bytes,
    tails,
    times,
)
from fcoll.scheduling.listing import FreeReference, Reference, list_schedule
from fcoll.scheduling.mirror import flipped, mirrored
from fcoll.scheduling.problem import WAIT, Problem

NEVER = float("inf")
#: Steps of the ladder over the peak of the order that came in: for small graphs, for larger ones
#: and for large ones. A list schedule takes about 12 us a unit.
FINE = (1.0, 1.01, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, NEVER)
MEDIUM = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, NEVER)
COARSE = (1.0, 1.1, NEVER)
SMALL, LARGE, HUGE = 800, 3000, 20_000  # units
QUICK = 2  # rounds of a quick schedule
CLOSE = 1.0005  # of a large graph: this near to the bound nothing more is tried


def overlap(problem: Problem, cap: float = NEVER) -> Outcome | None:
    """The fastest order found whose peak is under the cap; None if none is."""
    return Overlap(problem).best(cap)


def quick(problem: Problem) -> Outcome:
    """A good order without a cap, by a few list schedules. What it holds is not counted."""
    made = _Quick(problem, 0.0)
    rounds = QUICK if problem.n <= LARGE else 0
    return min(made.improve(NEVER, None, rounds), key=lambda o: o.us)


class Overlap:
    """The candidates of a problem, made as they are asked for; ``seeds`` are orders that are
    candidates besides the simple ones."""

    def __init__(
        self,
        problem: Problem,
        bound_us: float | None = None,
        seeds: Iterable[Sequence[int]] = (),
    ) -> None:
        self.problem = problem
        self.bound_us = lower_bound_us(problem) if bound_us is None else bound_us
        self.close = 1 + 1e-9 if problem.n <= LARGE else CLOSE
        self.back = mirrored(problem)
        self.tail = _with_own(problem, tails(problem))
        self.profiles: dict[int, tuple[Outcome, list[int]]] = {}  # by id, of what run gave
        given = [self.run(order) for order in seeds]
        self.rungs = {o.peak_bytes for o in given}  # of the ladder: what they reach is tried there
        self.seeds = [*(self.run(order) for order in self.simple_orders()), *given]
        self.leanest = min(self.seeds, key=lambda o: (o.peak_bytes, o.us))

    def best(self, cap: float) -> Outcome | None:
        found = [o for o in self.seeds if o.peak_bytes <= cap]
        best: Outcome | None = min(found, key=lambda o: (o.us, o.peak_bytes), default=None)
        reached: Outcome | None = None  # on the ladder so far; it must not depend on the cap
        for level in self.levels(cap):
            for made in self.improve(level, reached):
                reached = _better(reached, made)
                best = _better(best, made)
                if best.us <= self.bound_us * self.close:
                    return self.with_slack(best, cap)
        return self.with_slack(best, cap) if best else None

    def with_slack(self, best: Outcome, cap: float) -> Outcome:
        """The same order with starts as early as the cap allows, for collectives that take longer
        than their price says. Without a cap: as the memory of the order that came in allows."""
        cap = max(best.peak_bytes, self.seeds[0].peak_bytes) if cap == NEVER else cap
        made = self.early(best, cap)
        return made if abs(made.us - best.us) <= 1e-9 * best.us else best

    def early(self, outcome: Outcome, cap: float) -> Outcome:
        order = classic.starts_early(self.problem, outcome.order, cap)
        return self.run(classic.waits_late(self.problem, order, cap))

    def levels(self, cap: float) -> list[float]:
        """The ladder's caps up to this one."""
        n, lean, given = self.problem.n, self.leanest.peak_bytes, self.seeds[0].peak_bytes
        steps = FINE if n <= SMALL else MEDIUM if n <= LARGE else COARSE
        caps = {given * step for step in steps}
        caps |= self.rungs
        if n <= SMALL or lean < 0.97 * given:
            caps |= {lean, (lean + given) / 2}
        return sorted(c for c in caps if c <= cap)

    def improve(
        self, cap: float, reached: Outcome | None, rounds: int | None = None
    ) -> Iterator[Outcome]:
        """Schedules under a cap of the ladder: forward, backward, and each from the other's times,
        until neither gets better."""
        start = min(
            (o for o in (reached, self.leanest, *self.seeds) if o and o.peak_bytes <= cap),
            key=lambda o: o.us,
        )
        current = start
        if self.problem.n <= SMALL or reached is None:  # else what was reached is improved on
            for made in self.from_scratch(cap):
                yield made
                current = min(current, made, key=lambda o: o.us)
        if self.back is None:
            made = self.forward(self.tail, start, cap)
            yield made
            yield self.early(min(current, made, key=lambda o: o.us), cap)
            return
        for _ in range(self.rounds() if rounds is None else rounds):
            before = current.us
            made = self.backward(self.ends(current), current, cap)
            yield made
            again = self.forward(self.begins(made), _better(current, made), cap)
            yield again
            current = min(current, made, again, key=lambda o: o.us)
            if current.us >= before:
                break
        if self.problem.n <= SMALL and rounds is None:
            yield self.early(current, cap)

    def from_scratch(self, cap: float) -> Iterator[Outcome]:
        """Forward with compute in the order that came in; backward by the longest chain that comes
        before, the best one nearly always; and of small graphs, or instead of a backward one,
        forward by the longest chain that follows."""
        problem = self.problem
        if self.back is None or problem.n <= SMALL:
            yield self.forward(self.tail, self.leanest, cap)
        yield self.forward(range(problem.n, 0, -1), self.leanest, cap)
        if self.back is not None:
            head = _with_own(self.back, tails(self.back))
            yield self.backward(head, self.leanest, cap)

    def rounds(self) -> int:
        n = self.problem.n
        return 6 if n <= SMALL else 2 if n <= LARGE else 1 if n <= HUGE else 0

    def simple_orders(self) -> Iterator[Sequence[int]]:
        """The order that came in is the first."""
        problem = self.problem
        yield range(problem.n)
        yield classic.waits_late(problem, range(problem.n), NEVER)  # as eager waits: at its use
        yield classic.just_in_time(problem)
        yield classic.by_communication(problem, sink_waits=True)
        yield classic.by_communication(problem, raise_comms=True)
        order = classic.by_communication(problem, True, True, True)
        yield order
        if problem.n <= SMALL:
            yield classic.waits_late(problem, order, peak_bytes(problem, order))
        yield classic.safe(problem)

    # -- one list schedule ---

    def forward(self, priority: Sequence[float], reference: Outcome, cap: float) -> Outcome:
        problem = self.problem
        if cap == NEVER:
            kept: Reference = FreeReference(problem, reference.order)
        else:
            kept = Reference(problem, reference.order, self.profile(reference))
        order = list_schedule(problem, priority, kept, cap)
        return self.run(classic.waits_late(problem, order, cap))

    def backward(self, priority: Sequence[float], reference: Outcome, cap: float) -> Outcome:
        back, n = self.back, self.problem.n
        assert back is not None
        mirrored_order = flipped(reference.order, n)
        if cap == NEVER:
            mirror: Reference = FreeReference(back, mirrored_order)
        else:  # Backwards the same is held while a unit runs.
            mirror = Reference(back, mirrored_order, self.profile(reference)[::-1])
        order = flipped(list_schedule(back, priority, mirror, cap), n)
        return self.run(classic.waits_late(self.problem, order, cap))

    def run(self, order: Sequence[int]) -> Outcome:
        """As bounds.run; its memory is kept for schedules that have it as their reference."""
        us, _ = times(self.problem, order)
        profile = memory_profile(self.problem, order)
        made = Outcome(tuple(order), us, max(profile, default=self.problem.held_bytes))
        self.profiles[id(made)] = made, profile
        return made

    def profile(self, outcome: Outcome) -> list[int]:
        kept = self.profiles.get(id(outcome))
        return kept[1] if kept else memory_profile(self.problem, outcome.order)

    def ends(self, outcome: Outcome) -> list[float]:
        """When each unit ends: what ends last is first backwards."""
        _, ends = times(self.problem, outcome.order)
        for u, flights in enumerate(self.problem.flights):
            if self.problem.kind[u] == WAIT and flights:
                ends[u] = ends[flights[0]]
        return ends[::-1]

    def begins(self, outcome: Outcome) -> list[float]:
        """How long before the end each unit begins if all is done as late as it can be."""
        assert self.back is not None
        _, ends = times(self.back, flipped(outcome.order, self.problem.n))
        return ends[::-1]


class _Quick(Overlap):
    """Where only time is asked for, and not much is to be tried."""

    def simple_orders(self) -> Iterator[Sequence[int]]:
        yield range(self.problem.n)

    def run(self, order: Sequence[int]) -> Outcome:
        return Outcome(tuple(order), times(self.problem, order)[0], 0)


def _with_own(problem: Problem, tail: list[float]) -> list[float]:
    return [t + p for t, p in zip(tail, problem.us, strict=True)]


def _better(one: Outcome | None, other: Outcome) -> Outcome:
    if one is None or (other.us, other.peak_bytes) < (one.us, one.peak_bytes):
        return other
    return one
