"""What must be sent to cut a tensor another way: specs in, transfers out. Pure.

Every element that a rank will hold and does not hold yet is sent to it once, by the one rank that
holds it: no plan moves less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fcoll.sharded.boxes import Box


@dataclass(frozen=True, slots=True)
class Held:
    """A block and the rank that holds it."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """A block that goes from one shard to another: their positions, and the block."""

    source: int
    target: int
    box: Box


@dataclass(frozen=True)
class Plan:
    """From one layout to another.

    >>> rows = [Held(0, Box((0, 0), (1, 2))), Held(1, Box((1, 0), (1, 2)))]
    >>> columns = [Held(0, Box((0, 0), (2, 1))), Held(1, Box((0, 1), (2, 1)))]
    >>> plan = Plan(tuple(rows), tuple(columns))
    >>> plan.moved, len(plan.kept_on(0)), plan.sent_by(0)
    (2, 1, [(1, [Transfer(source=0, target=1, box=Box(offsets=(0, 1), sizes=(1, 1)))])])
    """

    sources: tuple[Held, ...]
    targets: tuple[Held, ...]

    @property
    def reversed(self) -> Plan:
        """The way back."""
        return Plan(self.targets, self.sources)

    @property
    def moved(self) -> int:
        """The elements that are sent, over all ranks."""
        return sum(t.box.volume for t in self._crossing())

    @property
    def moves(self) -> bool:
        """Is anything sent at all? The same answer on every rank."""
        return any(True for _ in self._crossing())

    def kept_on(self, rank: int) -> list[Transfer]:
        """What stays on a rank."""
        mine, wanted = _of(self.sources, rank), _of(self.targets, rank)
        return list(self._between(mine, wanted))

    def sent_by(self, rank: int) -> list[tuple[int, list[Transfer]]]:
        """(to whom, what) of what a rank sends, receivers in order."""
        others = [j for j, target in enumerate(self.targets) if target.rank != rank]
        found = self._between(_of(self.sources, rank), others)
        return _by_rank(found, lambda t: self.targets[t.target].rank)

    def received_by(self, rank: int) -> list[tuple[int, list[Transfer]]]:
        """(from whom, what) of what a rank receives, senders in order; of each sender in the order
        in which it sends."""
        others = [i for i, source in enumerate(self.sources) if source.rank != rank]
        found = self._between(others, _of(self.targets, rank))
        return _by_rank(found, lambda t: self.sources[t.source].rank)

    def _crossing(self) -> Iterator[Transfer]:
        everything = self._between(range(len(self.sources)), range(len(self.targets)))
        return (t for t in everything if self.sources[t.source].rank != self.targets[t.target].rank)

    def _between(self, sources: Sequence[int], targets: Sequence[int]) -> Iterator[Transfer]:
        for i in sources:
            held = self.sources[i].box
            for j in targets:
                if box := held.meet(self.targets[j].box):
                    yield Transfer(i, j, box)


def _of(held: Sequence[Held], rank: int) -> list[int]:
    return [i for i, h in enumerate(held) if h.rank == rank]


def _by_rank(
    found: Iterator[Transfer], rank_of: Callable[[Transfer], int]
) -> list[tuple[int, list[Transfer]]]:
    groups: dict[int, list[Transfer]] = {}
    for transfer in found:
        groups.setdefault(rank_of(transfer), []).append(transfer)
    return sorted(groups.items())
