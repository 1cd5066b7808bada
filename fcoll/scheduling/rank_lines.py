"""The programs of all ranks against each other: a collective begins when its last rank comes.

Each rank runs its steps in order. A collective begins when all of its ranks have issued it and are
through with what is before it on their streams, and ends for all of them at once; it is as fast as
the slowest of its ranks lets it be. A message begins when both its sender and its receiver have
issued theirs; messages from one rank to another do not wait for those to a third, or for those that
come back. The times are those of the one clock (fcoll/scheduling/clock.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fcoll.errors import CollectiveMismatch
from fcoll.graph.steps import Step
from fcoll.scheduling.clock import EventLoop, RankClock, Rendezvous
from fcoll.scheduling.contention import Contention
from fcoll.scheduling.timeline import Span, StepUnits, compute_spans, flight_spans, late_spans


@dataclass(frozen=True)
class RankProgram:
    """What one rank does. ``meetings`` are those of each collective, by its id: one of a
    collective, one for each message of a batch. ``us`` is the price of a step on this rank,
    ``contention`` what slows what down there, ``results`` how many tensors each collective has a
    wait for."""

    steps: Sequence[Step]
    meetings: Mapping[int, Sequence[Rendezvous]]
    us: Callable[[Step], float]
    contention: Contention = field(default_factory=Contention)
    results: Mapping[int, int] = field(default_factory=dict)

    def rank(self, lazy: bool) -> RankClock:
        """As the clock takes it. A start of a result that is under way queues behind it."""
        read = StepUnits(self.steps, self.us, lazy, self.results, self.contention)
        starts = {u: s.collective for u, s in enumerate(self.steps) if s.kind == "start"}
        meetings = {u: self.meetings[i] for u, i in starts.items() if i is not None}
        return RankClock(read.units, range(len(self.steps)), meetings)


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


def run_world(programs: Mapping[int, RankProgram], lazy: bool = True) -> dict[int, RankLine]:
    """Run all ranks until the last one ends. ``lazy``: a wait lasts from the first use on, as in
    eager; else it is where it stands."""
    ranks = {r: program.rank(lazy) for r, program in programs.items()}
    EventLoop(ranks).run()
    stuck = [r for r, rank in ranks.items() if not rank.done or _under_way(rank) is not None]
    if stuck:
        whys = [_why_stuck(r, ranks[r], programs[r].steps) for r in stuck[:4]]
        raise CollectiveMismatch(message="; ".join(whys))
    return {r: _line(programs[r].steps, rank) for r, rank in ranks.items()}


def _line(steps: Sequence[Step], rank: RankClock) -> RankLine:
    flown = flight_spans(steps, rank).values()
    return RankLine(
        spans=(*compute_spans(steps, rank).values(), *flown),
        waits=tuple(Span(steps[u].name, "compute", a, b) for u, a, b in rank.blocked),
        end_us=max([rank.end_us, *(s.end_us for s in flown)]),
        host_waits=late_spans(steps, rank),
    )


def _under_way(rank: RankClock) -> int | None:
    """A start whose flight has not ended."""
    return next((u for u, tasks in rank.tasks.items() if any(t.ended is None for t in tasks)), None)


def _why_stuck(number: int, rank: RankClock, steps: Sequence[Step]) -> str:
    start = rank.needs if rank.needs is not None else _under_way(rank)
    if start is None:
        return f"rank {number} has not ended"
    missing = sorted({r for task in rank.tasks[start] for r in task.ranks if r not in task.links})
    who = "rank " + ", ".join(map(str, missing)) if missing else "the calls before it"
    return f"rank {number} waits in {steps[start].op} at {steps[start].source} for {who}"
