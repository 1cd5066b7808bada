"""Models of what ranks do to each other's memory: the ring, the arena, the barrier of signals.

Each says in few lines what the C++ does in many, with a switch for each mistake that it must not
make. Beside a step is the function that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from interleavings import replaced


class Wrong(Exception):
    """A rank reads what it should not, or goes on when it should not."""


# -- the ring: slots that are written again, and collectives that are under way ---


class Slot(NamedTuple):
    seq: int = 0  # says whose data it is
    data: int = 0


class Started(NamedTuple):
    first: int
    last: int  # of a sum in place it is published when this rank's share is made, else at the start
    shared: bool = True
    argument: int = 0  # the call whose data is in the argument
    kept: int = 0  # the call whose data is where this rank's own part is read from


class RingRank(NamedTuple):
    pc: int = 0  # of its program
    seq: int = 0  # numbers taken so far
    done: int = 0  # read so far, as the peers see it
    pending: tuple[Started, ...] = ()  # started and not complete
    read: int = 0  # peers whose part of the oldest has been read
    writing: bool = False  # the data is in the slot, its number is not
    completing: int = 0  # so many of the pending are to be completed, whoever has to be waited for


class RingState(NamedTuple):
    ranks: tuple[RingRank, ...]
    slots: tuple[tuple[Slot, ...], ...]  # of each rank
    sent: tuple[int, ...]  # messages of another carrier, by the rank that they are for


@dataclass(frozen=True)
class Ring:
    """A program for each rank of "start", "sum" (start one in place), "finish" (the oldest),
    "send r" and "recv".

    ``in_flight``: a start waits for the oldest when so many are under way.
    """

    programs: tuple[tuple[str, ...], ...]
    size: int = 4
    in_flight: int = 2  # half the ring
    waits_until_read: bool = True
    completes_earlier: bool = False  # a start first completes all that are under way
    # a start that all have published completes all before it
    published_is_complete: bool = False
    shares_while_waiting: bool = True  # a rank that waits elsewhere makes its shares
    keeps_own: bool = True  # a start that returns under way has copied its own part

    def start(self) -> RingState:
        n = len(self.programs)
        return RingState((RingRank(),) * n, ((Slot(),) * self.size,) * n, (0,) * n)

    def ended(self, state: RingState) -> bool:
        return all(
            rank.pc == len(program) and not rank.pending
            for rank, program in zip(state.ranks, self.programs, strict=True)
        )

    def after(self, state: RingState) -> Iterator[RingState]:
        for r, rank in enumerate(state.ranks):
            if rank.pc == len(self.programs[r]):
                continue
            word, _, peer = self.programs[r][rank.pc].partition(" ")
            if rank.completing:
                yield from self.oldest_read(state, r, {"completing": rank.completing - 1})
            elif word in ("start", "sum"):
                yield from self.started(state, r, word)
            elif word == "finish":
                yield from self.oldest_read(state, r, {"pc": rank.pc + 1})
            elif word == "send":
                sent = replaced(state.sent, int(peer), state.sent[int(peer)] + 1)
                yield _moved(state._replace(sent=sent), r, pc=rank.pc + 1)
            elif state.sent[r]:
                sent = replaced(state.sent, r, state.sent[r] - 1)
                yield _moved(state._replace(sent=sent), r, pc=rank.pc + 1)
            elif self.shares_while_waiting:  # advance_everywhere
                yield from (moved for moved in [self.advanced(state, r)] if moved != state)

    def started(self, state: RingState, r: int, word: str) -> Iterator[RingState]:
        """Group::start: make room among those under way, claim a slot, write it, publish it."""
        rank = state.ranks[r]
        too_many = len(rank.pending) >= (1 if self.completes_earlier else self.in_flight)
        if not rank.writing and rank.pending and too_many:
            yield from self.oldest_read(state, r, {})
            return
        seq = rank.seq + 1
        at = seq % self.size
        slot = state.slots[r][at]
        if rank.writing:
            call = Started(seq, seq + (word == "sum"), word == "start")
            call = call._replace(argument=seq)
            now = {"seq": call.last, "pending": (*rank.pending, call), "writing": False}
            moved = _moved(_published(state, r, seq, self.size), r, pc=rank.pc + 1, **now)
            yield self.returned(self.enqueued(moved, r), r)
            return
        if (
            self.read_by_peers(state, r, seq - self.size) or not self.waits_until_read
        ):  # Ring::claim
            slots = replaced(state.slots, r, replaced(state.slots[r], at, Slot(slot.seq, seq)))
            yield _moved(state._replace(slots=slots), r, writing=True)

    def enqueued(self, state: RingState, r: int) -> RingState:
        """Group::enqueue: make shares; that what is ready is completed is left to its wait."""
        rank = state.ranks[r]
        if self.published_is_complete and self.published_by_peers(state, r, rank.pending[-1].last):
            state = _moved(state, r, completing=len(rank.pending))
        return self.advanced(state, r)

    def returned(self, state: RingState, r: int) -> RingState:
        """forget_arguments: the own part is kept, then the program may change its argument."""
        call = state.ranks[r].pending[-1]
        kept = call.argument if self.keeps_own else 0
        call = call._replace(kept=kept, argument=0)
        return _moved(state, r, pending=(*state.ranks[r].pending[:-1], call))

    def advanced(self, state: RingState, r: int) -> RingState:
        """Group::advance_all: the shares of sums for which all parts are there."""
        for i, call in enumerate(state.ranks[r].pending):
            if not call.shared and self.published_by_peers(state, r, call.first):
                pending = replaced(state.ranks[r].pending, i, call._replace(shared=True))
                state = _published(_moved(state, r, pending=pending), r, call.last, self.size)
        return state

    def oldest_read(self, state: RingState, r: int, then: dict) -> Iterator[RingState]:
        """Group::complete_oldest: read each peer's part, once it is there."""
        if (moved := self.advanced(state, r)) != state:
            yield moved
            return
        rank = state.ranks[r]
        if not rank.pending:
            yield _moved(state, r, **then)
            return
        call = rank.pending[0]
        peers = [p for p in range(len(state.ranks)) if p != r]
        slot = state.slots[peers[rank.read]][call.last % self.size]
        if slot.seq < call.last:  # Ring::await
            return
        if slot.data != call.last:
            raise Wrong(f"rank {r} reads {slot} for {call}: {state}")
        if call.kept != call.first:
            raise Wrong(f"rank {r} reads its argument, which was changed, for {call}: {state}")
        if rank.read + 1 < len(peers):
            yield _moved(state, r, read=rank.read + 1)
        else:
            yield _moved(
                state, r, **{"read": 0, "done": call.last, "pending": rank.pending[1:]} | then
            )

    def read_by_peers(self, state: RingState, r: int, seq: int) -> bool:
        return all(rank.done >= seq for p, rank in enumerate(state.ranks) if p != r)

    def published_by_peers(self, state: RingState, r: int, seq: int) -> bool:
        at = seq % self.size
        return all(slots[at].seq >= seq for p, slots in enumerate(state.slots) if p != r)


