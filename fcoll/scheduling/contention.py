"""What runs at the same time slows down: kernels beside collectives, collectives on one link.

One definition, which the Timeline of a rank and the schedulers' evaluator share:

- while a collective is in flight, compute takes ``slowdown`` times as long;
- k collectives in flight on a link that groups share get a k-th of its rate each; one that uses two
  links has the lower of its rates;
- the host takes ``host_us`` to issue a kernel or a collective, in the order of the program, and
  never waits: nothing begins before it is issued.

Rates change when a flight begins or ends, and only then: the times are exact. Nothing here makes
anything faster, so a bound on times without contention is a bound on those with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fcoll.costs.machine import LINKS, Machine
from fcoll.graph.steps import Step

_NEVER = math.inf


@dataclass(frozen=True)
class Contention:
    """A machine's, for a program. ``links`` are the shared links that each collective uses, by its
    id, a bit for each."""

    slowdown: float = 1.0
    host_us: float = 0.0
    links: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def of(machine: Machine, collectives: Iterable[Any]) -> Contention | None:
        """None if nothing slows down anything: there are faster ways then."""
        if machine.slowdown == 1 and not machine.host_us and not machine.shared_links:
            return None
        bits = {link: 1 << i for i, link in enumerate(LINKS)}
        shared = {link: bits[link] for link in machine.shared_links}
        links = {
            c.id: sum(shared.get(link, 0) for link in machine.links_of(c.ranks))
            for c in collectives
        }
        return Contention(machine.slowdown, machine.host_us, links)


def launches(step: Step, us: float) -> int:
    """How many kernels the host issues for a step: one for a kernel's first, one for a start."""
    if step.kind == "start" and step.collective is not None:
        return 1
    return int(step.kind != "wait" and us > 0 and step.fused_with in (None, step.name))


class Flow:
    """The flights of a rank's streams, as time goes on. ``begun`` and ``ended`` are by flight."""

    __slots__ = (
        "_active", "_after", "_anchor", "_due", "_followers", "_held", "_left", "_links",
        "_missing", "_rate", "begun", "cause", "ended", "slowdown",
    )  # fmt: skip

    def __init__(self, slowdown: float = 1.0) -> None:
        self.slowdown = slowdown
        self.begun: list[float] = []
        self.ended: list[float | None] = []  # None: not yet
        self.cause: list[int | None] = []  # the flight that it had to wait for
        self._active: list[int] = []
        self._after: list[Sequence[int]] = []
        self._missing: list[int] = []
        self._held: list[bool] = []  # did it wait for another one?
        self._followers: list[list[int]] = []
        self._links: list[int] = []
        self._left: list[float] = []  # work that was left at ``_anchor``, at the rate since then
        self._anchor: list[float] = []
        self._rate: list[float] = []
        self._due: list[float] = []

    def issue(self, now: float, us: float, after: Sequence[int] = (), links: int = 0) -> int:
        """A flight of ``us`` that begins when those ``after`` which it comes have ended."""
        self.advance(now)
        flight, ended = len(self._left), self.ended
        pending = {f for f in after if ended[f] is None}
        self.begun.append(now)
        ended.append(None)
        self.cause.append(None)
        self._after.append(after)
        self._missing.append(len(pending))
        self._held.append(bool(pending))
        self._followers.append([])
        self._links.append(links)
        self._left.append(us)
        self._anchor.append(now)
        self._rate.append(0.0)
        self._due.append(_NEVER)
        for f in pending:
            self._followers[f].append(flight)
        if not pending:
            self._begin(flight, now)
            self._share(now)
        return flight

    def compute(self, now: float, us: float) -> float:
        """When a kernel that begins now is done."""
        if self.slowdown == 1:
            return now + us
        self.advance(now)
        anchor, left = now, us
        while self._active:
            end, event = anchor + left * self.slowdown, min([self._due[f] for f in self._active])
            if end <= event:
                return end
            self.advance(event)
            left -= (event - anchor) / self.slowdown
            anchor = event
        return anchor + left

    def until(self, flight: int) -> float:
        """When a flight ends, nothing else being issued before."""
        while (end := self.ended[flight]) is None:
            self.advance(min([self._due[f] for f in self._active]))
        return end

    def drain(self) -> float:
        """When the last flight ends."""
        self.advance(_NEVER)
        return max((end for end in self.ended if end is not None), default=0.0)

    def advance(self, now: float) -> None:
        """Let all end that ends until now."""
        active, due = self._active, self._due
        while active:
            first = min(active, key=due.__getitem__)
            at = due[first]
            if at > now:
                return
            active.remove(first)
            self.ended[first] = at
            for f in self._followers[first]:
                self._missing[f] -= 1
                if not self._missing[f]:
                    self._begin(f, at)
            self._share(at)

    def _begin(self, flight: int, at: float) -> None:
        self.begun[flight] = self._anchor[flight] = at
        self._active.append(flight)
        if self._held[flight]:
            self.cause[flight] = next(f for f in self._after[flight] if self.ended[f] == at)

    def _share(self, at: float) -> None:
        """The rates of those in flight, from now on."""
        links, active = self._links, self._active
        for f in active:
            rate = 1.0
            if links[f] and len(active) > 1:
                rate = 1.0 / self._crowd(links[f])
            if rate != self._rate[f]:
                self._left[f] -= (at - self._anchor[f]) * self._rate[f]
                self._anchor[f], self._rate[f] = at, rate
                self._due[f] = at + self._left[f] / rate

    def _crowd(self, mine: int) -> int:
        """How many are in flight on the fullest of these links."""
        most, bit = 1, 1
        while bit <= mine:
            if mine & bit:
                most = max(most, sum(1 for f in self._active if self._links[f] & bit))
            bit <<= 1
        return most
