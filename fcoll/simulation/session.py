"""One simulation: its ranks, what they share, and how it ends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fcoll.errors import CollectiveTimeout, Deadlock
from fcoll.simulation.baton import Awaited, Baton, Rank
from fcoll.simulation.channel import Channel
from fcoll.simulation.mailbox import Mailbox
from fcoll.simulation.store import SimulatedStore
from fcoll.simulation.work import SimulatedWork

DEFAULT_TIMEOUT_S = 1800.0  # torch's, of a group
POLLS = 10_000  # looks at what does not change, by ranks that could go on, are a deadlock


class Session:
    """What the ranks of one simulation have in common."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.baton = Baton()
        self.baton.on_deadlock = self._deadlock
        self.baton.helpers.append(self._expire)
        self.channels: dict[Any, tuple[Channel, Mailbox]] = {}
        self.stores: dict[Any, SimulatedStore] = {}
        self.failure: BaseException | None = None
        self.failed: Rank | None = None  # None: nobody in particular
        self.works: list[SimulatedWork] = []
        self.limits: dict[Rank, tuple[float, Awaited]] = {}
        self.polls = 0
        self._made: dict[Any, int] = {}

    # -- what ranks share ---

    def channel(
        self, me: Rank, name: str, label: str, ranks: tuple[int, ...], timeout: timedelta | None
    ) -> tuple[Channel, Mailbox]:
        """That of the group which a rank makes: its members find it by name, ranks and how often
        they made one of that name before (names are given again)."""
        mine = me.number, name, ranks
        times = self._made[mine] = self._made.get(mine, 0) + 1
        key = name, ranks, times
        if key not in self.channels:
            seconds = timeout.total_seconds() if timeout else DEFAULT_TIMEOUT_S
            made = Channel(name, label, ranks, seconds)
            self.channels[key] = made, Mailbox(made)
        return self.channels[key]

    def store(self, address: str, times: int) -> SimulatedStore:
        return self.stores.setdefault((address, times), SimulatedStore())

    # -- what ranks do ---

    def issue(self, work: SimulatedWork) -> None:
        """A rank is about to communicate."""
        if self.baton.stopping:
            work.rank.wait_for(work)  # raises
        work.rank.calls += 1
        self.polls = 0
        self.works.append(work)

    def poll(self, me: Rank, awaited: Awaited) -> None:
        """A rank looks for something that is not there, and will look again: others run first."""
        self.polls += 1
        if self.polls > POLLS * self.n:
            self._deadlock()
        if self.baton.stopping:
            me.wait_for(awaited)  # raises
        self.baton.pause(me)

    def limit(self, me: Rank, awaited: Awaited, timeout: timedelta) -> None:
        """The rank's next wait ends after this (virtual) time."""
        self.limits[me] = me.clock + timeout.total_seconds(), awaited

    # -- ends ---

    def fail(self, error: BaseException, rank: Rank | None) -> None:
        """The first failure ends all ranks."""
        if self.failure is None:
            self.failure, self.failed = error, rank
        self.baton.stop()

    def _expire(self) -> bool:
        """No rank can go on: the wait with the earliest timeout ends."""
        due = {r: t for r, (t, awaited) in self.limits.items() if r.awaits is awaited}
        if not due:
            return False
        rank = min(due, key=lambda r: (due[r], r.number))
        deadline, awaited = self.limits.pop(rank)
        absent = _names(awaited.missing())
        rank.error = CollectiveTimeout(message=f"rank {rank.number} waited in {awaited}{absent}")
        rank.clock = max(rank.clock, deadline)
        self.baton.wake(rank)
        return True

    def _deadlock(self) -> None:
        self.fail(deadlock(self.baton.ranks), None)


def deadlock(ranks: list[Rank]) -> Deadlock:
    """The report: which rank waits for what, where, and for whom."""
    lines, waiting = [], []
    for rank in ranks:
        if rank.awaits is not None:
            waiting.append(rank.number)
            lines.append(
                f"  rank {rank.number} waits in {rank.awaits}{_names(rank.awaits.missing())}"
            )
        elif rank.ended:
            lines.append(f"  rank {rank.number} has ended")
    circle = _circle({r.number: r.awaits.missing() for r in ranks if r.awaits is not None})
    around = f"\nIn a circle: {' -> '.join(f'rank {r}' for r in circle)}." if circle else ""
    made = Deadlock(message="no rank can go on:\n" + "\n".join(lines) + around)
    made.ranks = tuple(circle[:-1] or waiting)
    return made


def _names(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f", for rank{'s' * (len(ranks) > 1)} {shown}"


def _circle(waits_for: dict[int, tuple[int, ...]]) -> list[int]:
    """Ranks each of which waits for the next, the first again at the end; or empty."""
    for start in waits_for:
        path = [start]
        while True:
            following = [r for r in waits_for.get(path[-1], ()) if r in waits_for]
            if not following:
                break
            if following[0] in path:
                return [*path[path.index(following[0]) :], following[0]]
            path.append(following[0])
    return []
