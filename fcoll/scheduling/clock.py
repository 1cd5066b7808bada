"""When units run: the one clock of the schedulers.

A rank's compute stream takes its units in order. When it reaches a start, the collective is issued
and goes on by itself: it begins when the one before on its stream and the collectives whose results
it needs have ended. Whoever needs its result blocks until it is there. Nothing slows anything down
here: fcoll/scheduling/contention.py is for machines that say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fcoll.scheduling.contention import Contention

COMPUTE, START, WAIT = 0, 1, 2
KINDS = {"compute": COMPUTE, "start": START, "wait": WAIT}


@dataclass(slots=True, kw_only=True)
class Units:
    """What a rank does, in numbers: lists with an entry a unit."""

    kind: list[int]
    us: list[float]
    stream: list[int]  # -1: compute, else a number of a group's stream
    flights: list[list[int]]  # the starts whose results it needs: it blocks, or queues, for them
    streams: list[str]
    contention: Contention | None = None  # with it, of each unit:
    links: list[int] = field(default_factory=list)  # the shared links that it uses
    launches: list[int] = field(default_factory=list)  # what the host issues for it


class Clock:
    """One rank on which nothing slows anything down; ``ends`` are those of the units so far."""

    __slots__ = ("ends", "free", "now", "units")

    def __init__(self, units: Units) -> None:
        self.units = units
        self.now = 0.0  # of the compute stream
        self.free = [0.0] * len(units.streams)
        self.ends = [0.0] * len(units.us)

    def run(self, order: Iterable[int]) -> None:
        """Go on with these units."""
        units, free, ends, now = self.units, self.free, self.ends, self.now
        us, stream, flights = units.us, units.stream, units.flights
        for u in order:
            begin = now
            for v in flights[u]:
                if ends[v] > begin:
                    begin = ends[v]
            if (s := stream[u]) < 0:
                ends[u] = now = begin + us[u]
            else:
                if free[s] > begin:
                    begin = free[s]
                ends[u] = free[s] = begin + us[u]
        self.now = now

    @property
    def total_us(self) -> float:
        return max(self.now, *self.free, 0.0)

    def copy(self) -> Clock:
        made = Clock(self.units)
        made.now, made.free, made.ends = self.now, list(self.free), list(self.ends)
        return made
