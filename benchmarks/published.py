"""The machines' prices against published times, and the fit that they come from.

A machine's constants are few (a launch, a hop, a rate, a ramp for each link and form); the points
are many. So that nobody need trust the fit, it is done again from the same neutral start on every
other point of each series, and compared with the points that it has not seen.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fcoll.costs
from fcoll.costs.machine import PRESETS, Machine
from fcoll.costs.model import collective_us
from fcoll.units import show_bytes

BAR = 0.12
#: Where every fit begins, for all machines alike: (us or a part of the data sheet's rate).
NEUTRAL = {
    "latency_us": 1.0, "message_us": 0.5, "efficiency": 0.8, "chunk_us": 5.0, "fill_us": 100.0,
    "collective_us": 8.0, "launch_us": 12.0,
}  # fmt: skip
PULL = 3e-4  # what a constant's move by a factor of e adds to the loss
FINE = 0.005  # the smallest step of a fit, as a part of the constant


@dataclass(frozen=True)
class Point:
    machine: str
    ranks: int
    op: str
    form: str
    bytes: int
    us: float
    source: str

    def predicted_us(self, machine: Machine) -> float:
        form = "" if self.form == "library" else self.form
        return float(collective_us(self.op, self.ranks, self.bytes, machine, form=form))

    def error(self, machine: Machine) -> float:
        return abs(math.log(self.predicted_us(machine) / self.us))


def points() -> list[Point]:
    """All published points, in the order of the file."""
    path = Path(fcoll.costs.__file__).parent / "published.toml"
    found = []
    for series in tomllib.loads(path.read_text())["series"]:
        pairs = series.pop("points")
        found += [Point(**series, bytes=nbytes, us=us) for nbytes, us in pairs]
    return found


def geometric(errors: Iterable[float]) -> float:
    """exp(mean |log ratio|) - 1."""
    found = list(errors)
    return math.exp(sum(found) / len(found)) - 1


# -- fit ---


def constants(machine: Machine) -> list[tuple[str, ...]]:
    """The paths of the constants that are fitted: those that the machine's file gives."""
    found: list[tuple[str, ...]] = [("collective_us",)]
    for link in ("intra", "inter"):
        names = ("latency_us", "message_us", "efficiency", "chunk_us", "fill_us")
        found += [(link, name) for name in names if _finite(getattr(getattr(machine, link), name))]
    for form, constant in machine.forms.items():
        names = ("launch_us", "gb_per_s", "chunk_us", "fill_us")
        found += [("forms", form, name) for name in names if _finite(getattr(constant, name))]
    return found


def _finite(value: float) -> bool:
    return 0 < value < math.inf


def read(machine: Machine, path: Sequence[str]) -> float:
    at: Any = machine
    for name in path:
        at = at[name] if isinstance(at, dict) else getattr(at, name)
    return float(at)


def written(at: Any, path: Sequence[str], value: float) -> Any:
    """The machine (or link, or form) with another constant."""
    name, *rest = path
    if isinstance(at, dict):
        return {**at, name: written(at[name], rest, value)}
    return replace(at, **{name: written(getattr(at, name), rest, value) if rest else value})


def neutral(machine: Machine) -> Machine:
    """The machine with nothing but its data sheet."""
    for path in constants(machine):
        value = NEUTRAL.get(path[-1], 0.5 * float(machine.intra.gb_per_s))
        machine = written(machine, path, value)
    return machine


def fit(machine: Machine, seen: Sequence[Point]) -> Machine:
    """Change one constant at a time as long as that makes the errors smaller. A constant that the
    points say nothing of stays where it is: to move one costs a little, too."""
    paths = constants(machine)
    first = [read(machine, path) for path in paths]

    def loss(candidate: Machine) -> float:
        errors = [point.error(candidate) for point in seen]
        moves = [math.log(read(candidate, p) / x) ** 2 for p, x in zip(paths, first, strict=True)]
        return sum(e + e * e for e in errors) / len(errors) + PULL * sum(moves)

    best, step = loss(machine), 0.5
    while step > FINE:
        before = best
        for path in paths:
            for factor in (1 + step, 1 / (1 + step)):
                other = written(machine, path, read(machine, path) * factor)
                if path[-1] == "efficiency" and read(other, path) > 1:
                    continue
                if (found := loss(other)) < best:
                    machine, best = other, found
        if best > before * (1 - 1e-3):
            step /= 2
    return machine


