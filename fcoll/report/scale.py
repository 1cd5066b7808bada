"""The same program on worlds of growing size: step time, bytes and exposed share of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fcoll.costs.machine import Machine
from fcoll.errors import BadOption
from fcoll.report.world import timeline as all_ranks
from fcoll.scheduling.timeline import Timeline, timeline
from fcoll.tracing.peers import Board

Build = Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclass(frozen=True)
class Point:
    """One world: how many ranks, and what a step takes there."""

    size: int  # of the axis that grows
    ranks: int
    step_us: float
    compute_us: float
    exposed_us: float
    communication_us: float
    wire_bytes: float  # that a rank sends
    peak_bytes: int
    collectives: int

    @property
    def exposed_share(self) -> float:
        return self.exposed_us / self.step_us if self.step_us else 0.0


def scale(
    build: Build,
    axis: str,
    sizes: Iterable[int],
    *,
    mesh: Mapping[str, int] | None = None,
    machine: Machine | str | Path = "h100",
    mode: str = "joint",
    waits: str = "in place",
    progress: Callable[[str], None] = lambda text: None,
) -> list[Point]:
    """Trace and time ``build(mesh)`` for each size of one axis; the other axes stay as in ``mesh``.

    The axis keeps its place if ``mesh`` has it, else it comes first.
    """
    machine = Machine.of(machine)
    points = []
    for size in sizes:
        axes = {**({} if axis in (mesh or {}) else {axis: size}), **(mesh or {}), axis: size}
        progress(f"{axis}={size}")
        with Board(build, axes, mode).traced(0) as made:
            line = timeline(made, machine, waits=waits)
        point = _point(line, size, axes)
        if any(
            c.row.is_p2p for c in line.collectives
        ):  # the bubbles of a pipeline are on all ranks
            step_us = all_ranks(build, axes, machine, waits=waits, mode=mode).step_us
            point = replace(point, step_us=step_us, exposed_us=step_us - point.compute_us)
        points.append(point)
    return points


def _point(line: Timeline, size: int, axes: Mapping[str, int]) -> Point:
    ranks = 1
    for n in axes.values():
        ranks *= n
    return Point(
        size=size,
        ranks=ranks,
        step_us=line.step_us,
        compute_us=line.compute_us,
        exposed_us=line.exposed_total_us,
        communication_us=line.exposed_total_us + sum(line.hidden_us.values()),
        wire_bytes=float(sum(c.wire_bytes for c in line.collectives)),
        peak_bytes=line.peak_bytes,
        collectives=len(line.collectives),
    )


def sizes_from(text: str) -> list[int]:
    """
    >>> sizes_from("1..16"), sizes_from("2,6"), sizes_from("3..20")
    ([1, 2, 4, 8, 16], [2, 6], [3, 6, 12, 20])
    """
    first, dots, last = text.partition("..")
    try:
        if not dots:
            sizes = [int(x) for x in text.split(",")]
        else:
            low, high = int(first), int(last)
            sizes = [low << i for i in range(max(high, 1).bit_length()) if low << i <= high]
            sizes += [high] if sizes and sizes[-1] != high else []
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        known = "1..4096 (doubling) and 2,4,6"
        raise BadOption(op="scale", arg="sizes", value=text, known=known)
    return sizes