def _published(state: RingState, r: int, seq: int, size: int) -> RingState:
    slots = replaced(state.slots[r], seq % size, Slot(seq, seq))
    return state._replace(slots=replaced(state.slots, r, slots))


def _moved(state: RingState, r: int, **changes: object) -> RingState:
    return state._replace(ranks=replaced(state.ranks, r, state.ranks[r]._replace(**changes)))


# -- the arena: lanes that ranks agree on, spare places, and announcements that nobody collects ---


class Place(NamedTuple):
    """What a rank says of its part: where it is, and the lane that it claimed."""

    lane: int
    at: int
    spare: bool


class LaneView(NamedTuple):
    """What a rank knows of a lane."""

    agreed: int
    met: int = -1  # the place where the ranks met last
    last: int = 0  # the last call that was announced in it


class ArenaRank(NamedTuple):
    lanes: tuple[LaneView, ...]
    pc: int = 0
    claimed: Place | None = None
    said: tuple[Place, ...] = ()  # of each call that was announced
    done: int = 0  # calls that are complete
    in_place: frozenset[int] = frozenset()  # those whose parts stay where they are


class ArenaState(NamedTuple):
    ranks: tuple[ArenaRank, ...]
    lanes: tuple[tuple[int, ...], ...]  # of each rank, the call whose part is in each place
    spares: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Arena:
    """A program for each rank of numbers and words: a number claims that lane, writes the part of
    the next call and announces it; "read k" reads the parts of call k, if it did not fail before.

    As the compiler's programs, each reads what it has in a lane before it claims the lane again.
    """

    programs: tuple[tuple[int | str, ...], ...]
    places: int = 2  # in a lane
    spares: int = 3
    copies_when_complete: bool = True  # else when they are collected
    claim_completes: bool = True  # a claim first completes what was announced in the lane
    rounds: int = 2  # from spare places, until a lane is used again

    def start(self) -> ArenaState:
        n, lanes = len(self.programs), 2
        ranks = (ArenaRank((LaneView(self.rounds),) * lanes),) * n
        return ArenaState(ranks, ((0,) * (lanes * self.places),) * n, ((0,) * self.spares,) * n)

    def ended(self, state: ArenaState) -> bool:
        programs = zip(state.ranks, self.programs, strict=True)
        return all(rank.pc == len(program) for rank, program in programs)

    def after(self, state: ArenaState) -> Iterator[ArenaState]:
        for r, rank in enumerate(state.ranks):
            if rank.done < len(rank.said):
                yield from self.complete(state, r, rank)
            if rank.pc == len(self.programs[r]):
                continue
            word = self.programs[r][rank.pc]
            if isinstance(word, str):
                yield from self.read(state, r, rank, int(word.removeprefix("read ")))
            elif rank.claimed is None:
                yield from self.claim(state, r, rank, word)
            else:
                yield self.announce(state, r, rank, rank.claimed)

    def claim(self, state: ArenaState, r: int, rank: ArenaRank, lane: int) -> Iterator[ArenaState]:
        """Arena::claim, and the program writes its part."""
        view, call = rank.lanes[lane], len(rank.said) + 1
        if self.claim_completes and rank.done < view.last:
            return  # until it is complete
        if view.agreed >= self.rounds:
            place = Place(lane, lane * self.places + (view.met + 1) % self.places, spare=False)
            lanes = replaced(state.lanes, r, replaced(state.lanes[r], place.at, call))
            yield self.with_rank(state._replace(lanes=lanes), r, rank._replace(claimed=place))
            return
        read = min(peer.done for peer in state.ranks)
        free = [i for i, held in enumerate(state.spares[r]) if held <= read]
        if free:
            spares = replaced(state.spares, r, replaced(state.spares[r], free[0], call))
            place = Place(lane, free[0], spare=True)
            yield self.with_rank(state._replace(spares=spares), r, rank._replace(claimed=place))

    def announce(self, state: ArenaState, r: int, rank: ArenaRank, place: Place) -> ArenaState:
        said = (*rank.said, place)
        view = rank.lanes[place.lane]._replace(last=len(said))
        lanes = replaced(rank.lanes, place.lane, view)
        rank = rank._replace(said=said, lanes=lanes, claimed=None, pc=rank.pc + 1)
        return self.with_rank(state, r, rank)

    def complete(self, state: ArenaState, r: int, rank: ArenaRank) -> Iterator[ArenaState]:
        """Arena::read: judge where the parts are, and copy them unless they may stay."""
        call = rank.done + 1
        if any(len(peer.said) < call for peer in state.ranks):
            return
        where = [peer.said[call - 1] for peer in state.ranks]
        lanes, in_place = rank.lanes, rank.in_place
        same = all(place == where[0] for place in where)
        if same and not where[0].spare:
            in_place = in_place | {call}
            met = where[0].at % self.places
            lanes = replaced(lanes, where[0].lane, lanes[where[0].lane]._replace(met=met))
        elif all(place.spare and place.lane == where[0].lane for place in where):
            view = lanes[where[0].lane]
            met = -1 if view.agreed + 1 == self.rounds else view.met
            view = view._replace(agreed=view.agreed + 1, met=met)
            lanes = replaced(lanes, where[0].lane, view)
        else:
            for place in where:
                view = lanes[place.lane]._replace(agreed=0)
                lanes = replaced(lanes, place.lane, view)
        if call not in in_place and self.copies_when_complete:
            self.check(state, r, call)
        rank = rank._replace(lanes=lanes, in_place=in_place, done=call)
        yield self.with_rank(state, r, rank)

    def read(self, state: ArenaState, r: int, rank: ArenaRank, call: int) -> Iterator[ArenaState]:
        """Arena::collect, and the program reads the parts."""
        if rank.done < call:
            return
        if call in rank.in_place or not self.copies_when_complete:
            self.check(state, r, call)
        yield self.with_rank(state, r, rank._replace(pc=rank.pc + 1))

    def check(self, state: ArenaState, r: int, call: int) -> None:
        for p, peer in enumerate(state.ranks):
            place = peer.said[call - 1]
            found = (state.spares if place.spare else state.lanes)[p][place.at]
            if found != call:
                raise Wrong(f"rank {r} reads call {found} for {call} of rank {p}: {state}")

    def with_rank(self, state: ArenaState, r: int, rank: ArenaRank) -> ArenaState:
        return state._replace(ranks=replaced(state.ranks, r, rank))