# -- tables ---


def held_out(found: Sequence[Point]) -> float:
    """The error on points that the fit has not seen: every other point, both ways round."""
    errors: list[float] = []
    for name in dict.fromkeys(p.machine for p in found):
        own = [p for p in found if p.machine == name]
        for half in (0, 1):
            made = fit(neutral(preset(name)), own[half::2])
            errors += [p.error(made) for p in own[1 - half :: 2]]
    return geometric(errors)


def left_out(found: Sequence[Point]) -> dict[tuple[str, int, str], float]:
    """The error on a whole collective of a machine's library, from a fit on its other ones."""
    errors = {}
    for kind in dict.fromkeys((p.machine, p.ranks, p.op) for p in found if p.form == "library"):
        own = [p for p in found if p.machine == kind[0] and p.form == "library"]
        rest = [p for p in own if (p.machine, p.ranks, p.op) != kind]
        if any(p.ranks == kind[1] for p in rest):  # of other numbers of ranks nothing is known
            made = fit(neutral(preset(kind[0])), rest)
            errors[kind] = geometric(p.error(made) for p in own if p not in rest)
    return errors


def preset(name: str) -> Machine:
    """The machine that comes with fcoll, whatever the user's folder has."""
    return Machine.from_toml(PRESETS / f"{name}.toml")


def compare(holding_out: bool) -> float:
    """Print predicted, published and their ratio for every point; the error over all of them."""
    found = points()
    machines = {name: preset(name) for name in dict.fromkeys(p.machine for p in found)}
    print(f"{'machine':8} {'n':>3} {'collective':24} {'form':14} {'bytes':>9} "
          f"{'predicted':>10} {'published':>10} ratio")  # fmt: skip
    by_kind: dict[tuple[str, int, str, str], list[float]] = {}
    for p in found:
        us = p.predicted_us(machines[p.machine])
        by_kind.setdefault((p.machine, p.ranks, p.op, p.form), []).append(abs(math.log(us / p.us)))
        print(f"{p.machine:8} {p.ranks:>3} {p.op:24} {p.form:14} {show_bytes(p.bytes):>9} "
              f"{us:>8.1f}us {p.us:>8.1f}us {us / p.us:5.2f}")  # fmt: skip
    print("\ngeometric-mean error: exp(mean |log ratio|) - 1")
    for (name, n, op, form), errors in by_kind.items():
        print(f"{name:8} {n:>3} {op:24} {form:14} {len(errors):>3} points {geometric(errors):6.1%}")
    for name in machines:
        errors = [e for kind, found in by_kind.items() if kind[0] == name for e in found]
        print(f"{name:8} all {len(errors):>44} points {geometric(errors):6.1%}")
    error = geometric(e for errors in by_kind.values() for e in errors)
    print(f"all {len(found)} points: {error:.1%} (bar: {BAR:.0%})")
    if holding_out:
        print(f"points that a fit on every other point has not seen: {held_out(found):.1%}")
        for (name, n, op), missed in left_out(found).items():
            print(f"{name:8} {n:>3} {op:24} from a fit without it {missed:6.1%}")
    return error


def fitted(name: str) -> str:
    """What the file of a machine would say after a fit to all of its points."""
    own = [p for p in points() if p.machine == name]
    made = fit(neutral(preset(name)), own)
    lines = [f"{'.'.join(path)} = {read(made, path):.4g}" for path in constants(made)]
    return "\n".join([*lines, f"# error {geometric(p.error(made) for p in own):.1%}"])
