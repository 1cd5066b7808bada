"""Every order in which the ranks' blocks can run through the meetings of the Triton kernels.

The interpreter runs a rank's blocks one after the other, a GPU in any order: here is a model of
``_meet`` in ``inductor_ext/lower/triton_kernels.py``, and all states that it can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from interleavings import explore

MAX_BLOCKS = 32
SEND, TAKE, SEND_AGAIN, TAKE_AGAIN, ENDED = range(5)  # what a block of a kernel does
Word = Callable[[int, int, int, int, int], int]  # meeting, block, sender, ranks, grid -> its place


def as_in_the_kernel(meeting: int, block: int, sender: int, n: int, grid: int) -> int:
    return (meeting * MAX_BLOCKS + block) * n + sender


def packed_by_the_grid(meeting: int, block: int, sender: int, n: int, grid: int) -> int:
    return (meeting * grid + block) * n + sender


def same_for_both_meetings(meeting: int, block: int, sender: int, n: int, grid: int) -> int:
    return block * n + sender


@dataclass(frozen=True)
class Block:
    does: int
    left: frozenset[int]  # the ranks that it has yet to send to, or to take from


@dataclass(frozen=True)
class Rank:
    kernel: int  # it has written its part for this one
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class State:
    ranks: tuple[Rank, ...]
    signals: frozenset[tuple[int, int]]  # (owner, word) of those that are 1


class Lost(Exception):
    """A signal is sent where the last one has not been taken."""


class Overwritten(Exception):
    """A part is read that is not of this kernel."""


@dataclass(frozen=True)
class Model:
    n: int
    grids: tuple[int, ...]  # of the kernels, which all ranks run in this order
    word: Word
    meets_again: bool = True

    def begin(self, kernel: int) -> Rank:
        grid = self.grids[kernel] if kernel < len(self.grids) else 0
        return Rank(kernel, (Block(SEND, frozenset(range(self.n))),) * grid)

    def start(self) -> State:
        return State((self.begin(0),) * self.n, frozenset())

    def after(self, state: State) -> Iterator[State]:
        """The states that one step of one block, or the start of a rank's next kernel, makes."""
        self.check(state)
        for r, rank in enumerate(state.ranks):
            if rank.blocks and all(block.does == ENDED for block in rank.blocks):
                yield _with_rank(state, r, self.begin(rank.kernel + 1))
            for b, block in enumerate(rank.blocks):
                for other in block.left:
                    yield from self.step(state, r, b, other)

    def step(self, state: State, r: int, b: int, other: int) -> Iterator[State]:
        rank, block = state.ranks[r], state.ranks[r].blocks[b]
        sends = block.does in (SEND, SEND_AGAIN)
        owner, sender = (other, r) if sends else (r, other)
        meeting = int(block.does in (SEND_AGAIN, TAKE_AGAIN))
        word = self.word(meeting, b, sender, self.n, self.grids[rank.kernel])
        signal = (owner, word)
        if not sends and signal not in state.signals:
            return
        if sends and signal in state.signals:
            raise Lost(f"{r} to {other}, block {b} of kernel {rank.kernel}, meeting {meeting}")
        next_block = Block(block.does, block.left - {other})
        if not next_block.left:
            next_block = self.then(block.does)
        blocks = (*rank.blocks[:b], next_block, *rank.blocks[b + 1 :])
        moved = _with_rank(state, r, replace(rank, blocks=blocks))
        yield replace(moved, signals=state.signals ^ {signal})

    def then(self, done: int) -> Block:
        if done == TAKE_AGAIN or (done == TAKE and not self.meets_again):
            return Block(ENDED, frozenset())
        return Block(done + 1, frozenset(range(self.n)))

    def check(self, state: State) -> None:
        """A block reads all parts after the first meeting, until it sends for the second."""
        for rank in state.ranks:
            for block in rank.blocks:
                reads = block.does == SEND_AGAIN and len(block.left) == self.n
                reads = reads or (block.does == ENDED and not self.meets_again)
                if reads and any(peer.kernel != rank.kernel for peer in state.ranks):
                    raise Overwritten(str(state))

    def ended(self, state: State) -> bool:
        ended = all(rank.kernel == len(self.grids) for rank in state.ranks)
        assert not (ended and state.signals), f"left behind: {state}"
        return ended


def _with_rank(state: State, r: int, rank: Rank) -> State:
    return replace(state, ranks=(*state.ranks[:r], rank, *state.ranks[r + 1 :]))


@pytest.mark.parametrize("n, grids", [(2, (1, 2, 1)), (2, (2, 1)), (3, (1, 1))], ids=str)
def test_no_order_of_blocks_loses_a_signal_or_a_part(n, grids):
    assert explore(Model(n, grids, as_in_the_kernel)) > 1000


@pytest.mark.parametrize("word", (packed_by_the_grid, same_for_both_meetings))
def test_words_that_would_be_wrong(word):
    with pytest.raises(Lost):
        explore(Model(2, (1, 2, 1), word))


def test_one_meeting_would_be_wrong():
    with pytest.raises((Lost, Overwritten)):
        explore(Model(2, (1, 1), as_in_the_kernel, meets_again=False))
