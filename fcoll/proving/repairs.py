"""What might mend a step: changes of one of its calls, each with what it would mean.

None is believed: what_if.py makes each in a trial of its own and says only what mends the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fcoll import functions
from fcoll.proving import _torch
from fcoll.proving.correspondence import Mesh
from fcoll.proving.judgement import same, total
from fcoll.proving.lines import CallSite, Change, Now, RecordedCall
from fcoll.proving.ring import Ring
from fcoll.proving.suspects import CallOnRanks, is_own

FIRST, LIKELY, POSSIBLE, RARE = range(4)

_MAXIMA = frozenset(("amax", "max", "maximum", "logsumexp"))
_WRITES = frozenset(("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__"))
_ADDS_UP = frozenset(("sum", "mean", "where", "masked_fill", "embedding", "add", "sub")) | {
    *("matmul", "__matmul__", "mm", "bmm", "linear", "einsum"),
}
_BY_NUMBERS = frozenset(("mul", "div", "true_divide", "rsub")) | {
    *("__mul__", "__rmul__", "__truediv__", "__rdiv__"),
}
_OF_ALL = frozenset(("softmax", "log_softmax", "logsumexp", "amax", "argmax", "norm", "mean")) | {
    *("var", "std", "var_mean", "batch_norm", "layer_norm", "group_norm"),
}


MISSING = {
    "sum": "ranks hold partial sums over {1}: an all-reduce over {0} is missing",
    "avg": "ranks hold values of their own over {1}: an average over {0} is missing",
    "max": "ranks hold maxima of their own parts: an all-reduce over {0} is missing",
}


@dataclass(frozen=True)
class Repair:
    """What may be wrong at some calls, what would mend it, and the calls so mended."""

    place: CallSite  # which is shown
    what: str
    remedy: str
    changes: dict[CallSite, Change]
    likely: int = LIKELY
    of: str = "result"  # what is changed of the call


@dataclass
class Site:
    """All executions of one call."""

    place: CallSite
    events: list[CallOnRanks]

    @property
    def call(self) -> RecordedCall:
        return self.events[0].first

    @property
    def value(self) -> Tensor:
        return self.call.values[0]

    @property
    def is_in_loop(self) -> bool:
        return len(self.events) > 1

    @property
    def its(self) -> str:
        return f"the result of {self.place.function.strip('_')}"

    def tensors(self) -> list[Tensor]:
        return [x for x in self.call.args if isinstance(x, Tensor)]

    def is_float(self) -> bool:
        return bool(self.call.values) and self.value.is_floating_point()

    def name_of(self, x: Tensor) -> str:
        """What the function calls an argument that was given."""
        names = self.call.local_names.items()
        alike = [(k, o) for k, o in names if isinstance(o, Tensor) and o.shape == x.shape]
        same_as = (k for k, o in alike if o.dtype == x.dtype and torch.equal(_plain(o), x))
        return next(same_as, "")


def sites(events: Sequence[CallOnRanks]) -> list[Site]:
    found: dict[CallSite, Site] = {}
    for event in events:
        found.setdefault(event.place, Site(event.place, [])).events.append(event)
    return list(found.values())


def alone(site: Site, what: str, remedy: str, change: Change, likely: int = LIKELY) -> Repair:
    return Repair(site.place, what, remedy, {site.place: change}, likely)


def only_at(repair: Repair, execution: int) -> Repair:
    """The same at one execution of what is made again and again, as by layers that are alike."""

    def once(change: Change) -> Change:
        return lambda now: change(now) if now.execution == execution else now.as_it_is()

    changes = {place: once(change) for place, change in repair.changes.items()}
    return replace(repair, changes=changes)


def of_result(change: Callable[[Any, Now], Any]) -> Change:
    def done(now: Now) -> Any:
        y = now.as_it_is()
        return in_its_place(y, change(y, now), now.run.__name__)

    return done


def in_its_place(y: Any, other: Any, function: str) -> Any:
    """A function that writes its argument gives it: the other value is written there, too."""
    writes = function in _WRITES or (function.endswith("_") and not function.endswith("__"))
    if writes and isinstance(y, Tensor) and not (y.requires_grad and torch.is_grad_enabled()):
        return y.copy_(other)
    return other


def of_argument(k: int, change: Callable[[Any, Now], Any]) -> Change:
    return lambda now: now.run(
        *now.args[:k], change(now.args[k], now), *now.args[k + 1 :], **now.kwargs
    )


# -- reductions ---


def reductions(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """A result that should be reduced over an axis. Likely if that is one device's value."""
    if not site.is_float() or site.call.is_collective:
        return
    for axes in mesh.subsets():
        if _alike_over(ring, site.events[0].got(), mesh, axes):
            continue
        for op, said in MISSING.items():
            if op == "max" and site.place.function not in _MAXIMA:
                continue
            fits = op != "max" and _fits_when_reduced(site, ring, mesh, axes, op)
            adds_up = site.place.function in _ADDS_UP and not site.is_in_loop
            likely = LIKELY if fits or op == "max" else POSSIBLE if adds_up else RARE
            yield alone(
                site,
                said.format(*group_of(axes)),
                f'fcoll.all_reduce({site.its}, "{op}", {", ".join(axes)})',
                of_result(lambda y, now, op=op, axes=axes: reduced(y, op, axes, now)),  # type: ignore[misc]
                likely,
            )


