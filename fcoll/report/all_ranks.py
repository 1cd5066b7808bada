"""``fcoll.timeline``: a step on all ranks of a mesh, against each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy

from fcoll.costs.machine import Machine
from fcoll.errors import BadMesh, BadOption
from fcoll.graph.issued import Issued, messages_of
from fcoll.graph.steps import Step
from fcoll.report import lanes
from fcoll.report.places import is_whole, place_of, rank_at, varying
from fcoll.scheduling.clock import Rendezvous
from fcoll.scheduling.contention import Contention
from fcoll.scheduling.rank_lines import RankLine, RankProgram, run_world
from fcoll.scheduling.streams import as_streams_run
from fcoll.scheduling.timeline import WAITS, Costs, pricing
from fcoll.tracing.equivalent_ranks import Alike, together, told_apart
from fcoll.tracing.peers import Board
from fcoll.tracing.trace import Mode
from fcoll.tracing.workers import Tracer

Build = Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]
EVERY_RANK_UP_TO = 16  # ranks; of more, those that differ along the axes that send messages


@dataclass(frozen=True)
class WorldTimeline:
    """When every rank of a mesh does what. ``print(line)`` draws a lane for each."""

    mesh: dict[str, int]
    machine: Machine
    ranks: dict[int, RankLine]
    ranks_traced: tuple[int, ...]
    phases: Mapping[int, Mapping[str, str]] = field(
        default_factory=dict, repr=False
    )  # of its steps

    @property
    def step_us(self) -> float:
        """Until the last rank is done."""
        return max((line.end_us for line in self.ranks.values()), default=0.0)

    def bubble_us(self, rank: int) -> float:
        """How long the rank's compute stream has nothing to do."""
        return self.step_us - self.ranks[rank].compute_us

    @property
    def bubble_share(self) -> float:
        """Of the time of all ranks, the part in which they compute nothing."""
        if not self.step_us:
            return 0.0
        idle = sum(map(self.bubble_us, self.ranks))
        return idle / (self.step_us * len(self.ranks))

    def __str__(self) -> str:
        return lanes.render(self)

    def _repr_html_(self) -> str:
        return lanes.notebook_html(self)

    def svg(self) -> str:
        """A picture: a lane for each rank, or for those that do the same at the same time."""
        return lanes.svg(self)

    def html(self, title: str = "step") -> str:
        """A page that needs nothing else: the picture and a table of the ranks."""
        return lanes.html(self, title)

    def to_html(self, path: str | Path, title: str = "step") -> None:
        Path(path).write_text(self.html(title))

    def as_dict(self) -> dict[str, Any]:
        """The numbers for programs: what ``fcoll timeline --json`` prints."""
        return lanes.as_dict(self)


