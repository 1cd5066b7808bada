"""All ranks against each other where what runs at the same time slows down.

The rules are those of one rank (fcoll/scheduling/contention.py): on each rank compute takes
``slowdown`` times as long while a collective of that rank is in flight, and k collectives on a link
that they share get a k-th of its rate each. A collective is as fast as the slowest of its ranks
lets it be. Rates change only when something begins or ends, so time goes from one such moment to
the next, on all ranks at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from fcoll.graph.steps import Step
from fcoll.scheduling.timeline import Span
from fcoll.scheduling.world import Flight, Met, Rank, RankLine, RankProgram, World, can_begin


@dataclass(eq=False)
class _Work:
    """Something under way: ``left`` us of it at ``at``, done at a rate since then."""

    left: float
    at: float
    done: Callable[[], None]
    rate: float = 0.0
    version: int = 0  # of its date: an event of another one is void


class CrowdedWorld(World):
    """Time goes on in events: (when, a counter, what, the version of its date)."""

    def __init__(self, programs: Mapping[int, RankProgram], lazy: bool) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, _Work, int]] = []
        self.under_way: dict[int, _Work] = {}  # by the id of a meeting
        self.count = itertools.count()
        self.members: dict[int, CrowdedRank] = {}
        super().__init__(programs, lazy)

    def rank(self, number: int, program: RankProgram, lazy: bool) -> CrowdedRank:
        self.members[number] = CrowdedRank(number, program, self, lazy)
        return self.members[number]

    def go_on(self) -> None:
        super().go_on()
        while self.events:
            due, _, work, version = heappop(self.events)
            if work.version == version:
                self.now = max(self.now, due)
                work.version += 1
                work.done()
                super().go_on()

    def later(self, when: float, rank: CrowdedRank) -> None:
        """The rank goes on then."""
        work = _Work(0.0, when, lambda: self.todo.append(rank))
        heappush(self.events, (when, next(self.count), work, work.version))

    def pace(self, work: _Work, rate: float) -> None:
        """From now on it goes at this rate."""
        if rate == work.rate:
            return
        work.left = max(work.left - (self.now - work.at) * work.rate, 0.0)
        work.at, work.rate = self.now, rate
        work.version += 1
        heappush(self.events, (self.now + work.left / rate, next(self.count), work, work.version))

    # -- meetings ---

    def settle(self, flights: Iterable[Flight]) -> None:
        """Begin what can begin now."""
        for flight in flights:
            for met in flight.meetings:
                if met.span is None and id(met) not in self.under_way and can_begin(met):
                    self.begin(met)

    def begin(self, met: Met) -> None:
        us = max(f.us / len(f.meetings) for f in met.flights.values())
        begun = self.now
        self.under_way[id(met)] = _Work(us, begun, lambda: self.end(met, begun))
        for r in met.ranks:
            self.members[r].in_flight.append(met)
        self.crowd(met.ranks)

    def end(self, met: Met, begun: float) -> None:
        met.span = begun, self.now
        del self.under_way[id(met)]
        for r in met.ranks:
            self.members[r].in_flight.remove(met)
        self.crowd(met.ranks)
        for flight in met.flights.values():
            self.settle(self.landed(flight))

    def crowd(self, ranks: Iterable[int]) -> None:
        """The rates of all that is under way on these ranks."""
        for r in ranks:
            rank = self.members[r]
            rank.keep_pace()
            for met in rank.in_flight:
                rate = min(self.members[m].share(met) for m in met.ranks)
                self.pace(self.under_way[id(met)], rate)


class CrowdedRank(Rank):
    """A rank whose compute takes as long as its collectives let it."""

    world: CrowdedWorld

    def __init__(self, rank: int, program: RankProgram, world: World, lazy: bool) -> None:
        super().__init__(rank, program, world, lazy)
        self.in_flight: list[Met] = []
        self.working: _Work | None = None
        self.awaited: tuple[Flight, float] | None = None  # and since when

    def run(self) -> None:
        self.now = self.world.now
        if self.awaited is not None:
            flight, since = self.awaited
            self.awaited = None
            if self.now > since:
                self.waits.append(Span(flight.step.name, "compute", since, self.now))
        super().run()

    @property
    def busy(self) -> bool:
        return self.needs is not None or self.working is not None or self.now > self.world.now

    def launch(self, step: Step) -> None:
        super().launch(step)
        if self.now > self.world.now:
            self.world.later(self.now, self)

    def waited_for(self, step: Step) -> bool:
        there = super().waited_for(step)
        if self.needs is not None:
            self.awaited = self.needs, self.now
        return there

    def compute(self, step: Step) -> None:
        us, begun = self.program.us(step), self.now
        if us <= 0:
            return

        def done() -> None:
            self.working = None
            self.spans.append(Span(step.name, "compute", begun, self.world.now))
            self.world.todo.append(self)

        self.working = _Work(us, begun, done)
        self.keep_pace()

    def keep_pace(self) -> None:
        if self.working is not None:
            self.world.pace(
                self.working, 1 / self.program.contention.slowdown if self.in_flight else 1.0
            )

    def share(self, met: Met) -> float:
        """The part of its links' rate that a meeting has here."""
        mine, crowd = self.links(met), 1
        for link in range(mine.bit_length()):
            if mine >> link & 1:
                crowd = max(crowd, sum(self.links(other) >> link & 1 for other in self.in_flight))
        return 1 / crowd

    def links(self, met: Met) -> int:
        collective = met.flights[self.rank].step.collective
        assert collective is not None
        return self.program.contention.links.get(collective, 0)


def run_world(programs: Mapping[int, RankProgram], lazy: bool = True) -> dict[int, RankLine]:
    """Run all ranks until the last one ends. ``lazy``: a wait lasts from the first use on, as in
    eager; else it is where it stands."""
    found = [program.contention for program in programs.values()]
    crowded = any(c.slowdown != 1 or any(c.links.values()) for c in found)
    return (CrowdedWorld if crowded else World)(programs, lazy).run()
