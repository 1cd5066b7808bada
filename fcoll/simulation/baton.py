"""Ranks as threads of one process, of which exactly one runs: the one that has the baton.

A rank keeps the baton until it waits for something that is not there yet, or ends; then the rank
that has been ready longest gets it. Nothing polls and nothing sleeps, so the order of all that
happens is a function of the program alone. When no rank is ready, whoever can still help is asked
(``Baton.helpers``: a message that was held back, a wait that has a timeout); if nobody can, the
ranks wait for one another, and that is reported at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fcoll._torch import stack_here
from fcoll.simulation.rank_settings import RankSettings


class RankStopped(BaseException):
    """Ends a rank because another failed. No Exception: ``except Exception`` lets it pass."""


class Awaited(Protocol):
    """What a rank waits for."""

    def ready(self) -> bool:
        """Is it there?"""

    def __str__(self) -> str:
        """As in "waits in ..."; with the user's line."""

    def missing(self) -> tuple[int, ...]:
        """The global ranks that it takes, if they are known."""

    def expire(self, error: Any) -> None:
        """Its time is over: whoever waits for it gets the error."""


@dataclass(eq=False)
class Rank:
    """One simulated rank: its thread, and what it waits for."""

    number: int
    baton: Baton
    settings: RankSettings
    session: Any = None  # what the ranks have in common (ranks.py)
    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None
    awaits: Awaited | None = None
    stack: Any = None  # where it waits
    queued: bool = False
    ended: bool = False
    error: BaseException | None = None  # raised where it waits, once
    clock: float = 0.0  # virtual seconds
    world: Any = None  # its torch.distributed (world.py)
    calls: int = 0  # communicating calls that it has made
    futures: list[Any] = field(default_factory=list)  # works that others' futures may follow
    settling: list[Any] = field(default_factory=list)  # those done: callbacks run in its thread

    def wait_for(self, awaited: Awaited) -> None:
        """Return when it is ready; other ranks run meanwhile."""
        while True:
            if self.baton.stopping:
                raise RankStopped
            self.settle()
            if awaited.ready():
                return
            self.awaits, self.stack = awaited, stack_here()
            self.baton.give_up(self)
            self.awaits = None
            error, self.error = self.error, None
            if error is not None:
                raise error

    def settle(self) -> None:
        """Settle the futures of works that others have completed; in this rank's own thread."""
        while self.settling:
            self.settling.pop(0).settle_future()


class Baton:
    """Who runs, and who is next."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.queue: deque[Rank] = deque()
        self.running: Rank | None = None
        self.stopping = False
        self.timed = False  # do the ranks' clocks differ?
        self.all_ended = threading.Event()
        # asked in order when no rank is ready; True if one is ready now
        self.helpers: list[Callable[[], bool]] = []
        self.on_deadlock: Callable[[], None] = self.stop
        self.on_error: Callable[[Exception], None] = lambda error: self.stop()

    def start(self) -> None:
        for rank in self.ranks:
            rank.lock.acquire()
            assert rank.thread is not None
            rank.thread.start()
        self.queue.extend(self.ranks)
        self._hand_to(self._next())

    def wake(self, rank: Rank) -> None:
        """What the rank waits for is there: it may run."""
        if rank.awaits is not None and not rank.queued:
            rank.queued = True
            self.queue.append(rank)

    def give_up(self, me: Rank) -> None:
        """Let others run until this rank is ready again and has its turn."""
        me.settings.save()
        following = self._next()
        if following is not me:
            self._hand_to(following)
            me.lock.acquire()
        self.running = me
        me.settings.restore()

    def pause(self, me: Rank) -> None:
        """Let all others that are ready run first."""
        if self.queue:
            me.queued = True
            self.queue.append(me)
            self.give_up(me)

    def end(self, me: Rank) -> None:
        me.ended = True
        me.settings.save()
        self._hand_to(self._next())

    def stop(self) -> None:
        """Let every rank unwind, one after the other."""
        self.stopping = True
        for rank in self.ranks:
            self.wake(rank)

    def _hand_to(self, rank: Rank | None) -> None:
        self.running = rank
        if rank is None:
            self.all_ended.set()
        else:
            rank.lock.release()

    def help(self) -> bool:
        """Ask who can help, one after the other, until a rank is ready; an error ends all ranks."""
        try:
            return any(helper() for helper in self.helpers)
        except Exception as error:
            self.on_error(error)
            return True

    def _next(self) -> Rank | None:
        while not self.queue:
            if all(rank.ended for rank in self.ranks):
                return None
            if self.stopping or not self.help():
                self.on_deadlock()
        first = self.queue[0]  # never of ranks that have ended: those wait for nothing
        if self.timed:  # the first of those with the earliest clock
            first = min(self.queue, key=lambda rank: rank.clock)
        self.queue.remove(first)
        first.queued = False
        return first


class _CurrentRank(threading.local):
    rank: Rank | None = None


_thread = _CurrentRank()


def this_rank() -> Rank | None:
    """The simulated rank whose thread this is; None elsewhere."""
    return _thread.rank


def become(rank: Rank | None) -> None:
    _thread.rank = rank