def timeline(
    build: Build,
    mesh: Mapping[str, int],
    machine: Machine | str | Path = "h100",
    costs: Costs | None = None,
    *,
    slow: Mapping[int, float] | None = None,
    waits: str = "first use",
    mode: Mode = "joint",
    given: Mapping[str, int] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> WorldTimeline:
    """Run the programs of all ranks against each other, without processes.

    ``build(mesh)`` gives ``(fn, args)`` for the rank that the mesh is of. ``slow`` makes the
    compute of some ranks take longer: {3: 1.2}. ``costs`` are times in us that go before the
    machine's: {step name: us} or a function of a Step. Up to 16 ranks are all traced; of more,
    ranks that differ only along axes on which nobody sends messages are taken to do the same.
    A machine's ``slowdown``, ``shared_links`` and ``host_us`` count, as on one rank. ``given`` are
    the values of sizes that only a run knows, by symbol or line.

        >>> import torch, fcoll
        >>> def build(mesh):
        ...     return lambda x: fcoll.all_reduce(x @ x, "sum", mesh) + 1, (torch.ones(64, 64),)
        >>> even = fcoll.timeline(build, mesh={"tp": 4})
        >>> late = fcoll.timeline(build, mesh={"tp": 4}, slow={3: 2.0})
        >>> late.ranks[0].wait_us > even.ranks[0].wait_us  # all wait for rank 3
        True
    """
    if waits not in WAITS:
        raise BadOption(op="timeline", arg="waits", value=waits, known=WAITS)
    axes = dict(mesh)
    machine, slow = Machine.of(machine), dict(slow or {})
    for rank in slow:
        if not 0 <= rank < prod(axes.values()):
            raise BadMesh(what=f"slow rank {rank}", hint="Ranks count from 0.")
    in_order = as_streams_run if waits == "first use" else tuple
    traced = _traced(Board(build, axes, mode, given or {}), in_order, progress)
    progress("running them")
    run_for = _run_for(axes, traced, slow)
    groups = _Groups(axes, run_for)
    models = {r: _Model(rank, groups, machine, costs) for r, rank in traced.items()}
    programs = {
        r: models[_like(r, axes, traced)].on(r, slow.get(r, 1.0))
        for r in sorted({*run_for.values()})
    }
    lines = run_world(programs, lazy=waits == "first use")
    all_lines = {rank: lines[other] for rank, other in run_for.items()}
    phases = {r: models[_like(other, axes, traced)].phases for r, other in run_for.items()}
    return WorldTimeline(axes, machine, all_lines, tuple(sorted(traced)), phases)


def _run_for(
    axes: dict[str, int], traced: Mapping[int, _Traced], slow: Mapping[int, float]
) -> dict[int, int]:
    """Of each rank the one that is run for it: itself where all were traced, or where a traced one
    does not do what it was taken to do."""
    size = prod(axes.values())
    itself = {rank: rank for rank in range(size)}
    if len(traced) == size:
        return itself
    calls = [c for t in traced.values() for c in t.collectives]
    found = representatives(axes, calls, slow)
    others = {r: t for r, t in traced.items() if r != size - 1}
    as_taken = traced[size - 1].steps == traced[_like(size - 1, axes, others)].steps
    return found if found is not None and as_taken else itself


def representatives(
    axes: Mapping[str, int], calls: Iterable[Issued], slow: Mapping[int, float]
) -> dict[int, int] | None:
    """Of each rank the first that takes exactly the same time: it is as fast and meets the same
    ranks. None if that cannot be said: a group has a part of an axis. Along an axis with messages
    all differ.

    >>> representatives({"dp": 4, "tp": 2}, (), slow={5: 1.5})  # at dp=2, tp=1
    {0: 0, 1: 1, 2: 0, 3: 1, 4: 4, 5: 5, 6: 0, 7: 1}
    """
    spans: dict[tuple[int, ...], list[str]] = {}
    with_messages: set[str] = set()
    for call in calls:
        if call.ranks not in spans:
            spans[call.ranks] = varying(call.ranks, axes)
        if call.row.is_p2p:
            with_messages.update(spans[call.ranks])
    if not all(is_whole(ranks, along, axes) for ranks, along in spans.items()):
        return None
    world = Alike(axes, 0)
    speed = numpy.array([slow.get(rank, 1.0) for rank in range(world.size)])
    known = together([speed, *(world.index(axis) for axis in sorted(with_messages))])
    colours = told_apart(known, axes)
    _, first, which = numpy.unique(colours, return_index=True, return_inverse=True)
    return dict(enumerate(first[which].tolist()))


# -- which ranks are traced ---


@dataclass(frozen=True)
class _Traced:
    """What a rank does, as it was traced."""

    rank: int
    steps: tuple[Step, ...]
    collectives: tuple[Issued, ...]
    sizes: dict[str, int]


def _traced(
    board: Board, in_order: Callable[..., Any], progress: Callable[[str], None]
) -> dict[int, _Traced]:
    """All ranks of a few; of many, those at 0 on every axis but those that send messages."""
    axes = dict(board.axes)
    size = prod(axes.values())
    tracer = Tracer(partial(_trace, board, in_order))
    found: dict[int, _Traced] = {}
    todo = list(range(size)) if size <= EVERY_RANK_UP_TO else sorted({0, size - 1})
    while todo:
        for rank, made in tracer.trace(todo):
            found[rank] = made
            progress(f"traced {len(found)} of {len({*found, *todo})} ranks")
        todo = [r for r in _differing(axes, found) if r not in found] if size > len(found) else []
    return found


def _trace(board: Board, in_order: Callable[..., Any], rank: int) -> _Traced:
    with board.traced(rank) as made:
        return _Traced(rank, in_order(made.steps), made.collectives, dict(made.sizes))


def _differing(axes: dict[str, int], found: Mapping[int, _Traced]) -> Iterator[int]:
    """The ranks at 0 on all axes along which all do the same: no message was seen along them, and
    no group of a part of them."""
    calls = {(c.ranks, c.row.is_p2p) for t in found.values() for c in t.collectives}
    spans = {ranks: varying(ranks, axes) for ranks, _ in calls}
    along = {
        name
        for ranks, sends in calls
        if sends or not is_whole(ranks, spans[ranks], axes)
        for name in spans[ranks]
    }
    places = [range(n) if name in along else (0,) for name, n in axes.items()]
    for place in itertools.product(*places):
        yield rank_at(place, axes)


def _like(rank: int, axes: dict[str, int], traced: Mapping[int, Any]) -> int:
    """The traced rank that does what this one does: itself, or the one at 0 where none differ."""
    if rank in traced:
        return rank
    place = place_of(rank, axes)
    for kept in itertools.product((True, False), repeat=len(place)):
        other = rank_at([p if keep else 0 for p, keep in zip(place, kept, strict=True)], axes)
        if other in traced:
            return other
    return 0


# -- from a traced rank to all that do the same ---


class _Groups:
    """Groups as all ranks name them: what axes they span, and where they are on the others."""

    def __init__(self, axes: dict[str, int], run_for: Mapping[int, int]) -> None:
        self.axes, self.run_for = axes, run_for
        self.shapes: dict[Any, int] = {}
        self.spans: dict[tuple[int, ...], list[str]] = {}  # of the groups of traced ranks
        self.meetings: dict[Any, Rendezvous] = {}

    def of(self, ranks: tuple[int, ...], instance: int, rank: int) -> Rendezvous:
        """The group that is to this rank what ``ranks`` are to the traced one that is like it: the
        same along the axes that it spans, and where this rank is along the others."""
        if ranks not in self.spans:
            self.spans[ranks] = varying(ranks, self.axes)
        spans, here = self.spans[ranks], place_of(rank, self.axes)
        fixed = tuple(-1 if name in spans else at for name, at in zip(self.axes, here, strict=True))
        key = self._shape(ranks, spans), fixed, instance
        if key not in self.meetings:
            self.meetings[key] = Rendezvous(key, tuple(self._moved(r, fixed) for r in ranks))
        return self.meetings[key]

    def run(self, meeting: Rendezvous) -> Rendezvous:
        """The same of the ranks that are run."""
        ranks = tuple(dict.fromkeys(self.run_for[r] for r in meeting.ranks))
        return meeting if ranks == meeting.ranks else Rendezvous(meeting.key, ranks)

    def _moved(self, rank: int, fixed: tuple[int, ...]) -> int:
        place = zip(place_of(rank, self.axes), fixed, strict=True)
        return rank_at([at if stays < 0 else stays for at, stays in place], self.axes)

    def _shape(self, ranks: tuple[int, ...], spans: list[str]) -> int:
        """A number for the places of a group along the axes that it spans."""
        known = self.shapes.get(ranks)
        if known is None:
            places = (dict(zip(self.axes, place_of(r, self.axes), strict=True)) for r in ranks)
            shape = frozenset(tuple((name, p[name]) for name in spans) for p in places)
            known = self.shapes[ranks] = self.shapes.setdefault(shape, len(self.shapes))
        return known


class _Model:
    """A traced rank's program, on itself and on the ranks that are like it."""

    def __init__(
        self, traced: _Traced, groups: _Groups, machine: Machine, costs: Costs | None
    ) -> None:
        self.traced, self.groups = traced, groups
        self.contention = Contention.of(machine, traced.collectives) or Contention()
        price = pricing(traced.collectives, machine, costs, traced.sizes)
        self.us = {step.name: price(step) for step in traced.steps}
        self.phases = {step.name: step.phase for step in traced.steps}
        self.results = {c.id: len(c.shapes) for c in traced.collectives}

    def on(self, rank: int, slow: float) -> RankProgram:
        us = self.us

        def price(step: Step) -> float:
            return us[step.name] * slow if step.kind == "compute" else us[step.name]

        meetings = {c.id: list(self._meetings(c, rank)) for c in self.traced.collectives}
        return RankProgram(self.traced.steps, meetings, price, self.contention, self.results)

    def _meetings(self, call: Issued, rank: int) -> Iterator[Rendezvous]:
        group = self.groups.of(call.ranks, call.instance, rank)
        if not call.row.is_p2p:
            yield self.groups.run(group)
            return
        for sends, peer, tag in messages_of(call):
            other = group.ranks[peer]
            ends = (rank, other) if sends else (other, rank)
            yield Rendezvous((*ends, tag, call.instance), ends)
