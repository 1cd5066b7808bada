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


class RingRank(NamedTuple):
    pc: int = 0  # of its program
    seq: int = 0  # published so far
    done: int = 0  # read so far, as the peers see it
    pending: tuple[int, ...] = ()  # started and not complete
    read: int = 0  # peers whose part of the oldest has been read
    writing: bool = False  # the data is in the slot, its number is not


class RingState(NamedTuple):
    ranks: tuple[RingRank, ...]
    slots: tuple[tuple[Slot, ...], ...]  # of each rank
    sent: tuple[int, ...]  # messages of another carrier, by the rank that they are for


@dataclass(frozen=True)
class Ring:
    """A program for each rank of "start", "finish" (the oldest), "send r" and "recv".

    ``in_flight``: a start waits for the oldest when so many are under way.
    """

    programs: tuple[tuple[str, ...], ...]
    size: int = 4
    in_flight: int = 2  # half the ring
    waits_until_read: bool = True
    completes_earlier: bool = False  # a start first completes all that are under way

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
            if word == "start":
                yield from self.started(state, r)
            elif word == "finish":
                yield from self.oldest_read(state, r, then=1)
            elif word == "send":
                sent = replaced(state.sent, int(peer), state.sent[int(peer)] + 1)
                yield _moved(state._replace(sent=sent), r, pc=rank.pc + 1)
            elif state.sent[r]:
                sent = replaced(state.sent, r, state.sent[r] - 1)
                yield _moved(state._replace(sent=sent), r, pc=rank.pc + 1)

    def started(self, state: RingState, r: int) -> Iterator[RingState]:
        """Group::start: make room among those under way, claim a slot, write it, publish it."""
        rank = state.ranks[r]
        too_many = len(rank.pending) >= (1 if self.completes_earlier else self.in_flight)
        if not rank.writing and rank.pending and too_many:
            yield from self.oldest_read(state, r, then=0)
            return
        seq = rank.seq + 1
        at = seq % self.size
        slot = state.slots[r][at]
        if rank.writing:
            slots = replaced(state.slots, r, replaced(state.slots[r], at, Slot(seq, slot.data)))
            now = {"seq": seq, "pending": (*rank.pending, seq), "writing": False}
            yield _moved(state._replace(slots=slots), r, pc=rank.pc + 1, **now)
            return
        read_by_all = all(p.done >= seq - self.size for i, p in enumerate(state.ranks) if i != r)
        if read_by_all or not self.waits_until_read:  # Group::claim
            slots = replaced(state.slots, r, replaced(state.slots[r], at, Slot(slot.seq, seq)))
            yield _moved(state._replace(slots=slots), r, writing=True)

    def oldest_read(self, state: RingState, r: int, then: int) -> Iterator[RingState]:
        """Group::complete_oldest: read each peer's part, once it is there."""
        rank = state.ranks[r]
        if not rank.pending:
            yield _moved(state, r, pc=rank.pc + then)
            return
        seq = rank.pending[0]
        peers = [p for p in range(len(state.ranks)) if p != r]
        slot = state.slots[peers[rank.read]][seq % self.size]
        if slot.seq < seq:  # Group::await
            return
        if slot.data != seq:
            raise Wrong(f"rank {r} reads {slot} for {seq}: {state}")
        if rank.read + 1 < len(peers):
            yield _moved(state, r, read=rank.read + 1)
        else:
            pending = rank.pending[1:]
            yield _moved(state, r, pc=rank.pc + then, read=0, done=seq, pending=pending)


def _moved(state: RingState, r: int, **changes: object) -> RingState:
    return state._replace(ranks=replaced(state.ranks, r, state.ranks[r]._replace(**changes)))


# -- the arena: places that are written again, and announcements that nobody collects ---


class News(NamedTuple):
    id: int  # the call that announced it
    place: int
    met: bool = False  # all peers have announced theirs


class ArenaRank(NamedTuple):
    call: int = 0
    step: str = "claim"
    place: int = 0  # where the last part is
    announced: tuple[News, ...] = ()
    published: int = 0  # calls announced so far
    read: int = 0  # peers whose part has been read


class ArenaState(NamedTuple):
    ranks: tuple[ArenaRank, ...]
    memory: tuple[tuple[int, ...], ...]  # the call whose part is in each place of each rank


@dataclass(frozen=True)
class Arena:
    """Ranks that make ``calls`` collectives; ``orphans[r]`` are calls that r never collects,
    because its program failed in between."""

    orphans: tuple[frozenset[int], ...]
    calls: int = 4
    places: int = 2
    by_id: bool = True  # what is collected is looked up by its id; else by its place
    meets_before_reuse: bool = True  # a place is claimed when a later call has been met over

    def start(self) -> ArenaState:
        n = len(self.orphans)
        return ArenaState((ArenaRank(),) * n, ((0,) * self.places,) * n)

    def ended(self, state: ArenaState) -> bool:
        return all(rank.call == self.calls for rank in state.ranks)

    def after(self, state: ArenaState) -> Iterator[ArenaState]:
        for r, rank in enumerate(state.ranks):
            if rank.call < self.calls:
                yield from getattr(self, rank.step)(state, r, rank)

    def claim(self, state: ArenaState, r: int, rank: ArenaRank) -> Iterator[ArenaState]:
        """Arena::claim: the next place, never the one where the ranks met last."""
        place = (rank.place + 1) % self.places
        last_use = max((news.id for news in rank.announced if news.place == place), default=0)
        later = [news for news in rank.announced if news.id > last_use]
        # a peer that has announced a later call has read what was here
        met = any(news.met or self.announced_by_all(state, news.id) for news in later)
        if self.meets_before_reuse and last_use and not met:
            return
        yield self.with_rank(state, r, rank._replace(step="write", place=place))

    def write(self, state: ArenaState, r: int, rank: ArenaRank) -> Iterator[ArenaState]:
        call = rank.call + 1
        memory = replaced(state.memory, r, replaced(state.memory[r], rank.place, call))
        moved = self.with_rank(state, r, rank._replace(step="announce"))
        yield moved._replace(memory=memory)

    def announce(self, state: ArenaState, r: int, rank: ArenaRank) -> Iterator[ArenaState]:
        """Arena::announce; then the program goes on to collect it, or fails."""
        call = rank.call + 1
        announced = (*rank.announced, News(call, rank.place))
        rank = rank._replace(announced=announced, published=call, step="collect")
        if call in self.orphans[r]:
            rank = rank._replace(call=call, step="claim")
        yield self.with_rank(state, r, rank)

    def collect(self, state: ArenaState, r: int, rank: ArenaRank) -> Iterator[ArenaState]:
        """Arena::collect: wait until all have announced it, then read every peer's place."""
        call = rank.call + 1
        open_ones = [news for news in rank.announced if not news.met]
        matching = [n for n in open_ones if (n.id == call if self.by_id else n.place == rank.place)]
        news = matching[0]
        if not self.announced_by_all(state, news.id):
            return
        peers = [p for p in range(len(state.ranks)) if p != r]
        found = state.memory[peers[rank.read]][rank.place]
        if found != call:
            raise Wrong(f"rank {r} reads call {found} for {call}: {state}")
        if rank.read + 1 < len(peers):
            yield self.with_rank(state, r, rank._replace(read=rank.read + 1))
            return
        at = rank.announced.index(news)
        announced = replaced(rank.announced, at, news._replace(met=True))
        done = rank._replace(call=call, step="claim", announced=announced, read=0)
        yield self.with_rank(state, r, done)

    def announced_by_all(self, state: ArenaState, call: int) -> bool:
        return all(rank.published >= call for rank in state.ranks)

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
