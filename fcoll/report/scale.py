"""The same program on worlds of growing size: step time, bytes and exposed share of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from fcoll.costs.machine import Machine
from fcoll.costs.model import number
from fcoll.errors import BadOption, UnusedAxis
from fcoll.report.all_ranks import timeline as all_ranks
from fcoll.report.places import varying
from fcoll.scheduling.timeline import Timeline, timeline
from fcoll.tracing.fake_world import axes_asked_for
from fcoll.tracing.peers import Board
from fcoll.tracing.trace import Mode

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
    over: str = ""  # "more than the 80 GiB of h100", where it does not fit

    @property
    def exposed_share(self) -> float:
        return self.exposed_us / self.step_us if self.step_us else 0.0


class Points(list[Point]):
    """The points of one axis, in order of size. ``failed`` has those that could not be had, with
    the reason; ``print`` shows a table, and a notebook too."""

    def __init__(self, axis: str, points: Iterable[Point] = ()) -> None:
        super().__init__(points)
        self.axis = axis
        self.failed: dict[int, str] = {}

    def records(self) -> list[dict[str, Any]]:
        """A dict for each point: ``pandas.DataFrame(points.records())``."""
        return [asdict(p) | {"exposed_share": p.exposed_share} for p in self]

    def to_dict(self) -> dict[str, Any]:
        return {"axis": self.axis, "points": self.records(), "failed": dict(self.failed)}

    def __str__(self) -> str:
        from fcoll.report.scaling import render

        return render(self, self.axis, self.failed)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def scale(
    build: Build,
    axis: str,
    sizes: Iterable[int],
    *,
    mesh: Mapping[str, int] | None = None,
    machine: Machine | str | Path = "h100",
    mode: Mode = "joint",
    waits: str = "in place",
    given: Mapping[str, int] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Points:
    """Trace and time ``build(mesh)`` for each size of one axis; the other axes stay as in ``mesh``.

    The axis keeps its place if ``mesh`` has it, else it comes first. ``given`` are the values of
    sizes that only a run knows, by symbol or line. A size that fails is left out, and in
    ``.failed``; if all do, or nothing runs along the axis, it is an error.

    >>> def build(mesh):
    ...     return lambda x: fcoll.all_reduce(x @ x, "sum", mesh["tp"]), (torch.ones(64, 64),)
    >>> [(p.ranks, p.collectives) for p in fcoll.scale(build, "tp", [2, 4])]
    [(2, 1), (4, 1)]
    """
    machine = Machine.of(machine)
    points, errors, used = Points(axis), [], False
    for size in sizes:
        first = {} if axis in (mesh or {}) else {axis: size}
        axes = {**first, **(mesh or {}), axis: size}
        progress(f"{axis}={size}")
        board = Board(build, axes, mode, given or {})
        try:
            with axes_asked_for() as asked:
                point, runs_along = _timed(board, axis, machine, waits)
        except Exception as error:
            errors.append(error)
            points.failed[size] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            continue
        used = used or runs_along or axis in asked or size == 1
        points.append(point)
    if errors and not points:
        raise errors[0]
    if not used:
        raise UnusedAxis(axis=axis, size=points[-1].size)
    return points


def _timed(board: Board, axis: str, machine: Machine, waits: str) -> tuple[Point, bool]:
    """What a world takes; and does a collective of its rank 0 run along the axis?"""
    axes = dict(board.axes)
    with board.traced(0) as made:
        line = timeline(made, machine, waits=waits)
        wire_bytes = sum(number(c.wire_bytes, made.sizes) for c in line.collectives)
    point = _point(line, axes[axis], axes, wire_bytes)
    if any(c.row.is_p2p for c in line.collectives):  # a pipeline's bubbles are on all ranks
        step_us = all_ranks(
            board.build, axes, machine, waits=waits, mode=board.mode, given=board.sizes
        ).step_us
        point = replace(point, step_us=step_us, exposed_us=step_us - point.compute_us)
    groups = {c.ranks for c in line.collectives}
    return point, any(axis in varying(ranks, axes) for ranks in groups)


def _point(line: Timeline, size: int, axes: Mapping[str, int], wire_bytes: float) -> Point:
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
        wire_bytes=float(wire_bytes),
        peak_bytes=line.peak_bytes,
        collectives=len(line.collectives),
        over=line.machine.too_small_for(line.peak_bytes),
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
