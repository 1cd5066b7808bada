"""What the ranks of a group have in common: the collectives that are under way, and messages.

The k-th collective of a rank on a group meets the k-th of the others. The last to come carries it
out for all, in rank order; calls that differ are an error on all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fcoll import reductions
from fcoll.errors import CollectiveMismatch, CollectiveTimeout, FcollError, PeerDied
from fcoll.simulation import _torch
from fcoll.simulation.calls import RankCall
from fcoll.simulation.work import SimulatedWork
from fcoll.table.pieces import Misfit, received


@dataclass(eq=False)
class Contribution:
    """What one rank brings to a collective: the pieces that it gives, and where those go that it
    gets (``table/pieces.py``)."""

    ins: Sequence[Tensor] = ()
    outs: Sequence[Tensor] = ()
    reduce_op: str = ""
    root: int = -1


class Meeting:
    """One collective: the calls and parts of the ranks that have come, by rank of the group."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel = channel
        self.number = number
        self.works: dict[int, SimulatedWork] = {}
        self.parts: dict[int, Contribution] = {}
        self.failure: FcollError | None = None

    def missing(self) -> tuple[int, ...]:
        """The global ranks that have not come."""
        ranks = self.channel.ranks
        return tuple(x for r, x in enumerate(ranks) if r not in self.works)

    def join(self, me: int, work: SimulatedWork, part: Contribution) -> None:
        work.missing_ranks, work.cancel = self.missing, self.fail
        if self.works and self.failure is None:
            self._compare(me, work)
        self.works[me], self.parts[me] = work, part
        if self.failure is None and len(self.works) == self.channel.n:
            self._carry_out()
        if self.failure is not None:
            self.fail(self.failure)
        if len(self.works) == self.channel.n:
            del self.channel.meetings[self.number]

    def fail(self, failure: FcollError) -> None:
        """For those that are here, and those that come later."""
        self.failure = failure
        at = max(work.rank.clock for work in self.works.values())
        for work in self.works.values():
            if not work.done:
                work.complete(at, failure)

    def _compare(self, me: int, work: SimulatedWork) -> None:
        first = next(iter(self.works))
        theirs: RankCall = self.works[first].call
        if work.call.agrees_with(theirs):
            return
        name = self.channel.rank_name
        message = (
            f"{name(first)} calls {theirs.shown}, at {theirs.line}, and {name(me)} calls "
            f'{work.call.shown}, at {work.call.line}, as collective {self.number + 1} on "'
            f'{self.channel.label}"'
        )
        self.failure = self._mismatch(message, (first, me))

    def _mismatch(self, message: str, ranks: tuple[int, ...]) -> FcollError:
        failure = CollectiveMismatch(message=message)
        failure.rank = ranks[0]
        return failure

    def _carry_out(self) -> None:
        at = max(work.rank.clock for work in self.works.values())
        if late := self.channel.late(self.works, at):
            self.failure = late
            return
        works = [self.works[r] for r in range(self.channel.n)]
        try:
            parts = [self.parts[r] for r in range(self.channel.n)]
            carry_out(works[0].call.op, parts, works[0].rank.session.arithmetic)
        except Misfit as misfit:
            lines = ", ".join(
                f"{self.channel.rank_name(r)} at {works[r].call.line}"
                for r in dict.fromkeys(misfit.ranks)
            )
            message = f'{works[0].call.op} on "{self.channel.label}": {misfit} ({lines})'
            self.failure = self._mismatch(message, misfit.ranks)
            return
        for work in works:
            work.complete(at)


def carry_out(op: str, parts: list[Contribution], arithmetic: Any = reductions) -> None:
    """Move the data; unseen by whatever mode the last rank that came is in."""
    tensors = [x for p in parts for x in (*p.ins, *p.outs)]
    if not tensors or any(map(_torch.has_no_data, tensors)):
        return
    first, outs = parts[0], [p.outs for p in parts]
    route = op.removesuffix("_coalesced")
    with torch.no_grad(), _torch.unseen():
        sent = [[x.detach() for x in p.ins] for p in parts]
        arrived = received(route, sent, first.reduce_op, first.root, outs, arithmetic.fold)
        for mine, pieces in zip(outs, arrived, strict=True):
            for out, x in zip(mine, pieces, strict=False):  # of a reduction to one rank, no pieces
                _put(out, x)


def _put(out: Tensor, x: Tensor) -> None:
    """Through ``.data``: no real backend's write is seen by autograd either."""
    if out.is_sparse:  # .data of one has indices of its own
        out.copy_(x)
    else:
        out.data.copy_(x if out.shape == x.shape else x.reshape(out.shape))


class Channel:
    """The meetings of a group's ranks. ``ranks`` are global; one object for all of them."""

    def __init__(self, name: str, label: str, ranks: tuple[int, ...], timeout_s: float) -> None:
        self.name, self.label, self.ranks = name, label, ranks
        self.timeout_s = timeout_s
        self.n = len(ranks)
        self.meetings: dict[int, Meeting] = {}
        self.counts = [0] * self.n  # collectives that each rank has joined
        self.dead: set[int] = set()

    def rank_name(self, r: int) -> str:
        """A rank of the group, as people are told of it."""
        return f"rank {self.ranks[r]}"

    def join(self, me: int, work: SimulatedWork, part: Contribution) -> None:
        number = self.counts[me]
        self.counts[me] += 1
        meeting = self.meetings.get(number)
        if meeting is None:
            meeting = self.meetings[number] = Meeting(self, number)
        if self.dead and meeting.failure is None:
            meeting.failure = self.died()
        meeting.join(me, work, part)

    def late(self, works: dict[int, SimulatedWork], at: float) -> FcollError | None:
        """The error if a rank came after the others' patience was over."""
        first = min(works, key=lambda r: works[r].rank.clock)
        waited = at - works[first].rank.clock
        if waited <= self.timeout_s:
            return None
        last = max(works, key=lambda r: works[r].rank.clock)
        call: RankCall = works[first].call
        error = CollectiveTimeout(
            message=f"{self.rank_name(first)} waited {self.timeout_s:g} s in {call} for "
            f"{self.rank_name(last)}, which came after {waited:g} s"
        )
        error.rank = last
        return error

    def die(self, number: int) -> None:
        """A rank was killed: those that wait for it are told, and all that call later."""
        self.dead.add(self.ranks.index(number))
        for meeting in list(self.meetings.values()):
            if number in meeting.missing():
                meeting.fail(self.died())

    def died(self) -> FcollError:
        who = min(self.dead)
        error = PeerDied(message=f'{self.rank_name(who)} of "{self.label}" died')
        error.rank = who
        return error
