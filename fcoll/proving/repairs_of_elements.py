"""Changes of which elements a call takes: masks, order, offsets, terms, parts of other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll import functions
from fcoll.proving.correspondence import Mesh
from fcoll.proving.lines import CallSite, Change, Now, RecordedCall
from fcoll.proving.repairs import (
    FIRST,
    LIKELY,
    POSSIBLE,
    RARE,
    Repair,
    Site,
    alone,
    of_argument,
    of_result,
)
from fcoll.proving.ring import Ring

_ADDS = frozenset(("add", "sub", "add_", "sub_", "__add__", "__sub__", "__radd__", "__rsub__"))
_MOVES = frozenset(("ge", "gt", "le", "lt", "eq", "ne", "rsub", "__getitem__", "narrow")) | {
    *("__ge__", "__gt__", "__le__", "__lt__", *_ADDS),
}


# -- masks and order ---


def masks(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """Elements that a mask of the same function would set to zero."""
    if not site.is_float() or site.call.is_collective or not site.call.has_gradient:
        return
    for name, mask in _named(site, torch.bool):
        if (shown := _fitted(mask, site.value)) is None:
            continue
        for sign in ("", "~"):
            it = f"{sign}{name}{shown}"
            yield alone(
                site,
                f"elements that {sign}{name} marks are not this rank's, and are not masked",
                f"masking {site.its}: masked_fill({it}, 0.0)",
                lambda now, name=name, sign=sign, shown=shown: _masked(now, name, sign, shown),  # type: ignore[misc]
                POSSIBLE,
            )


def _masked(now: Now, name: str, sign: str, shown: str) -> Any:
    y, mask = now.as_it_is(), now.frame.f_locals.get(name)
    if mask is None:
        return y
    mask = ~mask if sign else mask
    return y.masked_fill(mask.unsqueeze(-1) if shown else mask, 0.0)


def orders(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """The right elements, in an order of the same function."""
    if not site.is_float():
        return
    floats = [(k, x) for k, x in enumerate(site.call.args) if _is_float(x) and x.dim()]
    for name, index in _named(site, torch.int64):
        n = len(index) if index.dim() == 1 else 0
        if not n or not torch.equal(index.sort()[0], torch.arange(n)):
            continue
        for shown in (name, f"{name}.argsort()"):
            what = f"the right elements in the wrong order: not in that of {name}"
            if site.value.dim() and site.value.shape[0] == n:
                remedy = f"indexing {site.its} by [{shown}]"
                change = of_result(lambda y, now, s=shown: _ordered(y, now, s))  # type: ignore[misc]
                yield alone(site, what, remedy, change, POSSIBLE)
            for k, x in floats:
                if x.shape[0] == n:
                    remedy = f"indexing {site.name_of(x) or f'argument {k}'} by [{shown}]"
                    change = of_argument(k, lambda x, now, s=shown: _ordered(x, now, s))  # type: ignore[misc]
                    yield alone(site, what, remedy, change, POSSIBLE)


def _ordered(y: Any, now: Now, shown: str) -> Any:
    name, _, inverse = shown.partition(".")
    index = now.frame.f_locals.get(name)
    if index is None:
        return y
    return y[index.argsort() if inverse else index]


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


# -- offsets ---


def offsets(site: Site, function: Sequence[Site], ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """Integers by which positions are compared, moved or cut: they begin with this rank's part.
    ``function``: all sites of the function that it is in."""
    if site.place.function == "arange":
        yield from _positions(site, mesh)
        return
    if (shift := _Shift.of([site])) is not None:
        whole = _Shift.of([s for s in function if _Shift.of([s]) is not None])
        for shifts in (whole, shift):
            if shifts is not None:
                yield from shifts.repairs(site, mesh)
    yield from _indices(site)


def _positions(site: Site, mesh: Mesh) -> Iterator[Repair]:
    size = site.value.numel()
    for axis, n in mesh.axes.items():
        if n > 1 and not site.value.is_floating_point():
            yield alone(
                site,
                f"positions start at 0 on all ranks of {axis}; "
                f"the part of rank r begins at r * {size}",
                f'adding mesh["{axis}"].get_local_rank() * {size} to {site.its}',
                of_result(
                    lambda y, now, axis=axis: y + now.mesh[axis].get_local_rank() * y.numel()  # type: ignore[misc]
                ),
            )


def _indices(site: Site) -> Iterator[Repair]:
    """A constant index in a loop."""
    key = site.call.args[1] if len(site.call.args) > 1 else None
    if site.place.function != "__getitem__" or type(key) is not int or len(site.events) < 2:
        return
    if any(c.args[1] != key for e in site.events for c in e.ranks if c is not None):
        return
    yield alone(
        site,
        f"index {key} at each of its {len(site.events)} executions: always the same part",
        "indexing by the number of the execution: 0, 1, ...",
        lambda now: now.run(now.args[0], now.execution % len(now.args[0])),
        POSSIBLE,
    )


class _Shift:
    """Calls with integers that have a common beginning on each rank, at each execution."""

    def __init__(self, of: Sequence[Site]) -> None:
        self.sites = of
        self.numbers: dict[tuple[int, int], list[int]] = {}  # of rank and execution
        for site in of:
            for event in site.events:
                for rank, call in enumerate(event.ranks):
                    if call is not None:
                        found = self.numbers.setdefault((rank, event.execution), [])
                        found.extend(_integers(call.args, call.place.function))

    @staticmethod
    def of(sites: Sequence[Site]) -> _Shift | None:
        done = _Shift([s for s in sites if s.place.function in _MOVES and _is_positions(s)])
        return done if done.sites and all(done.numbers.values()) and done.numbers else None

    def repairs(self, site: Site, mesh: Mesh) -> Iterator[Repair]:
        first = {key: min(found) for key, found in self.numbers.items()}
        lengths = {max(found) - min(found) for found in self.numbers.values()}
        lengths |= {n for s in self.sites for x in s.tensors() for n in x.shape}
        for axis, n in mesh.axes.items():
            for size in sorted(lengths - {0}, reverse=True) if n > 1 else ():
                if any(x % size for x in first.values()):
                    continue
                for turn in (0, -1, 1):
                    begins = {(r, i): (mesh.place(r, axis) + turn * i) % n * size for r, i in first}
                    if begins == first or (turn and len({i for _, i in first}) < 2):
                        continue
                    yield self._repair(site, axis, size, turn, begins, first)

    def _repair(
        self,
        site: Site,
        axis: str,
        size: int,
        turn: int,
        begins: dict[tuple[int, int], int],
        first: dict[tuple[int, int], int],
    ) -> Repair:
        wrong = min(i for (r, i), x in first.items() if begins[r, i] != x)
        shown = [x for (_, i), x in sorted(first.items()) if i == wrong]
        calls = [c for e in site.events if e.execution == wrong for c in e.ranks if c is not None]
        name = next((k for k in site.call.local_names if _named_alike(k, calls, shown)), "")

        def change(now: Now) -> Any:
            key = now.rank, now.execution
            by = begins[key] - first[key] if key in begins else 0
            args = _moved(now.args, now.run.__name__, by)
            return now.run(*args, **now.kwargs)

        rank = f'mesh["{axis}"].get_local_rank()'
        whose = rank if not turn else f"(({rank} {'-+'[turn > 0]} i) % {axis}.size())"
        begin = "r" if not turn else f"((r {'-+'[turn > 0]} i) % n)"
        what = (
            f"positions begin at {', '.join(map(str, shown))} on ranks 0, 1, ...; "
            f"the part of rank r of {axis} begins at {begin} * {size}"
        )
        remedy = f"{name or 'the first position'} = {whose} * {size}"
        changes: dict[CallSite, Change] = {s.place: change for s in self.sites}
        return Repair(site.place, what, remedy, changes)


def _named_alike(name: str, calls: Sequence[RecordedCall], shown: Sequence[int]) -> bool:
    """Does each rank call its integer so?"""
    its = [c.local_names.get(name) for c in calls]
    return all(type(x) is int for x in its) and its == list(shown)


def _is_positions(site: Site) -> bool:
    x = next(iter(site.tensors()), None)
    if x is None or not list(_integers(site.call.args, site.place.function)):
        return False
    return site.place.function in ("__getitem__", "narrow") or not x.is_floating_point()


def _integers(args: Sequence[Any], function: str) -> Iterator[int]:
    """Those of a comparison or a sum; where slices begin and end."""
    if function == "narrow":
        yield from (x for x in args[2:3] if type(x) is int)
    elif function == "__getitem__":
        for key in args[1] if isinstance(args[1], tuple) else args[1:2]:
            if isinstance(key, slice) and type(key.stop) is int:
                yield from (key.start or 0, key.stop)
    else:
        yield from (x for x in args if type(x) is int)


def _moved(args: Sequence[Any], function: str, by: int) -> Sequence[Any]:
    if function == "narrow":
        return (*args[:2], args[2] + by, *args[3:])
    if function != "__getitem__":
        return tuple(x + by if type(x) is int else x for x in args)

    def moved(key: Any) -> Any:
        if isinstance(key, slice) and type(key.stop) is int:
            return slice((key.start or 0) + by, key.stop + by, key.step)
        return key

    key = args[1]
    return args[0], tuple(map(moved, key)) if isinstance(key, tuple) else moved(key)


# -- terms and factors that the function has at hand ---


def factors_at_hand(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """A term of a sum that should be multiplied by another value of the function, or by the
    exponential of a difference of two: what rescales a running sum."""
    if site.place.function not in _ADDS or not site.is_float():
        return
    carried = {k for e in site.events for c in e.ranks if c is not None for k in c.carried}
    for k, x in enumerate(site.call.args):
        if not _is_float(x):
            continue
        likely = FIRST if k in carried else RARE
        it = site.name_of(x) or "a term"
        others = [(n, v, s) for n, v in _named(site, torch.float64)
                  if (s := _fitted(v, x)) is not None]  # fmt: skip
        for name, _, shown in others:
            if name != it:
                yield _term(
                    site,
                    k,
                    f"{it} is not multiplied by {name}",
                    f"{it} * {name}{shown}",
                    lambda f, name=name, s=shown: _view(f[name], s),  # type: ignore[misc]
                    likely,
                )
        per_row = [(n, s) for n, v, s in others if v.shape != x.shape or s]
        for (a, s), (b, t) in itertools.permutations(per_row, 2):
            yield _term(
                site,
                k,
                f"{it} is not rescaled by exp({a} - {b})",
                f"{it} * torch.exp({a} - {b}){s}",
                lambda f, a=a, b=b, s=s, t=t: torch.exp(_view(f[a], s) - _view(f[b], t)),  # type: ignore[misc]
                likely,
            )


def _term(
    site: Site, k: int, what: str, shown: str, factor: Callable[[Any], Tensor], likely: int
) -> Repair:
    def change(now: Now) -> Any:
        try:
            by = factor(now.frame.f_locals)
        except (KeyError, TypeError, AttributeError):  # it is not there yet
            return now.as_it_is()
        return now.run(*now.args[:k], now.args[k] * by, *now.args[k + 1 :], **now.kwargs)

    return alone(site, what, f"{shown} in its place", change, likely)


def terms_at_hand(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """Another value of the function that should be added or subtracted."""
    if not site.is_float() or site.call.is_collective:
        return
    for name, x in _named(site, torch.float64):
        if (shown := _fitted(x, site.value)) is None:
            continue
        for sign, by in (("-", -1.0), ("+", 1.0)):
            verb = "subtracted from" if sign == "-" else "added to"
            yield alone(
                site,
                f"{name} is not {verb} {site.its}",
                f"{site.its} {sign} {name}{shown}",
                of_result(lambda y, now, n=name, s=shown, by=by: _plus(y, now, n, s, by)),  # type: ignore[misc]
                FIRST if name in site.call.unused else RARE,
            )


def _plus(y: Any, now: Now, name: str, shown: str, by: float) -> Any:
    x = now.frame.f_locals.get(name)
    if not isinstance(y, Tensor) or not isinstance(x, Tensor):
        return y
    return y + _view(x, shown) * by


# -- parts that go around ---


def exchanges(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """In a ring: an operand that stays while others go on, a result that is another rank's."""
    if site.place.function not in ("matmul", "__matmul__") or len(site.events) < 2:
        return
    for axis, n in mesh.axes.items():
        if n == 1:
            continue
        for k in (0, 1):
            if not (_stays(site, k) and not _stays(site, 1 - k)):
                continue
            it = site.name_of(site.call.args[k]) or "an operand"
            for step, whose in ((1, "next"), (-1, "previous")):
                yield alone(
                    site,
                    f"{it} is this rank's own at each execution, stale beside what the other "
                    f"ranks of {axis} pass on",
                    f"passing {it} on to the {whose} rank of {axis} with each execution",
                    of_argument(
                        k,
                        lambda x, now, a=axis, s=step: _passed(x, now, a, s * now.execution),  # type: ignore[misc]
                    ),
                )
        for step in (1, -1):
            yield alone(
                site,
                f"{site.its} belongs to another rank of {axis}: it is added to this rank's",
                f"passing the sum on around {axis} with the part that it belongs to",
                of_result(lambda y, now, a=axis, s=step: _passed(y, now, a, s * now.execution)),  # type: ignore[misc]
                LIKELY if site.call.is_backward else RARE,
            )


