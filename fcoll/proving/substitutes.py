"""One device's values in place of a call's, or of the gradient of its result: the first that mends
the step is where it goes wrong. How the values differ says what to look for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fcoll.proving import _torch
from fcoll.proving.correspondence import Mesh, own_parts
from fcoll.proving.judgement import same
from fcoll.proving.lines import Now, RecordedCall
from fcoll.proving.repairs import (
    MISSING,
    Repair,
    Site,
    alone,
    group_of,
    in_its_place,
    reduced,
    reduces_to,
)
from fcoll.proving.ring import Ring
from fcoll.proving.suspects import scales_of

OWN = "each rank's own part of what one device has"
Values = list[Tensor | None]
Wants = dict[tuple[int, int], Values]  # of a rank and an execution: the values of all results


# -- results ---


def one_devices(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """Each execution that one device makes, too, gives what it gives there."""
    wants: Wants = {}
    for event in site.events:
        if event.one is None or event.first.is_backward:
            return
        for k, whole in enumerate(event.one.values):
            got = [_at(c, k) for c in event.ranks]
            if whole.dtype != event.first.values[k].dtype if k < len(event.first.values) else True:
                return
            want = next(own_parts(whole, got, mesh), None)
            if want is None:
                return
            for rank, x in enumerate(want):
                wants.setdefault((rank, event.execution), []).append(x)
    if not wants:
        return

    def change(now: Now) -> Any:
        y, want = now.as_it_is(), iter(wants.get((now.rank, now.execution), ()))
        other = _torch.tree_map(lambda x: _given(x, next(want, None)), y)
        return in_its_place(y, other, now.run.__name__)

    what = f"it is not one device's, but what it is made of is: {_relation(ring, site, mesh)}"
    yield alone(site, what, f"{OWN} as {site.its}", change)


def _at(call: RecordedCall | None, k: int) -> Tensor | None:
    return call.values[k] if call is not None and k < len(call.values) else None


def _given(x: Any, want: Tensor | None) -> Any:
    if not isinstance(x, Tensor) or want is None or _torch.is_dtensor(x) or x.shape != want.shape:
        return x
    return _Given.apply(x, want)


class _Given(torch.autograd.Function):
    """Another value, with the gradient of this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, want: Tensor) -> Tensor:  # type: ignore[override]
        with _torch.raw():
            return want.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


# -- gradients of results ---


def gradients(site: Site, ring: Ring, mesh: Mesh) -> Iterator[Repair]:
    """The gradient of a result, reduced if that makes it one device's; else one device's."""
    event = site.events[0]
    whole = event.one.gradients[0] if event.one and event.one.gradients else None
    got = event.gradients()
    if whole is None or any(x is None for x in got):
        return
    its = f"the gradient of {site.its}"
    for n in scales_of(mesh):
        scaled = ring.mul(whole, ring.number(float(ring.residue_of(Fraction(n)))))
        for axes in mesh.subsets():
            for op in ("sum", "avg"):
                if reduces_to(ring, got, scaled, mesh, axes, op):
                    yield _of_gradient(
                        site,
                        MISSING[op].format(*group_of(axes)),
                        f'fcoll.all_reduce({its}, "{op}", {", ".join(axes)})',
                        lambda g, now, op=op, axes=axes: reduced(g, op, axes, now),  # type: ignore[misc]
                    )
        for want in own_parts(scaled, got, mesh):
            yield _of_gradient(
                site,
                f"it is not one device's, but those behind it are: {_difference(ring, got, want)}",
                f"{OWN} as {its}" + (f", times {n}" if n != 1 else ""),
                lambda g, now, want=want: _given(g, want[now.rank]),  # type: ignore[misc]
            )


def _of_gradient(
    site: Site, what: str, remedy: str, change: Callable[[Tensor, Now], Tensor]
) -> Repair:
    def hooked(now: Now) -> Any:
        y = now.as_it_is()
        x = y[0] if isinstance(y, (tuple, list)) else y
        if x.requires_grad and not x.is_leaf:
            x.register_hook(lambda g: None if g is None else change(g, now))
        return y

    return Repair(site.place, what, remedy, {site.place: hooked}, of="gradient of the result")


# -- how values differ ---


def _relation(ring: Ring, site: Site, mesh: Mesh) -> str:
    for event in site.events:
        for k, whole in enumerate(event.one.values if event.one else ()):
            got = [_at(c, k) for c in event.ranks]
            want = next(own_parts(whole, got, mesh))
            if not _are_same(ring, got, want):
                return _difference(ring, got, want)
    return "it differs in its gradient"


def _difference(ring: Ring, got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> str:
    """In words: another rank's part, another order, so much more, or where."""
    pairs = [(r, g, w) for r, (g, w) in enumerate(zip(got, want, strict=True))
             if g is not None and w is not None]  # fmt: skip
    whose = [next((s for s, _, w in pairs if same(ring, g, w)), None) for _, g, _ in pairs]
    if all(s is not None for s in whose):
        parts = ", ".join(str(s) for s in whose)
        return f"ranks {', '.join(str(r) for r, _, _ in pairs)} have the parts of ranks {parts}"
    if all(_is_integer(g) for _, g, _ in pairs):
        steps = [(w - g).unique() for _, g, w in pairs]
        if all(len(x) == 1 for x in steps):
            by = ", ".join(str(int(x)) for x in steps)
            return f"{by} must be added on ranks {', '.join(str(r) for r, _, _ in pairs)}"
    for _, g, w in pairs:
        if same(ring, g, w):
            continue
        if not g.is_complex() and same(ring, g.flatten().sort()[0], w.flatten().sort()[0]):
            return "the right elements in another order"
        off = (g != w) & ~((g - w) % ring.modulus == 0) if g.is_floating_point() else g != w
        for dim in range(g.dim()):
            others = [d for d in range(g.dim()) if d != dim]
            at = off.any(others) if others else off
            places = at.nonzero().flatten().tolist()
            if g.shape[dim] > 1 and places in ([0], [g.shape[dim] - 1]):
                end, neighbour = ("first", "previous") if places == [0] else ("last", "next")
                border = f"at the border to the {neighbour} rank's part"
                return f"only the {end} along dim {dim} differs, {border}"
        return f"{int(off.sum())} of {off.numel()} elements differ"
    return "it differs"


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _are_same(ring: Ring, got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> bool:
    return all(g is None or w is None or same(ring, g, w) for g, w in zip(got, want, strict=True))
