"""Which calls of the step have given what one device does not have?

A call is explained if its values on ranks are those of the same call on one device, or their own
parts of them, in any order, or else are all among the values that one device has anywhere. The
others that lead to what is wrong are suspects: behind them nothing that is one device's comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcoll.proving.correspondence import Mesh, own_parts
from fcoll.proving.judgement import same
from fcoll.proving.lines import CallSite, CallsOfRank, RecordedCall, executions
from fcoll.proving.ring import Ring


class Key(NamedTuple):
    """A call as both programs know it: instructions of a line, by their order. A program of one
    device that is in a file of its own may have the same functions."""

    file: str
    body: str
    line: int  # of the function
    function: str
    turn: int  # of this function in the line
    caller: tuple[str, int]
    execution: int


@dataclass
class CallOnRanks:
    """One call on all ranks, and on one device where it makes the same."""

    place: CallSite
    execution: int
    ranks: list[RecordedCall | None]
    one: RecordedCall | None
    is_explained: bool = False

    @property
    def first(self) -> RecordedCall:
        return next(c for c in self.ranks if c is not None)

    def got(self) -> list[Tensor | None]:
        return [c.values[0] if c and c.values else None for c in self.ranks]

    def arguments(self, k: int) -> list[Any]:
        return [c.args[k] if c and k < len(c.args) else None for c in self.ranks]

    def gradients(self) -> list[Tensor | None]:
        return [c.gradients[0] if c and c.gradients else None for c in self.ranks]


def events(
    ring: Ring, one: CallsOfRank, ranks: Sequence[CallsOfRank], mesh: Mesh
) -> list[CallOnRanks]:
    """All calls in the order of rank 0 and those behind it."""
    files = {c.place.file for c in one.calls}
    common = files.intersection(c.place.file for recorded in ranks for c in recorded.calls)
    whole = dict(_keyed(one.calls, common))
    found: dict[tuple[CallSite, int], CallOnRanks] = {}
    keys: dict[tuple[CallSite, int], Key] = {}
    for r, recorded in enumerate(ranks):
        keyed = [key for key, _ in _keyed(recorded.calls, common)]
        for (where, call), key in zip(executions(recorded.calls), keyed, strict=True):
            event = found.setdefault(where, CallOnRanks(*where, [None] * len(ranks), None))
            event.ranks[r], keys[where] = call, key
    pool = _Pool(ring, one)
    for where, event in found.items():
        alone = whole.get(keys[where])
        if alone is not None and len(alone.values) == len(event.first.values):
            event.one = alone
        event.is_explained = _is_explained(ring, event, mesh, pool)
    return list(found.values())


def suspects(found: Sequence[CallOnRanks], ranks: Sequence[CallsOfRank]) -> list[CallOnRanks]:
    """Those that lead to what the step returned."""
    return [e for e in _leading_to(found, ranks, lambda r: r.returned) if not e.first.is_backward]


def suspects_of_update(
    found: Sequence[CallOnRanks], ranks: Sequence[CallsOfRank]
) -> list[CallOnRanks]:
    """Those that lead to what was written to parameters."""
    leading = _leading_to(found, ranks, lambda r: r.written)
    return [e for e in leading if not e.first.has_gradient]


def suspects_of_backward(found: Sequence[CallOnRanks]) -> list[CallOnRanks]:
    """In functions that have a backward pass of their own."""
    return [e for e in found if e.first.is_backward and not e.is_explained]


def way_back(
    ring: Ring,
    last: CallOnRanks,
    ranks: Sequence[CallsOfRank],
    found: Sequence[CallOnRanks],
    mesh: Mesh,
) -> list[CallOnRanks]:
    """From a call over those that are not explained, to one that is given one device's values."""
    of_call = {id(c): e for e in found for c in e.ranks if c is not None}
    way = [last]
    while not is_given_own(ring, way[-1], mesh):
        call = way[-1].first
        calls = next(r.calls for r in ranks if any(c is call for c in r.calls))
        before = [of_call[id(calls[i])] for i in call.came_from]
        event = next(
            (e for e in before if not e.is_explained and all(e is not w for w in way)), None
        )
        if event is None:
            break
        way.append(event)
    return way


def is_given_own(ring: Ring, event: CallOnRanks, mesh: Mesh) -> bool:
    """Are the floats that it is given one device's, or the rank's own parts?"""
    if event.one is None:
        return False
    for k, whole in enumerate(event.one.args):
        given = event.arguments(k)
        if not isinstance(whole, Tensor) or not all(isinstance(x, Tensor) for x in given):
            continue
        if whole.is_floating_point() and not is_own(ring, whole, given, mesh):
            return False
    return True


def _leading_to(
    found: Sequence[CallOnRanks],
    ranks: Sequence[CallsOfRank],
    ends: Callable[[CallsOfRank], list[int]],
) -> list[CallOnRanks]:
    of_call = {id(c): e for e in found for c in e.ranks if c is not None}
    taken: set[int] = set()
    for recorded in ranks:
        stack = ends(recorded) or list(range(len(recorded.calls)))
        stack, seen = list(stack), set[int]()
        while stack:
            if (i := stack.pop()) in seen:
                continue
            seen.add(i)
            event = of_call[id(recorded.calls[i])]
            if not event.is_explained:
                taken.add(id(event))
                stack += recorded.calls[i].came_from
    return [e for e in found if id(e) in taken]


