"""Which ranks of a group can map one another's memory: its islands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

MOST = 64  # ranks that can share memory (native/call.h)
VARIABLE = "FCOLL_ISLANDS"


@dataclass(frozen=True)
class Islands:
    """``ranks`` are those of the group, island by island; ``hosts`` the names of their hosts.

    >>> islands = Islands(((0, 2), (1, 3)), ("a", "b"))
    >>> islands.at(3), islands.even
    ((1, 1), True)
    """

    ranks: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]

    def at(self, rank: int) -> tuple[int, int]:
        """A rank's island, and its place there."""
        return next((i, ranks.index(rank)) for i, ranks in enumerate(self.ranks) if rank in ranks)

    @property
    def even(self) -> bool:
        return len(set(map(len, self.ranks))) == 1

    @property
    def alone(self) -> bool:
        """Is each rank on an island of its own?"""
        return all(len(ranks) == 1 for ranks in self.ranks)

    @cached_property
    def by_place(self) -> list[int]:
        """Place by place, of each the ranks of all islands; for islands of one size."""
        return [r for place in zip(*self.ranks, strict=True) for r in place]

    def shown(self, i: int) -> str:
        return f"{_ranks(self.ranks[i])} on {self.hosts[i]}"

    def __str__(self) -> str:
        inside = ", ".join(self.shown(i) for i in range(len(self.ranks)))
        return f"{len(self.ranks)} islands of shared memory ({inside}), messages between them"


def _ranks(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def forced_part(global_rank: int) -> str:
    """The part of a host's ranks that FCOLL_ISLANDS puts this one into: ``0,1/2,3`` are two
    islands, by ranks of the world. Those that are not named stay with one another."""
    parts = [part.split(",") for part in os.environ.get(VARIABLE, "").split("/")]
    return next((str(i) for i, part in enumerate(parts) if str(global_rank) in part), "")


def islands_of(places: Sequence[str], hosts: Sequence[str]) -> Islands:
    """Ranks with one place are an island, of at most as many as can share memory; islands are in
    the order of their first ranks.

    >>> islands_of(["x", "y", "x"], ["a", "b", "a"]).ranks
    ((0, 2), (1,))
    """
    by_place: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_place.setdefault(place, []).append(rank)
    groups = [
        ranks[i : i + MOST] for ranks in by_place.values() for i in range(0, len(ranks), MOST)
    ]
    groups.sort()
    return Islands(tuple(map(tuple, groups)), tuple(hosts[ranks[0]] for ranks in groups))