def _stays(site: Site, k: int) -> bool:
    """Is the argument the same at each execution?"""
    given = [c.args[k] for e in site.events if (c := e.ranks[0]) is not None]
    return all(isinstance(x, Tensor) and torch.equal(x, given[0]) for x in given)


def _passed(x: Tensor, now: Now, axis: str, steps: int) -> Tensor:
    group = now.mesh[axis]
    n = group.size()
    if not steps % n:
        return x
    return functions.wait_tensor(
        functions.permute(x.contiguous(), [(r + steps) % n for r in range(n)], group)
    )


# -- names ---


def _named(site: Site, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, x in site.call.local_names.items():
        if isinstance(x, Tensor) and x.dtype == dtype and type(x) is Tensor:
            yield name, x


def _fitted(x: Tensor, to: Tensor) -> str | None:
    """How it must be viewed to fit: as it is, or with a last dim more."""
    if x.dim() and (x.shape == to.shape or (x.dim() == to.dim() and x.shape[:-1] == to.shape[:-1]
                                            and x.shape[-1] == 1)):  # fmt: skip
        return ""
    if to.dim() > 1 and x.shape == to.shape[:-1]:
        return ".unsqueeze(-1)"
    return "" if x.dim() and x.shape == to.shape[-x.dim() :] else None


def _view(x: Tensor, shown: str) -> Tensor:
    return x.unsqueeze(-1) if shown else x
