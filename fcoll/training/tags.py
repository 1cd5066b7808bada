"""Tags in messages: which bucket of which reducer it is, as buckets of equal size look alike.

A message ends with its bucket's tag, a one or a minus one for each of its bits. Ranks that send the
same bucket get n times their own tag back; others get each other's, and say whose it is. Buckets
that are summed in place in shared memory are told apart there. This is no view to compare as in
transport/handshake.py: every bucket of every step would take a message more.
"""

from __future__ import annotations

import itertools
import re
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

BITS = 24  # two buckets have one tag by chance once in 16 million
UNKNOWN = 0  # a reducer whose number the ranks have not agreed on

_numbers = itertools.count(1)


class Tagged(Protocol):
    """What tags need of a reducer."""

    group: Any
    params: list[Tensor]
    tags: list[Tag]

    def shown(self, index: int) -> str: ...


_reducers: weakref.WeakSet[Any] = weakref.WeakSet()


class Tag:
    """A bucket's tag: a hash of the reducer's number and the names of its parameters."""

    def __init__(self, number: int, names: Sequence[str]) -> None:
        text = f"{number}: {', '.join(names)}"
        self.value = zlib.crc32(text.encode()) & ((1 << BITS) - 1)
        self._bits = torch.tensor([1.0 if self.value >> i & 1 else -1.0 for i in range(BITS)])

    def write(self, tail: Tensor) -> None:
        """Into the end of a message."""
        tail.copy_(self._bits)

    def others(self, tail: Tensor, n: int) -> int:
        """The tag that other ranks had in a message that was added up over n ranks; this one if
        all had it. If they had several, it is one of no bucket."""
        if n > 1 / torch.finfo(tail.dtype).eps:  # sums of so many ones are not exact
            return self.value
        total = (tail.real if tail.is_complex() else tail).tolist()
        differ = [abs(x - n * mine) > 0.5 for x, mine in zip(total, self._bits, strict=True)]
        return self.value ^ sum(1 << i for i, other in enumerate(differ) if other)


def proposed() -> int:
    """A number for a reducer, if this process is rank 0 of its group: the others take it."""
    return next(_numbers)


def register(reducer: Tagged) -> None:
    """Have ``whose`` find it, while it lives."""
    _reducers.add(reducer)


def sharing(params: Sequence[Tensor]) -> list[Any]:
    """The reducers of some of these parameters."""
    ids = {*map(id, params)}
    return [reducer for reducer in list(_reducers) if ids & {*map(id, reducer.params)}]


def whose(tag: int, group: str | None) -> str:
    """The bucket with this tag, in words: all ranks have made the same reducers."""
    return next(_with(tag, group), "another one")


def with_names(text: str, group: str | None) -> str:
    """An error of C++'s about buckets in shared memory, with the parameters in place of tags."""
    tagged = r"calls all_reduce tagged (\d+)\(.*?\) #\w+ in place"
    return re.sub(tagged, lambda m: f"reduces {whose(int(m[1]), group)}", text)


def _with(tag: int, group: str | None) -> Iterator[str]:
    for reducer in list(_reducers):
        for index, candidate in enumerate(reducer.tags):
            if candidate.value == tag and reducer.group.name == group:
                yield reducer.shown(index)
