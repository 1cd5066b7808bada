"""Why does a value differ? Hypotheses, tried on the values: those that make them equal are said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import Tensor

from fcoll.proving.correspondence import Mesh, own_parts
from fcoll.proving.judgement import Compared, agrees, same, total
from fcoll.proving.module_outputs import (
    GRADIENT,
    INPUT,
    OUTPUT,
    ModuleValues,
    contained,
    not_one_devices,
)
from fcoll.proving.ring import Ring
from fcoll.proving.verdict import Difference, counted

Values = list[Tensor | None]
AGREE = "agree"  # the end of a remedy after which nothing differs


@dataclass(frozen=True)
class Hypothesis:
    """What may be wrong, what would mend it, and the values if it were so mended."""

    what: str
    remedy: str
    mend: Callable[[Values], Values | None]
    is_missing: bool = False  # a reduction of partial sums


def first_of_modules(
    ring: Ring,
    one: ModuleValues,
    ranks: Sequence[ModuleValues],
    direction: str,
    scales: Sequence[int],
    mesh: Mesh,
) -> Iterator[Difference]:
    """The first input or output of a module that is wrong, if there is one. An output may well be
    partial sums, reduced behind it: of those the first is told only if there is nothing else."""
    partial = None
    single, parts = getattr(one, direction), [getattr(o, direction) for o in ranks]
    lines = {k: v for o in ranks for k, v in o.lines.items()}
    for what, name in not_one_devices(ring, single, parts, scales):
        calls = [single[what, name], *(o.get((what, name), [None]) for o in parts)]
        whole, *got = next(_unequal(ring, calls), [of_call[0] for of_call in calls])
        value = Compared(what, name or one.model, got, [None] * len(got), whole)
        value, fits = _of_module(ring, value, scales, mesh)
        told = fits.what if fits else _in_general(ring, value)
        difference = Difference(value.title, told, lines.get(name, ""), "")
        if not (what == OUTPUT and fits and fits.is_missing):
            yield difference
            return
        partial = partial or difference
    if partial is not None:
        yield partial


def _unequal(ring: Ring, calls: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """One device's and the ranks' values of the calls in which a rank has others."""
    if len({len(of_program) for of_program in calls}) == 1:
        for whole, *got in zip(*calls, strict=True):
            if not contained(ring, [x for x in got if x is not None], [whole]):
                yield [whole, *got]


def _of_module(
    ring: Ring, value: Compared, scales: Sequence[int], mesh: Mesh
) -> tuple[Compared, Hypothesis | None]:
    for n in scales:
        for want in own_parts(ring.mul(value.whole, ring.number(n)), value.got, mesh):
            value = replace(value, want=want)
            if (fits := _fitting(ring, value, mesh)) is not None:
                return value, fits
    return value, None


def differing(
    ring: Ring, wrong: Sequence[Compared], lines: dict[str, str], mesh: Mesh, gradients: int
) -> tuple[Difference, ...]:
    """All that differ; the first with what is wrong and what would mend it."""
    found: list[Difference] = []
    for value in wrong:
        fits = _fitting(ring, value, mesh)
        what = fits.what if fits else _in_general(ring, value)
        remedy = ""
        if fits and fits.remedy and value.kind.startswith("gradient") and not found:
            alike = [v for v in wrong if v.kind == value.kind]
            left = sum(not _mends(ring, fits, v) for v in alike)
            of = counted(gradients, "gradient")
            remedy = f"right after {fits.remedy}: then " + (
                f"{left} of {of} still differ" if left else f"all {of} {AGREE}"
            )
        line = lines.get(value.name, "")
        found.append(Difference(value.title, what, line, remedy))
    return tuple(found)


def _fitting(ring: Ring, value: Compared, mesh: Mesh) -> Hypothesis | None:
    return next((h for h in _hypotheses(ring, value, mesh) if _mends(ring, h, value)), None)


def _mends(ring: Ring, hypothesis: Hypothesis, value: Compared) -> bool:
    mended = hypothesis.mend(value.got)
    if mended is None:
        return False
    return agrees(ring, replace(value, got=mended))


_TARGETS = {INPUT: INPUT, OUTPUT: OUTPUT, GRADIENT: "grad"}


def _hypotheses(ring: Ring, value: Compared, mesh: Mesh) -> Iterator[Hypothesis]:
    target = _TARGETS.get(value.kind, "p.grad" if "gradient" in value.kind else "the value")
    for axes in mesh.subsets():
        shown = " and ".join(f'"{a}"' for a in axes)
        group = ", ".join(axes)
        yield Hypothesis(
            f"ranks hold partial sums over {group}: an all-reduce over {shown} is missing",
            f'fcoll.all_reduce({target}, "sum", {group})',
            lambda got, axes=axes: _reduced(ring, got, mesh, axes, mean=False),  # type: ignore[misc]
            is_missing=True,
        )
        yield Hypothesis(
            f"ranks hold values of their own over {group}: an average over {shown} is missing",
            f'fcoll.all_reduce({target}, "avg", {group})',
            lambda got, axes=axes: _reduced(ring, got, mesh, axes, mean=True),  # type: ignore[misc]
        )
    for axes in mesh.subsets():
        n = len(mesh.groups(axes)[0])
        shown = " and ".join(f'"{a}"' for a in axes)
        yield Hypothesis(
            f"{n} times too large, the ranks of {shown}: reduced twice, or 1/{n} is missing",
            f"dividing {target} by {n}",
            lambda got, n=n: _times(ring, got, Fraction(1, n)),  # type: ignore[misc]
        )
        yield Hypothesis(
            f"{n} times too small, the ranks of {shown}: averaged where it should be summed",
            f"multiplying {target} by {n}",
            lambda got, n=n: _times(ring, got, Fraction(n)),  # type: ignore[misc]
        )
    yield Hypothesis(
        "its two last dims are transposed",
        f"transposing {target}",
        lambda got: [x if x is None or x.dim() < 2 else x.mT for x in got],
    )
    if (factor := _factor(ring, value)) is not None:
        yield Hypothesis(
            f"{factor} times what it should be",
            f"multiplying {target} by {1 / factor}",
            lambda got: _times(ring, got, 1 / factor),
        )
    for axes in mesh.subsets():
        yield Hypothesis(
            f"parts lie at the wrong offset along {', '.join(axes)}",
            "",
            lambda got, axes=axes: _rotated(ring, got, value.want, mesh, axes),  # type: ignore[misc]
        )


def _reduced(ring: Ring, got: Values, mesh: Mesh, axes: Sequence[str], mean: bool) -> Values | None:
    done: Values = list(got)
    for group in mesh.groups(axes):
        parts = [x for r in group if (x := got[r]) is not None]
        if not parts:
            continue
        if len(parts) < len(group) or any(x.shape != parts[0].shape for x in parts):
            return None
        if all(same(ring, x, parts[0]) for x in parts):
            return None  # they are reduced already
        whole = total(ring, parts)
        if mean:
            whole = ring.div(whole, ring.number(len(group)))
        for r in group:
            done[r] = whole
    return done


def _times(ring: Ring, got: Values, factor: Fraction) -> Values:
    by = ring.number(float(ring.residue_of(factor)))
    return [None if x is None else ring.mul(x, by) for x in got]


def _factor(ring: Ring, value: Compared) -> Fraction | None:
    """By which simple number a rank's first element is what it should be."""
    for got, want in zip(value.got, value.want, strict=True):
        if got is None or want is None or got.shape != want.shape:
            continue
        for x, y in zip(got.flatten(), want.flatten(), strict=True):
            if bool(x.isfinite() & y.isfinite()) and float(x) % ring.p and float(y) % ring.p:
                ratio = ring.constant(float(ring.div(x, y)))
                return Fraction(ratio).limit_denominator(4096) if ratio else None
    return None


def _rotated(
    ring: Ring, got: Values, want: Values, mesh: Mesh, axes: Sequence[str]
) -> Values | None:
    """Each value is another rank's of the group: as if it lay there."""
    done: Values = list(got)
    for group in mesh.groups(axes):
        for r in group:
            x = got[r]
            others = [w for s in group if s != r and (w := want[s]) is not None]
            if x is not None and any(same(ring, x, w) for w in others):
                done[r] = want[r]
    return done


def _in_general(ring: Ring, value: Compared) -> str:
    pairs = list(zip(value.got, value.want, strict=True))
    right = [
        r for r, (g, w) in enumerate(pairs) if g is not None and w is not None and same(ring, g, w)
    ]
    if all(g is None or not bool(g.any()) for g, _ in pairs):
        return "it is zero, or not there, on all ranks"
    if right:
        return f"it is right on ranks {', '.join(map(str, right))} only"
    whole = sum(w.numel() for _, w in pairs if w is not None)
    off = sum(
        int((g != w).sum())
        for g, w in pairs
        if g is not None and w is not None and g.shape == w.shape
    )
    return f"{off} of {whole} elements differ, by no simple factor or sum"
