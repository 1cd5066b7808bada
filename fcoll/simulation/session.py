"""One simulation: its ranks, what they share, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from fcoll import reductions
from fcoll._torch import stack_here
from fcoll.errors import CollectiveTimeout, Deadlock, GroupMismatch
from fcoll.simulation import _torch
from fcoll.simulation.baton import Awaited, Baton, Rank, RankStopped
from fcoll.simulation.channel import Channel
from fcoll.simulation.faults import Delay, Drop, Fault, Kill, Reorder
from fcoll.simulation.mailbox import Mailbox, MessageEnd
from fcoll.simulation.reports import deadlock, names
from fcoll.simulation.schedules import Choices
from fcoll.simulation.store import SimulatedStore
from fcoll.simulation.work import SimulatedWork
from fcoll.source import show, user_sites

DEFAULT_TIMEOUT_S = 1800.0  # torch's, of a group
POLLS = 1_000  # of each rank, in a row: looks at what does not change are a deadlock


class RankKilled(RankStopped):
    """Ends a rank that a fault has killed."""


class Session:
    """What the ranks of one simulation have in common. ``choices`` are those of an exploration;
    without, receives from any rank take what was sent first."""

    def __init__(
        self, n: int, faults: Sequence[Fault] = (), choices: Choices | None = None
    ) -> None:
        self.n = n
        self.arithmetic: Any = reductions  # what reductions are made by: fold, scaled
        self.choices = choices
        self.baton = Baton()
        self.baton.on_deadlock = self._deadlock
        self.baton.on_error = lambda error: self.fail(error, None)
        self.baton.helpers += [self._match_any, self._release, self._expire]
        self.channels: dict[Any, tuple[Channel, Mailbox]] = {}
        self.stores: dict[Any, SimulatedStore] = {}
        self.failure: BaseException | None = None
        self.failed: Rank | None = None  # None: nobody in particular
        self.unasked: set[SimulatedWork] = set()  # nobody waited for them, or looked
        self.looked: set[SimulatedWork] = set()  # were said to be incomplete once
        self.killed: dict[int, Kill] = {}
        self.notes: list[str] = []  # faults that have happened
        self._at_call = {(f.rank, f.at): f for f in faults if isinstance(f, (Kill, Delay))}
        self._at_message = {
            (f.src, f.dst, f.at): f for f in faults if isinstance(f, (Drop, Reorder))
        }
        self._limits: dict[Rank, tuple[timedelta, float, Awaited]] = {}
        self._polls = 0
        self._made: dict[Any, int] = {}
        self._named: dict[Any, tuple[tuple[int, ...], int, str]] = {}  # -> ranks, who, said of it
        self._sent: dict[tuple[int, int], int] = {}

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
            channel = Channel(name, label, ranks, seconds)
            channel.dead.update(ranks.index(r) for r in self.killed if r in ranks)
            self.channels[key] = channel, Mailbox(channel, self)
        return self.channels[key]

    def name_group(self, me: Rank, name: str, ranks: tuple[int, ...]) -> None:
        """A rank makes a group of this name, by which its members find one another in the store.
        Names are numbers of groups that a rank has made: groups that share one would mix up their
        members, unless each is of one rank, which looks for nobody."""
        line = show(*user_sites()) or "?"
        named = ranks, me.number, f"rank {me.number} makes a group of {list(ranks)}, at {line}"
        first = self._named.setdefault((name, me.world.inits), named)
        if first[0] != ranks and max(len(first[0]), len(ranks)) > 1:
            message = f"{first[2]}, where {named[2]}: both would have the same name."
            error = GroupMismatch(message=f"{message} {GroupMismatch.hint}")
            error.ranks = first[1], me.number
            raise error

    def store(self, address: str, times: int) -> SimulatedStore:
        return self.stores.setdefault((address, times), SimulatedStore())

    # -- what ranks do ---

    def issue(self, work: SimulatedWork) -> None:
        """A rank is about to communicate."""
        rank = work.rank
        if self.baton.stopping:
            raise RankStopped
        if rank.number in self.killed:  # in a finally block
            raise RankKilled
        rank.calls += 1
        self._polls = 0
        fault = self._at_call.get((rank.number, rank.calls))
        if isinstance(fault, Kill):
            self._kill(rank, fault, work)
        elif fault is not None:
            self.notes.append(f"rank {rank.number} was {fault.seconds:g} s late for {work}")
            self.baton.timed = True
            rank.clock += fault.seconds
            self.baton.pause(rank)
        if not _torch.left_by_torch():
            self.unasked.add(work)

    def poll(self, me: Rank, awaited: Awaited) -> None:
        """A rank looks for something that is not there, and will look again: others run first."""
        if self.baton.stopping:
            raise RankStopped
        self._polls += 1
        if self._polls > POLLS * self.n:
            me.awaits, me.stack = awaited, stack_here()  # for the report
            error = self._report()
            me.awaits = None
            self.fail(error, None)
            raise RankStopped
        if self.baton.queue:
            self.baton.pause(me)
        else:
            self.baton.help()

    def limit(self, me: Rank, awaited: Awaited, timeout: timedelta) -> None:
        """The rank's next wait ends after this time, which passes when no rank can go on."""
        self._limits[me] = timeout, me.clock + timeout.total_seconds(), awaited

    def may_differ(self, work: SimulatedWork) -> bool:
        """Explored: is a handle that is complete said not to be? Once for each."""
        if self.choices is None or work in self.looked:
            return False
        self.looked.add(work)
        if not self.choices.choose(2):
            return False
        self.baton.pause(work.rank)
        return True

    def race(self, me: Rank) -> None:
        """Explored: others that are ready may go first."""
        if self.choices is not None and self.baton.queue and self.choices.choose(2):
            self.baton.pause(me)

    # -- faults ---

    def _kill(self, rank: Rank, fault: Kill, work: SimulatedWork) -> None:
        self.notes.append(f"rank {rank.number} was killed at {work}")
        self.killed[rank.number] = fault
        for channel, mailbox in self.channels.values():
            if rank.number in channel.ranks:
                channel.die(rank.number)
                mailbox.die(rank.number)
        raise RankKilled

    def fault_of(self, channel: Channel, message: MessageEnd) -> Fault | None:
        """What happens to a message that is about to be sent."""
        pair = channel.ranks[message.me], channel.ranks[message.peer]
        count = self._sent[pair] = self._sent.get(pair, 0) + 1
        fault = self._at_message.get((*pair, count))
        if fault is not None:
            did = "lost" if isinstance(fault, Drop) else "held back"
            self.notes.append(f"message {count} from rank {pair[0]} to {pair[1]} was {did}")
        return fault

    # -- when no rank can go on ---

    def _match_any(self) -> bool:
        """Explored: one of the receives from any rank takes one of the messages."""
        if self.choices is None:
            return False
        pairs = [
            (mailbox, send, receive)
            for _, mailbox in self.channels.values()
            for send, receive in mailbox.open_pairs()
        ]
        if not pairs:
            return False
        mailbox, send, receive = pairs[self.choices.choose(len(pairs))]
        mailbox.meet(send, receive)
        mailbox.match()
        return True

    def _release(self) -> bool:
        """Messages that were held back go on: nothing can overtake them any more."""
        return any([mailbox.release() for _, mailbox in self.channels.values()])

    def _expire(self) -> bool:
        """The wait with the earliest timeout ends."""
        due = {r: t for r, (_, t, awaited) in self._limits.items() if r.awaits is awaited}
        if not due:
            return False
        rank = min(due, key=lambda r: (due[r], r.number))
        timeout, deadline, awaited = self._limits.pop(rank)
        absent, seconds = awaited.missing(), timeout.total_seconds()
        rank.clock = max(rank.clock, deadline)
        error = CollectiveTimeout(
            message=f"rank {rank.number} waited {seconds:g} s in {awaited}{names(absent)}"
        )
        error.rank = absent[0] if absent else -1
        awaited.expire(error)
        return True

    def _report(self) -> Deadlock:
        return deadlock(self.baton.ranks, self.killed, self.notes)

    def _deadlock(self) -> None:
        self.fail(self._report(), None)

    def fail(self, error: BaseException, rank: Rank | None) -> None:
        """The first failure ends all ranks."""
        if self.failure is None:
            self.failure, self.failed = error, rank
        self.baton.stop()
