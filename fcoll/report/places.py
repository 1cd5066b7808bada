"""Places in a mesh: the rank at a place, and which axes a group spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod


def place_of(rank: int, axes: Mapping[str, int]) -> list[int]:
    """
    >>> place_of(5, {"dp": 4, "tp": 2}), rank_at([2, 1], {"dp": 4, "tp": 2})
    ([2, 1], 5)
    """
    place = []
    for n in reversed(list(axes.values())):
        rank, at = divmod(rank, n)
        place.append(at)
    return place[::-1]


def rank_at(place: Sequence[int], axes: Mapping[str, int]) -> int:
    rank = 0
    for at, n in zip(place, axes.values(), strict=True):
        rank = rank * n + at
    return rank


def varying(ranks: Sequence[int], axes: Mapping[str, int]) -> list[str]:
    """The axes along which these ranks differ."""
    places = [place_of(r, axes) for r in ranks]
    return [
        name
        for name, along in zip(axes, zip(*places, strict=True), strict=True)
        if len({*along}) > 1
    ]


def is_whole(ranks: Sequence[int], along: Sequence[str], axes: Mapping[str, int]) -> bool:
    """Has a group that differs along these axes all of their places?"""
    return len(ranks) == prod(axes[name] for name in along)


def moved_to(rank: int, axes: Mapping[str, int], order: Sequence[str]) -> int:
    """The rank that is at the same place of a mesh with its axes in another order.

    >>> moved_to(1, {"dp": 4, "tp": 2}, ["tp", "dp"])  # dp=0, tp=1
    4
    """
    place = dict(zip(axes, place_of(rank, axes), strict=True))
    return rank_at([place[name] for name in order], {name: axes[name] for name in order})
