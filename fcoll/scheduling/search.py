"""``search``: the plan of ``overlap``, then better ones by trying.

Small programs are solved exactly, by branch and bound. Larger ones get list schedules whose
priorities are those of the best plan so far, shaken a little; how many depends on the size alone.
The seeds are fixed: the same steps give the same order on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from fcoll.scheduling.bounds import Outcome, run
from fcoll.scheduling.clock import Clock
from fcoll.scheduling.overlap import NEVER, Overlap
from fcoll.scheduling.problem import START, Problem

EXACT = 10  # units
TRIED = 200_000  # partial orders, before branch and bound gives up
SHAKES = (0.02, 0.05, 0.1, 0.3)  # parts of the makespan by which priorities are shaken


def search(
    problem: Problem,
    cap: float = NEVER,
    bound_us: float | None = None,
    seeds: Iterable[Sequence[int]] = (),
) -> Outcome | None:
    """The fastest order found under the cap; None if none is."""
    found = Search(problem, bound_us, seeds).best(cap)
    if problem.n <= EXACT:
        found = BranchAndBound(problem, cap).solve(found)
    return found


class Search(Overlap):
    """``overlap`` with more candidates for each cap of its ladder."""

    def improve(
        self, cap: float, reached: Outcome | None, rounds: int | None = None
    ) -> Iterator[Outcome]:
        best = reached
        for made in super().improve(cap, reached, rounds):
            best = made if best is None or made.us < best.us else best
            yield made
        if best is None or self.back is None:
            return
        rng = random.Random(len(self.problem.us))
        for i in range(self.tries()):
            width = SHAKES[i % len(SHAKES)] * best.us
            shaken = [p + rng.uniform(0, width) for p in self.begins(best)]
            made = self.forward(shaken, best, cap)
            back = self.backward(self.ends(made), made if made.peak_bytes <= cap else best, cap)
            for better in (made, back):
                yield better
                best = better if better.us < best.us else best

    def tries(self) -> int:
        return max(2, min(16, 60_000 // max(self.problem.n, 1)))


class BranchAndBound:
    """Branch and bound over all orders of a small problem."""

    def __init__(self, problem: Problem, cap: float) -> None:
        self.problem, self.cap = problem, cap
        self.best: Outcome | None = None
        self.tried = 0
        self.counts = problem.touch_counts()

    def solve(self, start: Outcome | None) -> Outcome | None:
        """An order as fast as any, or ``start`` if it is one or the search was given up."""
        self.best = start
        work = sum(us for us, s in zip(self.problem.us, self.problem.stream, strict=True) if s < 0)
        held = self.problem.held_bytes
        self.extend([], Clock(self.problem), held, list(self.counts), work)
        return self.best

    def extend(
        self, order: list[int], clock: Clock, held: int, left: list[int], work: float
    ) -> None:
        """Go on with each unit that may come next, unless that cannot be better. ``left`` are how
        many units are still to touch each buffer, ``work`` is the compute that is."""
        self.tried += 1
        least = max(clock.now + work, clock.total_us)
        if self.tried > TRIED or (self.best is not None and least >= self.best.us - 1e-9):
            return
        problem, done = self.problem, set(order)
        if len(order) == problem.n:
            self.best = run(problem, order)
            return
        for u in range(problem.n):
            if u in done or not done.issuperset(problem.before[u]):
                continue
            after, fresh, freed = list(left), 0, 0
            for b in problem.touches[u]:
                fresh += problem.size[b] if after[b] == self.counts[b] else 0
                after[b] -= 1
                freed += problem.size[b] if not after[b] and not problem.pinned[b] else 0
            if held + fresh <= self.cap:
                then = clock.copy()
                then.run((u,))
                less = 0.0 if problem.kind[u] == START else problem.us[u]
                self.extend([*order, u], then, held + fresh - freed, after, work - less)