# -- the barrier of signals, and a wait that is given up ---


class BarrierRank(NamedTuple):
    entered: int = 1  # the barrier that it is in, or has passed
    passed: int = 0
    puts: int = 0  # signals sent in this barrier
    takes: int = 0
    timeouts: int = 0
    poisoned: bool = False


class BarrierState(NamedTuple):
    ranks: tuple[BarrierRank, ...]
    signals: frozenset[tuple[int, int]]  # (owner, sender) of those that are 1


@dataclass(frozen=True)
class Barrier:
    """Every rank goes through ``barriers`` of them. Up to ``timeouts`` waits of a rank end too
    early; then it tries again at once, or the handle is poisoned until all ranks meet anew."""

    n: int = 3
    barriers: int = 2
    timeouts: int = 1
    poisons: bool = True

    def start(self) -> BarrierState:
        return BarrierState((BarrierRank(),) * self.n, frozenset())

    def ended(self, state: BarrierState) -> bool:
        """All are through, or have an error because a peer is through and does not come again."""
        given_up = [rank.poisoned or rank.timeouts == self.timeouts for rank in state.ranks]
        through = [rank.passed == self.barriers for rank in state.ranks]
        some_raised = self.timeouts > 0 and any(through)
        return all(t or (some_raised and g) for t, g in zip(through, given_up, strict=True))

    def after(self, state: BarrierState) -> Iterator[BarrierState]:
        stopped = [rank.poisoned for rank in state.ranks]
        if all(stopped):
            yield self.met_anew(state)
        for r, rank in enumerate(state.ranks):
            if rank.poisoned or rank.passed == self.barriers:
                continue
            moved = self.step(state, r, rank)
            if moved is not None:
                yield moved
            elif rank.timeouts < self.timeouts or any(stopped):
                yield self.gives_up(state, r, rank)

    def step(self, state: BarrierState, r: int, rank: BarrierRank) -> BarrierState | None:
        """The next step of Peers::meet: put a signal to each peer, then take theirs."""
        if rank.puts < self.n - 1:
            signal = ((r + rank.puts + 1) % self.n, r)
            if signal in state.signals:
                return None
            return self.with_rank(state, r, rank._replace(puts=rank.puts + 1), {signal})
        signal = (r, (r + rank.takes + 1) % self.n)
        if signal not in state.signals:
            return None
        rank = rank._replace(takes=rank.takes + 1)
        if rank.takes == self.n - 1:
            if any(peer.entered < rank.entered for peer in state.ranks):
                raise Wrong(f"rank {r} passes barrier {rank.entered}: {state}")
            passed = rank.entered
            entered = min(passed + 1, self.barriers)
            rank = rank._replace(passed=passed, entered=entered, puts=0, takes=0)
        return self.with_rank(state, r, rank, {signal})

    def gives_up(self, state: BarrierState, r: int, rank: BarrierRank) -> BarrierState:
        """It takes back the signals that nobody has seen, and raises."""
        sent = {((r + k + 1) % self.n, r) for k in range(rank.puts)} & state.signals
        timeouts = min(rank.timeouts + 1, self.timeouts)
        rank = rank._replace(puts=0, takes=0, timeouts=timeouts, poisoned=self.poisons)
        return self.with_rank(state, r, rank, sent)

    def met_anew(self, state: BarrierState) -> BarrierState:
        """All ranks begin again after the last barrier that all of them passed: new signals."""
        passed = min(rank.passed for rank in state.ranks)
        fresh = [r._replace(entered=passed + 1, passed=passed, poisoned=False) for r in state.ranks]
        return BarrierState(tuple(fresh), frozenset())

    def with_rank(
        self, state: BarrierState, r: int, rank: BarrierRank, flipped: set[tuple[int, int]]
    ) -> BarrierState:
        ranks = replaced(state.ranks, r, rank)
        return BarrierState(ranks, state.signals ^ flipped)
