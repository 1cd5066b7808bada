"""Are the ranks' values those of one device? Without tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fcoll.proving.correspondence import Layout, Mesh
from fcoll.proving.exact_mode import Refused
from fcoll.proving.program import Observation
from fcoll.proving.ring import Ring


@dataclass(frozen=True)
class Compared:
    """One value of the program: what each rank has, and what it should have. None where a rank
    holds no part of it."""

    kind: str  # "loss", "gradient", "updated parameter"
    name: str
    got: list[Tensor | None]
    want: list[Tensor | None]
    whole: Tensor  # one device's

    @property
    def title(self) -> str:
        return self.name if self.kind == "loss" else f"{self.kind} of {self.name}"


def same(ring: Ring, x: Tensor, y: Tensor) -> bool:
    """Equal residues. A logarithm is known modulo p^2 only."""
    if x.shape != y.shape:
        return False
    if torch.equal(x, y):
        return True
    if not x.is_floating_point() or not ring.took_log:
        return False
    if not bool((x.isfinite() & y.isfinite()).all()):
        return False
    return bool(((x - y) % ring.p2 == 0).all())


def agrees(ring: Ring, value: Compared) -> bool:
    pairs = zip(value.got, value.want, strict=True)
    return all(want is None or (got is not None and same(ring, got, want)) for got, want in pairs)


def differ_alike(wrong: Sequence[Compared], again: Sequence[Compared]) -> bool:
    """Does any element differ in both of two trials?"""
    found = {value.title: _differing(value) for value in again}
    return any(
        bool((x & y).any())
        for value in wrong
        for x, y in zip(_differing(value), found.get(value.title, ()), strict=False)
        if x.shape == y.shape
    )


def _differing(value: Compared) -> list[Tensor]:
    """Of each rank."""
    return [
        torch.tensor(want is not None)
        if got is None or want is None or got.shape != want.shape
        else got != want
        for got, want in zip(value.got, value.want, strict=True)
    ]


def gradients_and_parameters(
    one: Observation, ranks: Sequence[Observation], layout: Layout
) -> tuple[list[Compared], list[Compared]]:
    """In the order in which a backward pass comes to them: a fault shows where it enters."""
    names = list(one.parameters)[::-1]
    counts = {len(o.gradients) for o in (one, *ranks)}
    if len(counts) > 1:
        raise Refused(f"optimizers stepped {sorted(counts)} times on different ranks")
    gradients = []
    rounds = counts.pop()
    for k in range(rounds):
        step = f" (step {k + 1})" if rounds > 1 else ""
        for name in names:
            got = [o.gradients[k].get(name) for o in ranks]
            full = one.gradients[k].get(name)
            if full is None and all(x is None for x in got):
                continue
            full = torch.zeros_like(one.parameters[name]) if full is None else full
            gradients.append(_compared(f"gradient{step}", name, got, full, layout, zero=True))
    parameters = []
    for name in names:
        got = [o.parameters.get(name) for o in ranks]
        parameters.append(_compared("updated parameter", name, got, one.parameters[name], layout))
    return gradients, parameters


def _compared(
    kind: str,
    name: str,
    got: list[Tensor | None],
    full: Tensor,
    layout: Layout,
    zero: bool = False,
) -> Compared:
    index = [i.get(name) for i in layout.index]
    want = [None if i is None else full.flatten()[i] for i in index]
    if zero:  # no gradient is a gradient of zeros
        got = [
            torch.zeros_like(w) if g is None and w is not None else g
            for g, w in zip(got, want, strict=True)
        ]
    return Compared(kind, name, got, want, full)


# -- results: ranks that have other data may each have a part of them ---


def results(
    ring: Ring, one: Observation, ranks: Sequence[Observation], mesh: Mesh, data: Sequence[str]
) -> Iterator[tuple[Compared, str]]:
    """Each result of the step, as it compares: how it is read, or empty if in no way."""
    for name, want in one.outputs.items():
        got = [o.outputs.get(name) for o in ranks]
        value = Compared("loss", name, got, [x if x is None else want for x in got], want)
        if all(x is None for x in got):  # where only some have it, as the last stage: theirs
            raise Refused(f"the step's {name} is not there on any rank")
        yield value, _reading(ring, got, want, mesh, data)


def _reading(
    ring: Ring, of_ranks: list[Tensor | None], want: Tensor, mesh: Mesh, data: Sequence[str]
) -> str:
    got = {r: x for r, x in enumerate(of_ranks) if x is not None}
    if all(same(ring, x, want) for x in got.values()):
        return "the same on all ranks"
    for axes in mesh.subsets(data):
        shown = ", ".join(axes)
        members = [group for group in mesh.groups(axes) if not got.keys().isdisjoint(group)]
        if any(r not in got for group in members for r in group):
            continue
        groups = [[got[r] for r in group] for group in members]
        for dim in range(want.dim()):
            if all(_fits(ring, parts, want, dim) for parts in groups):
                return f"cut over {shown} along dim {dim}"
        other = any(x.shape != want.shape for x in got.values())
        is_count = bool(ring.counts(want)[0].all())  # of tokens: ranks may have as many
        if other or (all(_alike(ring, g) for g in groups) and not is_count):
            continue  # the same on all ranks is no part of a sum: it is the result, and wrong
        sums = [total(ring, parts) for parts in groups]
        if all(same(ring, x, want) for x in sums):
            return f"the sum over {shown}"
        n = ring.number(len(groups[0]))
        if all(same(ring, ring.div(x, n), want) for x in sums):
            return f"the mean over {shown}"
    return ""


def _alike(ring: Ring, parts: Sequence[Tensor]) -> bool:
    return all(same(ring, x, parts[0]) for x in parts)


def _fits(ring: Ring, parts: Sequence[Tensor], want: Tensor, dim: int) -> bool:
    shapes = {(*x.shape[:dim], *x.shape[dim + 1 :]) for x in parts}
    rest = (*want.shape[:dim], *want.shape[dim + 1 :])
    if shapes != {rest} or any(x.dim() != want.dim() for x in parts):
        return False
    return same(ring, torch.cat(list(parts), dim), want)


def total(ring: Ring, parts: Sequence[Tensor]) -> Tensor:
    done = parts[0]
    for x in parts[1:]:
        done = ring.add(done, x)
    return done
