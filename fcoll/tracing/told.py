"""A trace's side of what ranks tell each other (see peers.py): say, ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from fcoll.errors import NeedsPeers
from fcoll.source import user_line

Key = tuple[Any, ...]

_talks: list[Talk] = []


class Said(BaseException):
    """A rank has said what was wanted of it: it need not go on. No program catches it."""


class Asked(BaseException):
    """A rank needs what has not been said yet."""

    def __init__(self, key: Key, rank: int, source: int, what: str) -> None:
        super().__init__(what)
        self.key, self.rank, self.source, self.what = key, rank, source, what


@dataclass
class Talk:
    """One run of a rank: what others have said, and what it is run for, if not for itself."""

    said: dict[Key, Any]
    wanted: Key | None = None
    counts: Counter[Key] = field(default_factory=Counter)  # the same is said once for each use

    def key(self, about: Key, mine: bool) -> Key:
        self.counts[mine, about] += 1
        return *about, self.counts[mine, about]


@contextmanager
def talking(talk: Talk) -> Iterator[None]:
    _talks.append(talk)
    try:
        yield
    finally:
        _talks.pop()


def say(about: Key, value: Any) -> None:
    """Tell another rank; ``about`` is what both call it."""
    if not _talks:
        return
    key = _talks[-1].key(about, mine=True)
    _talks[-1].said[key] = value
    if key == _talks[-1].wanted:
        raise Said


def ask(about: Key, source: int, what: str) -> Any:
    """What a rank, by its global number, has said."""
    if not _talks:
        raise NeedsPeers(what=what, rank=source, line=user_line() or "")
    key = _talks[-1].key(about, mine=False)
    if key not in _talks[-1].said:
        raise Asked(key, dist.get_rank(), source, what)
    return _talks[-1].said[key]
