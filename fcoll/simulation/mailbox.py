"""Messages between two ranks of a group. A send is complete when its receive is: as on gloo, whose
sends wait for the receiver, and on NCCL for all but small ones.

Messages from one rank to another with one tag are received in the order in which they were sent;
receives take them in the order in which they were posted. A receive from any rank takes what was
sent first, unless interleavings are explored: then it waits until no rank can go on, so that all
that could reach it are there, and each is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fcoll.errors import CollectiveMismatch, FcollError
from fcoll.simulation.channel import Channel, Contribution, carry_out
from fcoll.simulation.faults import Drop, Reorder
from fcoll.simulation.work import SimulatedWork
from fcoll.table.pieces import amount

ANY = -1


@dataclass(eq=False)
class MessageEnd:
    """One end of a message: ``me`` and ``peer`` are ranks of the group."""

    sends: bool
    me: int
    peer: int
    tag: int
    buf: Tensor
    work: SimulatedWork
    at: float = 0.0  # by its rank's clock
    held: bool = False  # until the next one to the same rank has overtaken it


class Mailbox:
    """The messages of a group that have one end only."""

    def __init__(self, channel: Channel, session: Any) -> None:
        self.channel, self.session = channel, session
        self.sends: list[MessageEnd] = []
        self.receives: list[MessageEnd] = []

    def post(self, message: MessageEnd) -> None:
        work = message.work
        message.at = work.rank.clock
        work.missing_ranks = self._missing(message)
        work.cancel = lambda error: self._withdraw(message, error)
        if message.peer in self.channel.dead:
            self._fail(message, self.channel.died())
        elif message.sends:
            self._send(message)
        else:
            self.receives.append(message)
        self.match()

    def _send(self, message: MessageEnd) -> None:
        fault = self.session.fault_of(self.channel, message)
        if isinstance(fault, Drop):
            message.work.complete(message.at)
            return
        for i, other in enumerate(self.sends):
            if other.held and (other.me, other.peer) == (message.me, message.peer):
                other.held = False
                self.sends.insert(i, message)  # it overtakes
                return
        message.held = isinstance(fault, Reorder)
        self.sends.append(message)

    def match(self) -> None:
        """Bring together what belongs together."""
        again = True
        while again:
            again = False
            for receive in list(self.receives):
                candidates = self.candidates(receive)
                if candidates and not self._is_open(receive):
                    self.meet(candidates[0], receive)
                    again = True

    def _is_open(self, receive: MessageEnd) -> bool:
        """Is it tried with each message that it may take?"""
        return receive.peer == ANY and self.session.choices is not None

    def open_pairs(self) -> list[tuple[MessageEnd, MessageEnd]]:
        """The messages and receives that an exploration may bring together."""
        return [
            (send, receive)
            for receive in self.receives
            if self._is_open(receive)
            for send in self.candidates(receive)
        ]

    def release(self) -> bool:
        """Let go of what was held back; True if there was any."""
        held = [send for send in self.sends if send.held]
        for send in held:
            send.held = False
        self.match()
        return bool(held)

    def candidates(self, receive: MessageEnd) -> list[MessageEnd]:
        """The sends that the receive may take, in the order in which they were sent."""
        for earlier in self.receives[: self.receives.index(receive)]:
            if earlier.me == receive.me and earlier.tag == receive.tag and earlier.peer == ANY:
                return []  # it may want the same
        earliest: dict[int, MessageEnd] = {}
        for send in self.sends:
            fits = send.peer == receive.me and send.tag == receive.tag and not send.held
            if fits and receive.peer in (ANY, send.me) and send.me not in earliest:
                earliest[send.me] = send
        return sorted(earliest.values(), key=lambda send: send.at)

    def meet(self, send: MessageEnd, receive: MessageEnd) -> None:
        self.sends.remove(send)
        self.receives.remove(receive)
        at = max(send.at, receive.at)
        receive.work.source = send.me
        failure = self._misfit(send, receive)
        if failure is None:
            carry_out(
                "broadcast", [Contribution([send.buf], [send.buf], root=0), _into(receive.buf)]
            )
        send.work.complete(at, failure)
        receive.work.complete(at, failure)

    def die(self, number: int) -> None:
        who = self.channel.ranks.index(number)
        for message in [*self.sends, *self.receives]:
            if message.me == who:
                self._forget(message)
            elif message.peer == who:
                self._forget(message)
                self._fail(message, self.channel.died())

    def _missing(self, message: MessageEnd) -> Callable[[], tuple[int, ...]]:
        ranks = self.channel.ranks
        if message.peer != ANY:
            return lambda: (ranks[message.peer],)
        return lambda: tuple(x for r, x in enumerate(ranks) if r != message.me)

    def _misfit(self, send: MessageEnd, receive: MessageEnd) -> FcollError | None:
        if send.buf.numel() == receive.buf.numel() and send.buf.dtype == receive.buf.dtype:
            return None
        name = self.channel.rank_name
        message = (
            f"{name(send.me)} sends {amount(send.buf)} to {name(receive.me)}, at "
            f"{send.work.call.line}, which expects {amount(receive.buf)}, at "
            f"{receive.work.call.line}"
        )
        error = CollectiveMismatch(message=message)
        error.rank = send.me
        return error

    def _withdraw(self, message: MessageEnd, error: FcollError) -> None:
        self._forget(message)
        self._fail(message, error)

    def _forget(self, message: MessageEnd) -> None:
        (self.sends if message.sends else self.receives).remove(message)

    def _fail(self, message: MessageEnd, failure: FcollError) -> None:
        message.work.complete(message.work.rank.clock, failure)


def _into(buf: Tensor) -> Contribution:
    return Contribution([buf], [buf], root=0)
