"""The programs of all ranks against each other: a collective begins when its last rank comes.

Each rank runs its steps in order. A start takes its place on the group's stream and compute goes
on; who needs the result waits for it. A collective begins when all of its ranks have issued it and
are through with what is before it on their streams, and ends for all of them at once. A message
begins when both its sender and its receiver have issued theirs; messages from one rank to another
do not wait for those to a third, or for those that come back.

Each rank's host issues its kernels one after another. Streams do not slow one another down here:
fcoll/scheduling/crowded.py is for machines that say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fcoll.errors import CollectiveMismatch
from fcoll.graph.steps import Step
from fcoll.scheduling.contention import Contention, launches
from fcoll.scheduling.timeline import Span


@dataclass(frozen=True)
class Meeting:
    """What a call meets its peers over: the same ``key`` on all ``ranks``."""

    key: Hashable
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankProgram:
    """What one rank does. ``meetings`` are those of each collective, by its id: one of a
    collective, one for each message of a batch. ``us`` is the price of a step on this rank,
    ``contention`` what slows what down there."""

    steps: Sequence[Step]
    meetings: Mapping[int, Sequence[Meeting]]
    us: Callable[[Step], float]
    contention: Contention = field(default_factory=Contention)


@dataclass(frozen=True)
class RankLine:
    """When a rank's steps run. ``waits`` are times of its compute stream that it stood still, for
    others, and ``host_waits`` those that nothing was issued for."""

    spans: tuple[Span, ...]
    waits: tuple[Span, ...]
    end_us: float
    host_waits: tuple[Span, ...] = ()

    @property
    def compute_us(self) -> float:
        return sum(s.us for s in self.spans if s.stream == "compute")

    @property
    def wait_us(self) -> float:
        return sum(s.us for s in self.waits)


@dataclass
class Flight:
    """A collective that a rank has issued; ``end_us`` is None until it is known."""

    rank: int
    step: Step
    us: float
    issued_us: float
    before: list[Flight]  # what it has to wait for: on its streams, and its arguments
    meetings: list[Met] = field(default_factory=list)
    begin_us: float = 0.0
    end_us: float | None = None
    after: list[Flight] = field(default_factory=list)


@dataclass
class Met:
    """One meeting: the flights of the ranks that have come."""

    ranks: tuple[int, ...]
    flights: dict[int, Flight] = field(default_factory=dict)
    span: tuple[float, float] | None = None


class World:
    """All ranks. ``lazy``: a wait lasts from the first use on, as in eager; else it is where it
    stands."""

    def __init__(self, programs: Mapping[int, RankProgram], lazy: bool) -> None:
        self.ranks = {r: self.rank(r, program, lazy) for r, program in programs.items()}
        self.met: dict[Hashable, Met] = {}
        self.todo = list(self.ranks.values())  # ranks that may go on

    def rank(self, number: int, program: RankProgram, lazy: bool) -> Rank:
        return Rank(number, program, self, lazy)

    def run(self) -> dict[int, RankLine]:
        """Until the last rank ends."""
        self.go_on()
        stuck = [rank for rank in self.ranks.values() if not rank.ended]
        if stuck:
            raise CollectiveMismatch(message="; ".join(rank.why() for rank in stuck[:4]))
        return {r: rank.line() for r, rank in self.ranks.items()}

    def go_on(self) -> None:
        """As long as a rank can."""
        while self.todo:
            self.todo.pop().run()

    def come(self, meeting: Meeting, turn: int, flight: Flight) -> None:
        met = self.met.setdefault((meeting.key, turn), Met(meeting.ranks))
        met.flights[flight.rank] = flight
        flight.meetings.append(met)

    def settle(self, flights: Iterable[Flight]) -> None:
        """Find the ends of flights, and of those that waited for them."""
        todo = list(flights)
        while todo:
            for met in todo.pop().meetings:
                if met.span is not None or not can_begin(met):
                    continue
                members = met.flights.values()
                begin = max(max(f.issued_us, *_ends(f)) for f in members)
                met.span = begin, begin + max(f.us / len(f.meetings) for f in members)
                for f in members:
                    todo += self.landed(f)

    def landed(self, flight: Flight) -> list[Flight]:
        """If all its meetings are over, the flight is: whoever waited for it can go on."""
        spans = [met.span for met in flight.meetings]
        if flight.end_us is not None or None in spans:
            return []
        flight.begin_us = min(span[0] for span in spans if span)
        flight.end_us = max(span[1] for span in spans if span)
        rank = self.ranks[flight.rank]
        if rank.needs is flight:
            rank.needs = None
            self.todo.append(rank)
        return flight.after


def can_begin(met: Met) -> bool:
    here = len(met.flights) == len(met.ranks)
    return here and all(b.end_us is not None for f in met.flights.values() for b in f.before)


def _ends(flight: Flight) -> list[float]:
    return [0.0, *(b.end_us for b in flight.before if b.end_us is not None)]


class Rank:
    """One rank: where it is in its program, and what it has under way."""

    def __init__(self, rank: int, program: RankProgram, world: World, lazy: bool) -> None:
        self.rank, self.program, self.world, self.lazy = rank, program, world, lazy
        self.at, self.now = 0, 0.0
        self.host, self.issued_at = 0.0, -1  # when, and up to which step, all is issued
        self.needs: Flight | None = None  # what it cannot go on without
        self.flying: dict[str, Flight] = {}  # by the steps whose result it is
        self.flights: list[Flight] = []
        self.last: dict[Hashable, Flight] = {}  # of each stream
        self.turns: Counter[Hashable] = Counter()
        self.spans: list[Span] = []
        self.waits: list[Span] = []
        self.host_waits: list[Span] = []

    @property
    def ended(self) -> bool:
        landed = all(f.end_us is not None for f in self.flights)
        return self.at == len(self.program.steps) and landed

    @property
    def busy(self) -> bool:
        """Is it in the middle of something, or waits for others?"""
        return self.needs is not None

    def run(self) -> None:
        while not self.busy and self.at < len(self.program.steps):
            step = self.program.steps[self.at]
            self.launch(step)
            if self.busy:
                return
            if step.kind == "start" and step.collective in self.program.meetings:
                self.start(step)
            elif step.kind == "wait" and self.lazy:
                self.put_off(step)
            elif self.waited_for(step):
                self.compute(step)
            else:
                return
            self.at += 1

    def launch(self, step: Step) -> None:
        """The host issues the step's kernel, once; compute waits for that if it is late."""
        host_us = self.program.contention.host_us
        if not host_us or self.issued_at == self.at:
            return
        self.issued_at = self.at
        if launches(step, self.program.us(step)):
            self.host += host_us
            if self.host > self.now:
                self.host_waits.append(Span(step.name, "compute", self.now, self.host))
                self.now = self.host

    def put_off(self, wait: Step) -> None:
        """Who uses the result waits."""
        for name in wait.inputs:
            if name in self.flying:
                self.flying[wait.name] = self.flying[name]

    def start(self, step: Step) -> None:
        assert step.collective is not None
        meetings = self.program.meetings[step.collective]
        before = [self.flying[x] for x in step.inputs if x in self.flying]
        before += [self.last[m.key] for m in meetings if m.key in self.last]
        flight = Flight(self.rank, step, self.program.us(step), self.now, before)
        for other in before:
            other.after.append(flight)
        for meeting in meetings:
            self.last[meeting.key] = flight
            self.world.come(meeting, self.turns[meeting.key], flight)
            self.turns[meeting.key] += 1
        self.flying[step.name] = flight
        self.flights.append(flight)
        self.world.settle([flight])

    def waited_for(self, step: Step) -> bool:
        """Is all there that the step needs? Else the rank goes on when it is."""
        for name in step.inputs:
            flight = self.flying.get(name)
            if flight is None:
                continue
            if flight.end_us is None:
                self.needs = flight
                return False
            if flight.end_us > self.now:
                self.waits.append(Span(flight.step.name, "compute", self.now, flight.end_us))
                self.now = flight.end_us
        return True

    def compute(self, step: Step) -> None:
        us = self.program.us(step)
        if us > 0:
            self.spans.append(Span(step.name, "compute", self.now, self.now + us))
            self.now += us

    def line(self) -> RankLine:
        flown = [
            Span(f.step.name, f.step.stream, f.begin_us, f.end_us or 0.0, f.step.collective)
            for f in self.flights
        ]
        spans = (*self.spans, *flown)
        end_us = max([self.now, *(s.end_us for s in flown)])
        return RankLine(spans, tuple(self.waits), end_us, tuple(self.host_waits))

    def why(self) -> str:
        under_way = next((f for f in self.flights if f.end_us is None), None)
        waits = self.needs or under_way
        if waits is None:
            return f"rank {self.rank} has not ended"
        missing = sorted({r for m in waits.meetings for r in m.ranks if r not in m.flights})
        who = "rank " + ", ".join(map(str, missing)) if missing else "the calls before it"
        return f"rank {self.rank} waits in {waits.step.op} at {waits.step.source} for {who}"
