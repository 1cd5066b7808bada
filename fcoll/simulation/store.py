"""The store of simulated ranks: a dict, whose waits let other ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fcoll.simulation.baton import Rank, this_rank
from fcoll.source import user_line


class Keys:
    """What a rank that looks for keys waits for."""

    def __init__(self, values: dict[str, bytes], keys: Sequence[str], rank: Any = None) -> None:
        self.values, self.keys, self.rank = values, list(keys), rank
        self.line = user_line() or "?"

    def ready(self) -> bool:
        return all(key in self.values for key in self.keys)

    def missing(self) -> tuple[int, ...]:
        return ()

    def expire(self, error: Any) -> None:
        self.rank.error = error
        self.rank.baton.wake(self.rank)

    def __str__(self) -> str:
        absent = [key for key in self.keys if key not in self.values]
        return f"store.wait({', '.join(map(repr, absent))}) at {self.line}"


class SimulatedStore(dist.Store):
    """One for all ranks. C++ calls the methods by its own names too (``deleteKey``)."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.waiting: list[Rank] = []

    def set(self, key: str, value: Any) -> None:
        self.values[key] = _bytes(value)
        self._wake()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        _race()
        total = int(self.values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def append(self, key: str, value: Any) -> None:
        self.set(key, self.values.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        _race()
        present = self.values.get(key)
        if present == _bytes(expected) or (present is None and not _bytes(expected)):
            self.set(key, desired)
        return self.values.get(key, _bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        _race()
        has_all = all(key in self.values for key in keys)
        me = this_rank()
        if not has_all and me is not None:
            me.session.poll(me, Keys(self.values, keys))
        return has_all

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        me = this_rank()
        sought = Keys(self.values, keys, me)
        if sought.ready():
            return
        if me is None:
            raise RuntimeError(f"{sought}: only a simulated rank can wait for a key")
        if timeout is not None:
            me.session.limit(me, sought, timeout)
        self.waiting.append(me)
        try:
            me.wait_for(sought)
        finally:
            self.waiting.remove(me)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    deleteKey = delete_key

    def num_keys(self) -> int:
        return len(self.values)

    getNumKeys = num_keys

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SimulatedStore:
        return self

    def _wake(self) -> None:
        for rank in self.waiting:
            if rank.awaits is not None and rank.awaits.ready():
                rank.baton.wake(rank)


def _race() -> None:
    """What comes next depends on which rank is first."""
    me = this_rank()
    if me is not None:
        me.session.race(me)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