def suspects_of_gradients(
    ring: Ring, found: Sequence[CallOnRanks], ranks: Sequence[CallsOfRank], mesh: Mesh
) -> list[CallOnRanks]:
    """Calls of which the gradient is not one device's, and whose result comes from a parameter: in
    the order of the backward pass. Behind them are only such."""
    scales = scales_of(mesh)
    of_call = {id(c): e for e in found for c in e.ranks if c is not None}
    users: list[dict[int, list[int]]] = []
    for recorded in ranks:
        of_rank: dict[int, list[int]] = {}
        for i, call in enumerate(recorded.calls):
            for k in call.came_from:
                of_rank.setdefault(k, []).append(i)
        users.append(of_rank)
    is_wrong: dict[int, bool] = {}

    def doubtful(event: CallOnRanks) -> bool:
        if id(event) not in is_wrong:
            is_wrong[id(event)] = not has_own_gradient(ring, event, mesh, scales)
        return is_wrong[id(event)]

    taken: set[int] = set()
    for recorded, of_rank in zip(ranks, users, strict=True):
        stack = [i for i, call in enumerate(recorded.calls) if call.takes_parameter]
        seen: set[int] = set()
        while stack:
            if (i := stack.pop()) in seen:
                continue
            seen.add(i)
            event = of_call[id(recorded.calls[i])]
            if event.first.is_of_parameters:  # its gradient is summed where the parameter's is
                stack += of_rank.get(i, [])
            elif doubtful(event):
                taken.add(id(event))
                stack += of_rank.get(i, [])
    return [
        e for e in reversed(found) if id(e) in taken and any(x is not None for x in e.gradients())
    ]


def scales_of(mesh: Mesh) -> list[Fraction]:
    """By how much gradients of ranks that have parts of a batch may be larger or smaller."""
    sizes = {math.prod(mesh.axes[a] for a in axes) for axes in mesh.subsets()}
    return [Fraction(1), *map(Fraction, sorted(sizes)), *(Fraction(1, n) for n in sorted(sizes))]


def has_own_gradient(
    ring: Ring, event: CallOnRanks, mesh: Mesh, scales: Sequence[Fraction]
) -> bool:
    """Is it one device's, or the rank's own part, but for a number of ranks? Where there is none,
    or nothing to compare it with, nothing is known."""
    for k in range(len(event.first.gradients)):
        got = [c.gradients[k] if c and k < len(c.gradients) else None for c in event.ranks]
        of_one = event.one.gradients if event.one else []
        whole = of_one[k] if k < len(of_one) else None
        if whole is None or any(x is None for x in got):
            continue
        scaled = (ring.mul(whole, ring.number(float(ring.residue_of(n)))) for n in scales)
        if not any(is_own(ring, x, got, mesh) for x in scaled):
            return False
    return True


def _keyed(calls: Sequence[RecordedCall], common: Set[str]) -> Iterator[tuple[Key, RecordedCall]]:
    turns: dict[tuple[object, ...], list[int]] = {}
    for call in calls:
        p = call.place
        of_line = turns.setdefault((p.file, p.line, p.function, p.caller), [])
        if p.instruction not in of_line:
            of_line.append(p.instruction)
    for (p, execution), call in executions(calls):
        turn = sorted(turns[p.file, p.line, p.function, p.caller]).index(p.instruction)
        of_file = p.file if p.file in common else ""
        caller = p.caller if of_file else ("", 0)
        line = p.line if of_file else p.line - call.body
        yield Key(of_file, call.name, line, p.function, turn, caller, execution), call


# -- what is one device's ---


class _Pool:
    """All floats that one device has, but for small integers, which are anybody's."""

    def __init__(self, ring: Ring, one: CallsOfRank) -> None:
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


def _is_explained(ring: Ring, event: CallOnRanks, mesh: Mesh, pool: _Pool) -> bool:
    calls = [c for c in event.ranks if c is not None]
    for k, value in enumerate(calls[0].values):
        got = [c.values[k] if c and k < len(c.values) else None for c in event.ranks]
        whole = event.one.values[k] if event.one and k < len(event.one.values) else None
        if whole is not None and whole.dtype == value.dtype and whole.dim() == value.dim():
            if is_own(ring, whole, got, mesh):
                continue
            if _is_others(ring, whole, got) or not _is_rearranged(ring, whole, got, mesh):
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


def _is_rearranged(ring: Ring, whole: Tensor, got: Sequence[Tensor | None], mesh: Mesh) -> bool:
    """Do ranks have their parts' elements in another order, or does nothing tell their parts?"""
    for want in own_parts(whole, got, mesh):
        given = [[x.flatten() for x in of if x is not None] for of in (got, want)]
        if [len(x) for x in given[0]] != [len(x) for x in given[1]]:
            continue
        have, should = (_residues(ring, torch.cat(parts)) for parts in given)
        return torch.equal(have.sort()[0], should.sort()[0])
    return True


def _residues(ring: Ring, x: Tensor) -> Tensor:
    x = torch.view_as_real(x).flatten() if x.is_complex() else x
    return torch.where(x.isfinite(), x % ring.modulus, x) if x.is_floating_point() else x


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
