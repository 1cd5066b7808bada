"""Values that ranks exchange while they are traced (see peers.py): publish, request."""

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

_exchanges: list[PeerValues] = []


class Published(BaseException):
    """A rank has published what was wanted of it: it need not go on. No program catches it."""


class Requested(BaseException):
    """A rank needs what has not been published yet."""

    def __init__(self, key: Key, rank: int, source: int, what: str) -> None:
        super().__init__(what)
        self.key, self.rank, self.source, self.what = key, rank, source, what


@dataclass
class PeerValues:
    """One run of a rank: what others have published, and what it is run for, if not for itself."""

    published: dict[Key, Any]
    wanted: Key | None = None
    counts: Counter[Key] = field(default_factory=Counter)  # the same is published once for each use

    def key(self, about: Key, mine: bool) -> Key:
        self.counts[mine, about] += 1
        return *about, self.counts[mine, about]


@contextmanager
def exchanging(values: PeerValues) -> Iterator[None]:
    _exchanges.append(values)
    try:
        yield
    finally:
        _exchanges.pop()


def publish(about: Key, value: Any) -> None:
    """Tell another rank; ``about`` is what both call it."""
    if not _exchanges:
        return
    key = _exchanges[-1].key(about, mine=True)
    _exchanges[-1].published[key] = value
    if key == _exchanges[-1].wanted:
        raise Published


def request(about: Key, source: int, what: str) -> Any:
    """What a rank, by its global number, has published."""
    if not _exchanges:
        raise NeedsPeers(what=what, rank=source, line=user_line() or "")
    key = _exchanges[-1].key(about, mine=False)
    if key not in _exchanges[-1].published:
        raise Requested(key, dist.get_rank(), source, what)
    return _exchanges[-1].published[key]
