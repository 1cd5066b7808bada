"""Which calls of the step have given what one device does not have?

A call is explained if its values on ranks are those of the same call on one device, or their own
parts of them, or else are all among the values that one device has anywhere. The others that lead
to the result are suspects: behind them nothing that is one device's comes before the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fcoll.proving.correspondence import Mesh, own_parts
from fcoll.proving.judgement import same
from fcoll.proving.lines import Call, Place, Recorded, executions
from fcoll.proving.ring import Ring


class Key(NamedTuple):
    """A call as both programs know it: instructions of a line, by their order."""

    file: str
    line: int
    function: str
    turn: int  # of this function in the line
    caller: tuple[str, int]
    execution: int


@dataclass
class Event:
    """One call on all ranks, and on one device where it makes the same."""

    place: Place
    execution: int
    ranks: list[Call | None]
    one: Call | None
    is_explained: bool = False

    @property
    def first(self) -> Call:
        return next(c for c in self.ranks if c is not None)

    def got(self) -> list[Tensor | None]:
        return [c.values[0] if c and c.values else None for c in self.ranks]


def events(ring: Ring, one: Recorded, ranks: Sequence[Recorded], mesh: Mesh) -> list[Event]:
    """All calls in the order of rank 0 and those behind it."""
    whole = dict(_keyed(one.calls))
    found: dict[tuple[Place, int], Event] = {}
    keys: dict[tuple[Place, int], Key] = {}
    for r, recorded in enumerate(ranks):
        keyed = [key for key, _ in _keyed(recorded.calls)]
        for (where, call), key in zip(executions(recorded.calls), keyed, strict=True):
            event = found.setdefault(where, Event(*where, [None] * len(ranks), None))
            event.ranks[r], keys[where] = call, key
    pool = _Pool(ring, one)
    for where, event in found.items():
        event.one = whole.get(keys[where])
        event.is_explained = _is_explained(ring, event, mesh, pool)
    return list(found.values())


def suspects(found: Sequence[Event], ranks: Sequence[Recorded], in_backward: bool) -> list[Event]:
    """Those that lead to what the step returned; of a backward pass all that are not explained."""
    if in_backward:
        return [e for e in found if e.first.is_backward and not e.is_explained]
    of_call = {id(c): e for e in found for c in e.ranks if c is not None}
    taken: set[int] = set()
    for recorded in ranks:
        stack = list(recorded.returned) or list(range(len(recorded.calls)))
        seen: set[int] = set()
        while stack:
            if (i := stack.pop()) in seen:
                continue
            seen.add(i)
            event = of_call[id(recorded.calls[i])]
            if not event.is_explained:
                taken.add(id(event))
                stack += recorded.calls[i].came_from
    return [e for e in found if id(e) in taken and not e.first.is_backward]


def _keyed(calls: Sequence[Call]) -> Iterator[tuple[Key, Call]]:
    turns: dict[tuple[object, ...], list[int]] = {}
    for call in calls:
        p = call.place
        of_line = turns.setdefault((p.file, p.line, p.function, p.caller), [])
        if p.instruction not in of_line:
            of_line.append(p.instruction)
    for (p, execution), call in executions(calls):
        turn = sorted(turns[p.file, p.line, p.function, p.caller]).index(p.instruction)
        yield Key(p.file, p.line, p.function, turn, p.caller, execution), call


# -- what is one device's ---


class _Pool:
    """All floats that one device has, but for small integers, which are anybody's."""

    def __init__(self, ring: Ring, one: Recorded) -> None:
        self.ring = ring
        given = (x for c in one.calls for x in (*c.values, *_among(c.args)))
        floats = [x.flatten() for x in given if x.dtype == torch.float64]
        self.elements = (torch.cat(floats) % ring.modulus).unique() if floats else torch.empty(0)

    def has(self, x: Tensor) -> bool:
        if x.dtype != torch.float64:
            return False
        known = torch.isin(x % self.ring.modulus, self.elements)
        return bool((known | self.ring.counts(x)[0] | ~x.isfinite()).all())


def _among(args: object) -> Iterator[Tensor]:
    for x in args if isinstance(args, (list, tuple)) else ():
        if isinstance(x, Tensor):
            yield x
        else:
            yield from _among(x)


def _is_explained(ring: Ring, event: Event, mesh: Mesh, pool: _Pool) -> bool:
    calls = [c for c in event.ranks if c is not None]
    for k, value in enumerate(calls[0].values):
        got = [c.values[k] if c and k < len(c.values) else None for c in event.ranks]
        whole = event.one.values[k] if event.one and k < len(event.one.values) else None
        if whole is not None and whole.dtype == value.dtype and whole.dim() == value.dim():
            if is_own(ring, whole, got, mesh):
                continue
            if _is_others(ring, whole, got):
                return False
        if not all(x is None or pool.has(x) for x in got):
            return False
    return True


def is_own(ring: Ring, whole: Tensor, got: Sequence[Tensor | None], mesh: Mesh) -> bool:
    """Has each rank all of it, or its own part along axes?"""
    return any(
        all(x is None or w is None or same(ring, x, w) for x, w in zip(got, want, strict=True))
        for want in own_parts(whole, got, mesh)
    )


def _is_others(ring: Ring, whole: Tensor, got: Sequence[Tensor | None]) -> bool:
    """Of the shape of the whole and not it, or a part of it, but not the rank's own?"""
    present = [x for x in got if x is not None]
    if any(x.shape == whole.shape for x in present):
        return True
    cut = [d for d, (n, m) in enumerate(zip(whole.shape, present[0].shape, strict=True)) if n != m]
    if len(cut) != 1 or present[0].shape[cut[0]] == 0:
        return False
    parts = whole.split(present[0].shape[cut[0]], cut[0])
    return all(any(same(ring, x, part) for part in parts) for x in present)