def reduced_arguments(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """A part is taken of what should be reduced before; or what is given, as a gradient is, would
    be one device's if it were reduced."""
    name = site.place.function
    takes_part = name in ("chunk", "narrow", "__getitem__", "split", "select")
    first = site.events[0]
    for k, x in enumerate(site.call.args):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        given = first.arguments(k)
        whole = first.one.args[k] if first.one and k < len(first.one.args) else None
        it = site.name_of(x) or "what it is given"
        for axes in mesh.subsets():
            if not all(isinstance(y, Tensor) for y in given) or _alike_over(
                ring, given, mesh, axes
            ):
                continue
            for op in ("sum", "avg"):
                fits = reduces_to(ring, given, whole, mesh, axes, op)
                if fits or (takes_part and op == "sum"):
                    instead = ", or a reduce-scatter in place of the cut" if takes_part else ""
                    yield alone(
                        site,
                        MISSING[op].format(*group_of(axes)) + instead,
                        f'fcoll.all_reduce({it}, "{op}", {", ".join(axes)}) before {name}',
                        of_argument(k, lambda x, now, op=op, axes=axes: reduced(x, op, axes, now)),  # type: ignore[misc]
                    )


def group_of(axes: Sequence[str]) -> tuple[str, str]:
    return " and ".join(f'"{a}"' for a in axes), ", ".join(axes)


def reduced(y: Any, op: str, axes: Sequence[str], now: Now) -> Any:
    if not isinstance(y, Tensor) or _torch.is_dtensor(y):
        return y
    for axis in axes:
        y = functions.all_reduce(y, op, now.mesh[axis], grad="identity")
    return functions.wait_tensor(y)


def _fits_when_reduced(site: Site, ring: Ring, mesh: Mesh, axes: Sequence[str], op: str) -> bool:
    event = site.events[0]
    whole = event.one.values[0] if event.one and event.one.values else None
    return reduces_to(ring, event.got(), whole, mesh, axes, op)


def reduces_to(
    ring: Ring, got: Sequence[Any], whole: Any, mesh: Mesh, axes: Sequence[str], op: str
) -> bool:
    """Is it one device's, or the rank's own part of it, if it is summed or averaged?"""
    if not all(map(_is_finite, (whole, *got))) or len({x.shape for x in got}) > 1:
        return False
    done: list[Tensor | None] = list(got)
    for group in mesh.groups(axes):
        sum_ = total(ring, [got[r] for r in group])
        for r in group:
            done[r] = ring.div(sum_, ring.number(len(group))) if op == "avg" else sum_
    return is_own(ring, whole, done, mesh)


def _is_finite(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64 and bool(x.isfinite().all())


def _alike_over(ring: Ring, got: Sequence[Tensor | None], mesh: Mesh, axes: Sequence[str]) -> bool:
    """Or not there on some rank, or of other shapes: nothing to reduce."""
    for group in mesh.groups(axes):
        first, *others = (got[r] for r in group)
        if first is None or any(x is None or x.shape != first.shape for x in others):
            return True
        if any(x is not None and not same(ring, first, x) for x in others):
            return False
    return True


# -- collectives that are wrong ---


def collectives(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """Summed for averaged, averaged for summed, or not needed at all."""
    if not site.call.is_collective or not site.is_float():
        return
    name, given, got = site.place.function, site.tensors(), site.events[0].got()
    for axis, n in mesh.axes.items():
        if n == 1 or (name == "all_reduce" and not _alike_over(ring, got, mesh, [axis])):
            continue
        if "reduce" in name and "avg" in site.call.args:
            what = f'{n} times too small, the ranks of "{axis}": averaged where it should be summed'
            yield alone(
                site, what, f'"sum" in place of "avg" in {name}', _by_other("avg", "sum"), FIRST
            )
        elif "reduce" in name and "sum" in site.call.args:
            what = f'{n} times too large, the ranks of "{axis}": summed where averaged is meant'
            yield alone(
                site, what, f'"avg" in place of "sum" in {name}', _by_other("sum", "avg"), FIRST
            )
        elif "reduce" in name:
            large = f'{n} times too large, the ranks of "{axis}": '
            small = f'{n} times too small, the ranks of "{axis}": '
            because = f"reduced twice, or 1/{n} is missing"
            yield scaled(site, 1 / n, large + because, f"dividing {site.its} by {n}")
            because = "averaged where it should be summed"
            yield scaled(site, n, small + because, f"multiplying {site.its} by {n}")
    if given and given[0].shape == site.value.shape:
        yield alone(
            site,
            f"{name} is not needed: it is reduced or exchanged already",
            f"leaving out {name}",
            lambda now: now.args[0],
            POSSIBLE,
        )


def gathers(site: Site, mesh: Mesh) -> Iterator[Repair]:
    """What is gathered may be one device's, and yet what follows is made for a part."""
    name, given = site.place.function, site.tensors()
    if not site.call.is_collective or not site.is_float() or not given or not given[0].dim():
        return
    for axis, n in mesh.axes.items():
        if n > 1 and site.value.numel() == n * given[0].numel():
            yield alone(
                site,
                f'gathered over "{axis}" where each rank\'s own part is meant',
                f"leaving out {name}, so that each rank goes on with its own part",
                lambda now: now.args[0],
            )
            return


def _by_other(op: str, other: str) -> Change:
    def change(now: Now) -> Any:
        return now.run(*(other if x == op else x for x in now.args), **now.kwargs)

    return change


# -- numbers ---


def scaled(site: Site, by: float, what: str, remedy: str, likely: int = LIKELY) -> Repair:
    return alone(site, what, remedy, of_result(lambda y, now: times(y, by)), likely)


def times(y: Any, by: float) -> Any:
    return _torch.tree_map(lambda x: x * by if isinstance(x, Tensor) else x, y)


def has_number(site: Site) -> bool:
    """Is it a product or quotient with a number of Python's?"""
    is_number = any(type(x) in (int, float) for x in site.call.args)
    return site.place.function in _BY_NUMBERS and is_number


def numbers(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """A number of ranks that is missing in a product or a quotient, or in a mean."""
    if not site.is_float() or site.call.is_collective or not site.tensors():
        return
    if site.place.function in ("sum", "mean"):
        n = max(1, site.tensors()[0].numel() // max(1, site.value.numel()))
        if site.place.function == "sum" and n > 1:
            what = f"{n} times too large: summed over {n} elements where their mean is meant"
            yield scaled(site, 1 / n, what, f"dividing {site.its} by {n}")
        elif n > 1:
            what = f"{n} times too small: the mean over {n} elements where their sum is meant"
            yield scaled(site, n, what, f"multiplying {site.its} by {n}")
    if not has_number(site) and site.value.numel() > 1:
        return
    likely = LIKELY if has_number(site) else POSSIBLE
    for by, shown in _factors(mesh):
        if "sqrt" in shown and not has_number(site):
            continue
        of = "local" if by < 1 else "whole"
        what = f"{_inverse(shown)} times what it should be: by the number of the {of} instead"
        if site.place.function not in ("div", "true_divide", "__truediv__"):
            what = f"{_inverse(shown)} times what it should be"
        yield scaled(
            site,
            by,
            what,
            f"multiplying {site.its} by {shown}",
            max(likely, POSSIBLE) if "sqrt" in shown else likely,
        )


def _factors(mesh: Mesh) -> Iterator[tuple[float, str]]:
    sizes = sorted({n for n in mesh.axes.values() if n > 1} | {2})
    for n in sizes:
        yield 1 / n, f"1/{n}"
        yield n, f"{n}"
    for n in sizes:
        yield n**0.5, f"sqrt({n})"
        yield n**-0.5, f"1/sqrt({n})"


def _inverse(shown: str) -> str:
    return shown.removeprefix("1/") if shown.startswith("1/") else f"1/{shown}"


# -- added by every rank ---


def added_by_all(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """A term that is the same on all ranks, in a sum of ranks' parts; or all such terms of a loop.
    ``site``: with all its executions."""
    name = site.place.function
    if name not in ("add", "__add__", "__radd__", "linear", "addmm") or not site.is_float():
        return
    for axis, n in mesh.axes.items():
        if n == 1 or _alike_over(ring, site.events[-1].got(), mesh, [axis]):
            continue
        alike = [
            (event.execution, k)
            for event in site.events
            for k in range(2 if name == "linear" else 0, len(event.first.args))
            if k not in event.first.carried and _is_alike(ring, event.arguments(k), mesh, axis)
        ]
        for terms in [alike] if site.is_in_loop and alike else [[term] for term in alike]:
            x = site.call.args[terms[0][1]]
            it = "what all have" if site.is_in_loop else site.name_of(x) or "the term"

            def change(now: Now, n: int = n, terms: Any = terms) -> Any:
                ks = [k for i, k in terms if i == now.execution]
                once = (_part(x, n) if k in ks else x for k, x in enumerate(now.args))
                return now.run(*once, **now.kwargs)

            yield alone(
                site,
                f"each of the {n} ranks of {axis} adds {it}, so that their sum has it {n} times",
                f"adding {it} once, behind the reduction over {axis}",
                change,
            )


def _part(x: Tensor, n: int) -> Tensor:
    """One of n equal terms; behind their sum x has the whole gradient on each rank."""
    return x + (times(x, 1 / n) - x).detach()


def _is_alike(ring: Ring, given: Sequence[Any], mesh: Mesh, axis: str) -> bool:
    is_float = all(isinstance(x, Tensor) and x.is_floating_point() for x in given)
    return is_float and _alike_over(ring, given, mesh, [axis])


# -- of a part where it is of all ---


def of_all_ranks(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """Statistics of a rank's part: the same function of what all ranks have."""
    name, given = site.place.function, site.tensors()
    if name not in _OF_ALL or not given or not given[0].is_floating_point():
        return
    args = [next((x for x in c.args if isinstance(x, Tensor)), None) if c else None
            for c in site.events[0].ranks]  # fmt: skip
    for axis, n in mesh.axes.items():
        if n == 1 or _alike_over(ring, args, mesh, [axis]):
            continue
        for dim in range(given[0].dim()):
            yield alone(
                site,
                f'{name} is of this rank\'s part over "{axis}", where that of all ranks is meant',
                f"{name} of all ranks' parts: its statistics all-reduced over {axis}"
                + (" (nn.SyncBatchNorm)" if name == "batch_norm" else ""),
                lambda now, axis=axis, dim=dim: _of_gathered(now, axis, dim),  # type: ignore[misc]
                POSSIBLE,
            )


def _of_gathered(now: Now, axis: str, dim: int) -> Any:
    group, x = now.mesh[axis], now.args[0]
    if _torch.is_dtensor(x):
        return now.as_it_is()
    n, place = group.size(), group.get_local_rank()
    whole = functions.wait_tensor(functions.all_gather_into_tensor(x.contiguous(), group, dim=dim))
    out = now.run(whole, *now.args[1:], **now.kwargs)
    if isinstance(out, Tensor) and out.dim() == x.dim() and out.shape[dim] == n * x.shape[dim]:
        return out.chunk(n, dim)[place]
    return out


def _plain(x: Tensor) -> Tensor:
    with _torch.raw():
        return _torch.local_of(x).detach()
