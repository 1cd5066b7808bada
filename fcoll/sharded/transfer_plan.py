"""What must be sent to cut a tensor another way: blocks in, transfers out. Pure geometry.

Every element that a rank will hold and does not hold yet is sent to it once, by the one rank that
holds it: no plan moves less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A block: its first index in each dim, and how many there are.

    >>> a, b = Box((0, 0), (4, 2)), Box((3, 1), (5, 5))
    >>> a.meet(b)
    Box(offsets=(3, 1), sizes=(1, 1))
    >>> b.meet(a).within(a)
    (slice(3, 4, None), slice(1, 2, None))
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, offsets: Sequence[int], sizes: Sequence[int]) -> Box:
        return cls(tuple(offsets), tuple(sizes))

    @classmethod
    def whole(cls, size: Sequence[int]) -> Box:
        return cls((0,) * len(size), tuple(size))

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def meet(self, other: Box) -> Box | None:
        """What both hold; None where that is nothing."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start = a if a > b else b
            size = min(a + n, b + m) - start
            if size <= 0:
                return None
            offsets.append(start)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """How to index ``outer``'s tensor to get this part of it."""
        places = zip(self.offsets, self.sizes, outer.offsets, strict=True)
        return tuple(slice(a - o, a - o + n) for a, n, o in places)


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block and the rank that holds it."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """A block that goes from one shard to another: their positions, and the block."""

    source: int
    target: int
    box: Box


@dataclass(frozen=True)
class TransferPlan:
    """From one layout to another.

    >>> rows = [HeldBlock(0, Box((0, 0), (1, 2))), HeldBlock(1, Box((1, 0), (1, 2)))]
    >>> columns = [HeldBlock(0, Box((0, 0), (2, 1))), HeldBlock(1, Box((0, 1), (2, 1)))]
    >>> plan = TransferPlan(tuple(rows), tuple(columns))
    >>> plan.moved, len(plan.kept_on(0)), plan.sent_by(0)
    (2, 1, [(1, [BlockTransfer(source=0, target=1, box=Box(offsets=(0, 1), sizes=(1, 1)))])])
    """

    sources: tuple[HeldBlock, ...]
    targets: tuple[HeldBlock, ...]

    @property
    def reversed(self) -> TransferPlan:
        """The way back."""
        return TransferPlan(self.targets, self.sources)

    @property
    def moved(self) -> int:
        """The elements that are sent, over all ranks."""
        return sum(t.box.volume for t in self._crossing())

    @property
    def moves(self) -> bool:
        """Is anything sent at all? The same answer on every rank."""
        return any(True for _ in self._crossing())

    def kept_on(self, rank: int) -> list[BlockTransfer]:
        """What stays on a rank."""
        return list(self._between(_of(self.sources, rank), _of(self.targets, rank)))

    def sent_by(self, rank: int) -> list[tuple[int, list[BlockTransfer]]]:
        """(to whom, what) of what a rank sends, receivers in order."""
        others = [j for j, target in enumerate(self.targets) if target.rank != rank]
        transfers = self._between(_of(self.sources, rank), others)
        return _by_rank(transfers, lambda t: self.targets[t.target].rank)

    def received_by(self, rank: int) -> list[tuple[int, list[BlockTransfer]]]:
        """(from whom, what) of what a rank receives, senders in order; of each sender in the order
        in which it sends."""
        others = [i for i, source in enumerate(self.sources) if source.rank != rank]
        transfers = self._between(others, _of(self.targets, rank))
        return _by_rank(transfers, lambda t: self.sources[t.source].rank)

    def _crossing(self) -> Iterator[BlockTransfer]:
        everything = self._between(range(len(self.sources)), range(len(self.targets)))
        return (t for t in everything if self.sources[t.source].rank != self.targets[t.target].rank)

    def _between(self, sources: Sequence[int], targets: Sequence[int]) -> Iterator[BlockTransfer]:
        for i in sources:
            source = self.sources[i].box
            for j in targets:
                if box := source.meet(self.targets[j].box):
                    yield BlockTransfer(i, j, box)


def _of(blocks: Sequence[HeldBlock], rank: int) -> list[int]:
    return [i for i, block in enumerate(blocks) if block.rank == rank]


def _by_rank(
    transfers: Iterator[BlockTransfer], rank_of: Callable[[BlockTransfer], int]
) -> list[tuple[int, list[BlockTransfer]]]:
    groups: dict[int, list[BlockTransfer]] = {}
    for transfer in transfers:
        groups.setdefault(rank_of(transfer), []).append(transfer)
    return sorted(groups.items())


# -- how boxes lie to each other ---


def are_rows_of(boxes: Sequence[Box], whole: Box) -> bool:
    """Are the boxes whole rows of it, from the first to the last? Then they lie in its memory one
    behind the other.

    >>> are_rows_of([Box((2, 0), (1, 4)), Box((3, 0), (2, 4))], Box((2, 0), (3, 4)))
    True
    """
    if not whole.sizes:
        return True
    row = whole.offsets[0]
    for box in boxes:
        if box.volume:
            if box.offsets[0] != row or box.sizes[1:] != whole.sizes[1:]:
                return False
            row += box.sizes[0]
    return row == whole.ends[0] or whole.volume == 0


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The positions of two boxes that share an element.

    Swept along the dim in which fewest of them lie side by side, so that a tiling is compared
    only with its neighbours.

    >>> first_overlap([Box((0,), (2,)), Box((2,), (2,)), Box((1,), (2,))])
    (0, 2)
    """
    full = [i for i, box in enumerate(boxes) if box.volume]
    if len(full) < 2 or not boxes[full[0]].sizes:
        return (full[0], full[1]) if len(full) > 1 else None
    starts = [{boxes[i].offsets[d] for i in full} for d in range(len(boxes[full[0]].sizes))]
    dim = max(range(len(starts)), key=lambda d: len(starts[d]))
    open_: list[int] = []
    for i in sorted(full, key=lambda i: boxes[i].offsets[dim]):
        start = boxes[i].offsets[dim]
        open_ = [j for j in open_ if boxes[j].ends[dim] > start]
        for j in open_:
            if boxes[i].meet(boxes[j]):
                return (min(i, j), max(i, j))
        open_.append(i)
    return None


def first_gap(boxes: Sequence[Box], whole: Box) -> Box | None:
    """A block of the whole that none of the boxes covers.

    >>> first_gap([Box((0, 0), (4, 2)), Box((0, 2), (3, 2))], Box.whole((4, 4)))
    Box(offsets=(3, 2), sizes=(1, 2))
    """
    rest = [whole] if whole.volume else []
    for box in boxes:
        rest = [piece for block in rest for piece in _without(block, box)]
    return rest[0] if rest else None


def _without(block: Box, hole: Box) -> Iterator[Box]:
    """The block less the hole, as blocks."""
    cut = block.meet(hole)
    if cut is None:
        yield block
        return
    offsets, sizes = list(block.offsets), list(block.sizes)
    for d, (start, size) in enumerate(zip(cut.offsets, cut.sizes, strict=True)):
        end = offsets[d] + sizes[d]
        for a, b in ((offsets[d], start), (start + size, end)):
            if a < b:
                part_offsets, part_sizes = [*offsets], [*sizes]
                part_offsets[d], part_sizes[d] = a, b - a
                yield Box.of(part_offsets, part_sizes)
        offsets[d], sizes[d] = start, size
