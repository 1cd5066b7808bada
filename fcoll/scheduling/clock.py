"""When units run: the one clock of timelines, schedulers and worlds of ranks.

A rank's compute stream takes its units in order. When it reaches a start, the collective is issued
and goes on by itself: it begins when the one before on its stream and the collectives whose results
it needs have ended, and all its ranks have issued it. Whoever needs its result blocks until it is
there. What runs at the same time may slow down, and the host may be late with what it issues:
fcoll/scheduling/contention.py says how much.

``Clock`` is the short way of one rank on which nothing slows anything down: every end is known when
a unit is reached, which is what makes planning fast. ``EventLoop`` is for all the rest: several
ranks, contention, and who needs to know why something waited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

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


# -- events ---


@dataclass(frozen=True)
class Rendezvous:
    """What a call meets its peers over: the same ``key`` on all ``ranks``."""

    key: Hashable
    ranks: tuple[int, ...]


class Task:
    """Something under way: a flight (a collective, or one message of a batch), or what a rank is
    busy with. ``left`` us of it at ``at``; since then 1 us of it takes ``pace`` us."""

    at = begun = pace = 0.0
    ended: float | None = None
    cause: Task | None = None  # the flight that it had to wait for
    version = 0  # of its date: an event of another one is void

    def __init__(
        self, ranks: tuple[int, ...], rank: RankClock | None = None, left: float = 0.0
    ) -> None:
        self.ranks, self.rank, self.left = ranks, rank, left
        self.missing = len(ranks)  # ranks that have not come, flights before it that have not ended
        self.links: dict[int, int] = {}  # of the ranks that have
        self.after: list[Task] = []  # all that it may have had to wait for
        self.followers: list[Task] = []  # flights that come after it,
        self.waiting: list[RankClock] = []  # and ranks that wait for it


class RankClock:
    """One rank on its way: what it has done (by unit, and in the order of time) and has under way.

    ``meetings``, by unit, are whom its collectives meet; without them it is alone. A start of
    ``waits_first`` blocks compute for these flights before it is issued.
    """

    def __init__(
        self,
        units: Units,
        order: Iterable[int],
        meetings: Mapping[int, Sequence[Rendezvous]] | None = None,
        waits_first: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        n, self.number = len(units.us), 0
        self.units, self.order, self.meetings = units, order, meetings
        self.waits_first = waits_first or {}
        self.contention = units.contention or Contention()
        self.begins, self.ends = [0.0] * n, [0.0] * n  # of a start: when it is issued
        self.tasks: dict[int, list[Task]] = {}  # the flights of each start
        self.blocked: list[tuple[int, float, float]] = []  # (start, from, until): compute stood
        self.waited: dict[int, float] = {}  # start -> when compute was past the first that needs it
        self.late: list[tuple[int, float, float]] = []  # (unit, from, until): it was not issued
        self.last: dict[Hashable, int] = {}  # the last start of each stream
        self.turns: Counter[Hashable] = Counter()
        self.flying: list[Task] = []
        self.busy: Task | None = None  # the kernel that runs
        self.needs: int | None = None  # the start that it waits for
        self.done = False
        self.end_us = 0.0

    def flight(self, start: int) -> tuple[float, float]:
        """When a collective is under way, once that is known."""
        tasks = self.tasks[start]
        return min([t.begun for t in tasks]), max([t.ended or 0.0 for t in tasks])

    def exposed(self) -> Iterator[tuple[int, float, float]]:
        """``blocked`` with what a flight queued for charged to those before it."""
        of_task = {id(task): u for u, tasks in self.tasks.items() for task in tasks}
        for start, begin, end in self.blocked:
            task: Task | None = self.tasks[start][0]
            pieces = []
            while task is not None and end > begin:
                low = max(begin, task.begun)
                if end > low:
                    pieces.append((of_task[id(task)], low, end))
                    end = low
                task = task.cause
            yield from reversed(pieces)


class EventLoop:
    """Ranks against each other: time goes from one moment at which something begins or ends to the
    next. Rates change then and only then, so the times are exact."""

    def __init__(self, ranks: Mapping[int, RankClock]) -> None:
        self.now = 0.0
        self.ranks = ranks
        self.events: list[tuple[float, bool, int, Task, int]] = []
        self.count = count()
        self.open: dict[Hashable, Task] = {}  # (key, turn) of meetings: the flights
        self.going: dict[RankClock, Iterator[None]] = {}
        found = [rank.contention for rank in ranks.values()]
        self.crowded = any(c.slowdown != 1 or any(c.links.values()) for c in found)
        for number, rank in ranks.items():
            rank.number = number
            self.going[rank] = self.steps(rank)

    def run(self) -> None:
        """Until nothing more can happen; a rank that is not ``done`` then waits for ever."""
        for rank in self.ranks.values():
            self.date(Task((), rank), 0.0)
        events = self.events
        while events:
            due, _, _, task, version = heappop(events)
            if task.version == version:
                self.now = task.ended = due
                if task.rank is not None:
                    next(self.going[task.rank], None)
                else:
                    self.land(task)

    # -- one rank ---

    def steps(self, rank: RankClock) -> Iterator[None]:
        """A rank's units, one after the other; it stops where it cannot go on."""
        units, host_us, host = rank.units, rank.contention.host_us, 0.0
        kind, us, flights, launches = units.kind, units.us, units.flights, units.launches
        begins, ends, flying, slowdown = (
            rank.begins,
            rank.ends,
            rank.flying,
            rank.contention.slowdown,
        )
        for u in rank.order:
            if host_us and launches[u]:
                host += host_us * launches[u]
                if host > self.now:
                    rank.late.append((u, self.now, host))
                    if not self.is_next(host):
                        self.date(Task((), rank), host)
                        yield
            is_start = kind[u] == START
            for v in rank.waits_first.get(u, ()) if is_start else flights[u]:
                begin = self.now
                for task in rank.tasks[v]:
                    if task.ended is None:
                        rank.needs = v
                        task.waiting.append(rank)
                        yield
                if self.now > begin:
                    rank.blocked.append((v, begin, self.now))
                rank.waited.setdefault(v, self.now)
            begins[u] = self.now
            if is_start:
                self.issue(rank, u)
            elif us[u] > 0:
                pace = slowdown if flying else 1.0
                if not self.is_next(self.now + us[u] * pace):
                    rank.busy = Task((), rank, us[u])
                    self.pace(rank.busy, pace)
                    yield
                    rank.busy = None
            ends[u] = self.now
        rank.done, rank.end_us = True, self.now

    def is_next(self, due: float) -> bool:
        """Does nothing else happen before? Then it is that moment now: no event is needed for it,
        which halves the time of a rank that is alone."""
        if self.events and self.events[0][0] <= due:
            return False
        self.now = due
        return True

    def issue(self, rank: RankClock, u: int) -> None:
        """A start: it takes its place on its streams, and comes to its meetings."""
        units, tasks, number = rank.units, rank.tasks, rank.number
        if rank.meetings is None:
            joined: list[tuple[Hashable, Task]] = [(units.stream[u], Task((number,)))]
        else:
            joined = [(m.key, self.come(rank, m)) for m in rank.meetings[u]]
        before = [task for v in units.flights[u] for task in tasks[v]]
        for key, _ in joined:
            if (last := rank.last.get(key)) is not None:
                before += tasks[last]
            rank.last[key] = u
        share, links = units.us[u] / len(joined), units.links[u] if units.links else 0
        pending = {b for b in before if b.ended is None}
        tasks[u] = [task for _, task in joined]
        for _, task in joined:
            if share > task.left:
                task.left = share
            task.links[number] = links
            task.after += before
            task.missing += len(pending) - 1
            for other in pending:
                other.followers.append(task)
            if not task.missing:
                self.begin(task)

    def come(self, rank: RankClock, meeting: Rendezvous) -> Task:
        """The flight of a meeting, of this turn of the rank's."""
        turn = rank.turns[meeting.key]
        rank.turns[meeting.key] += 1
        return self.open.setdefault((meeting.key, turn), Task(meeting.ranks))

    # -- flights ---

    def begin(self, task: Task) -> None:
        task.begun = self.now
        for before in task.after:
            if before.ended == self.now:
                task.cause = before
                break
        task.after = []
        for r in task.ranks:
            self.ranks[r].flying.append(task)
        if self.crowded:
            self.crowd(task.ranks)
        else:
            self.pace(task, 1.0)

    def land(self, task: Task) -> None:
        for r in task.ranks:
            self.ranks[r].flying.remove(task)
        followers, task.followers = task.followers, []
        for other in followers:
            other.missing -= 1
            if not other.missing:
                self.begin(other)
        if self.crowded:
            self.crowd(task.ranks)
        waiting, task.waiting = task.waiting, []
        for rank in waiting:
            rank.needs = None
            if len(waiting) > 1:  # none may run ahead of the others
                self.date(Task((), rank), self.now)
            else:
                next(self.going[rank], None)

    def crowd(self, ranks: Iterable[int]) -> None:
        """The paces of all that is under way on these ranks."""
        for r in ranks:
            rank = self.ranks[r]
            if rank.busy is not None:
                self.pace(rank.busy, rank.contention.slowdown if rank.flying else 1.0)
            for task in rank.flying:
                pace = self.sharers(task, r)
                for other in task.ranks if len(task.ranks) > 1 else ():
                    pace = max(pace, self.sharers(task, other))
                if pace != task.pace:
                    self.pace(task, pace)

    def sharers(self, task: Task, r: int) -> int:
        """How many are in flight on the fullest of the links that it uses on a rank."""
        mine, most, flying = task.links[r], 1, self.ranks[r].flying
        if mine and len(flying) > 1:
            for link in range(mine.bit_length()):
                if mine >> link & 1:
                    most = max(most, sum([f.links[r] >> link & 1 for f in flying]))
        return most

    def pace(self, task: Task, pace: float) -> None:
        """From now on 1 us of it takes so many."""
        if pace == task.pace:
            return
        if task.pace:
            task.left = max(task.left - (self.now - task.at) / task.pace, 0.0)
        task.at, task.pace = self.now, pace
        self.date(task, self.now + task.left * pace)

    def date(self, task: Task, due: float) -> None:
        """Of two things at a moment flights end first: what they held up may go on then."""
        task.version += 1
        is_rank = task.rank is not None
        heappush(self.events, (due, is_rank, next(self.count), task, task.version))


def alone(
    units: Units, order: Iterable[int], waits_first: Mapping[int, Sequence[int]] | None = None
) -> RankClock:
    """One rank, to its end; its peers are taken to be as far as it is. The ends of starts are then
    those of their flights."""
    rank = RankClock(units, order, waits_first=waits_first)
    EventLoop({0: rank}).run()
    for u, (task,) in rank.tasks.items():
        assert task.ended is not None
        rank.ends[u] = task.ended
        rank.end_us = max(rank.end_us, task.ended)
    return rank
