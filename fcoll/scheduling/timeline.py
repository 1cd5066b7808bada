"""An order of steps and their costs -> spans on streams, exposed and hidden time, memory.

The compute stream takes its steps in order. When it reaches a start, the collective is issued and
runs on its group's stream after the one before it there; compute goes on. A wait, or any step that
needs a collective's result, blocks compute until it is there. Streams do not slow one another down,
unless the machine says so (fcoll/scheduling/contention.py); then an eager host may keep the GPU
waiting, too (``host_waits``).

One rank is looked at: peers are taken to be as far as it is, so the bubbles of a pipeline are not
seen.

A trace has a wait right behind each start, where eager gives an AsyncCollectiveTensor that waits at
its first use. ``waits="first use"`` is that, with what eager frameworks run on streams of their own
where these run it (fcoll/scheduling/streams.py); ``waits="in place"`` takes the order as it stands.

*Exposed* is the time that compute is blocked while a collective runs; *hidden* is the rest of its
time. If the awaited collective had to queue behind another one, that time is the other's: so no
collective is exposed longer than it takes, and the step is compute plus all that is exposed (plus
``host_waits``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fcoll.costs.machine import Machine
from fcoll.costs.model import collective_us, compute_us, form_of, number
from fcoll.errors import BadOption, MissingSize
from fcoll.graph.steps import Step, steps_of
from fcoll.scheduling.clock import COMPUTE, START, WAIT, RankClock, Units, alone
from fcoll.scheduling.contention import Contention, launches
from fcoll.scheduling.streams import as_streams_run

WAITS = ("in place", "first use")
Costs = Mapping[str, float] | Callable[[Step], float | None]


class Span(NamedTuple):
    """A step's time on a stream."""  # a frozen dataclass took three times as long to make

    step: str
    stream: str
    start_us: float
    end_us: float
    collective: int | None = None

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Timeline:
    """When everything runs. ``memory`` are (us, bytes held from then on)."""

    spans: tuple[Span, ...]  # those that take time
    step_us: float
    compute_us: float
    exposed_us: dict[int, float]
    hidden_us: dict[int, float]
    issued_us: dict[int, float]  # when compute issued each collective, and when it was past the
    waited_us: dict[int, float]  # first step that needs it
    blocked: tuple[Span, ...]  # times of the compute stream, with what it waits for
    memory: tuple[tuple[float, int], ...]
    peak_bytes: int
    steps: tuple[Step, ...]
    collectives: tuple[Any, ...]
    machine: Machine
    rank: int = 0
    mesh: dict[str, int] = field(default_factory=dict)
    forms: dict[int, str] = field(default_factory=dict)  # that each was priced by
    host_waits: tuple[Span, ...] = ()  # times of the compute stream that nothing was issued for

    @property
    def exposed_total_us(self) -> float:
        return sum(self.exposed_us.values())

    @property
    def exposed_share(self) -> float:
        return self.exposed_total_us / self.step_us if self.step_us else 0.0

    @cached_property
    def by_step(self) -> dict[str, Step]:
        return {step.name: step for step in self.steps}

    @cached_property
    def issued(self) -> dict[int, Any]:
        return {c.id: c for c in self.collectives}

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """ "compute" first, then the groups in the order of their first collective."""
        return ("compute", *dict.fromkeys(s.stream for s in self.spans if s.stream != "compute"))


def timeline(
    trace: Any,
    machine: Machine | str | Path = "h100",
    costs: Costs | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    waits: str = "in place",
) -> Timeline:
    """Run a trace's steps on a machine.

    ``trace`` is a Trace, or a pair (steps, collectives). ``costs`` are times in us that go before
    the model: {step name: us}, or a function of a Step that gives None where it knows nothing.
    ``sizes`` are the values of symbolic sizes, by name. ``waits``: "in place" or "first use".
    """
    if waits not in WAITS:
        raise BadOption(op="timeline", arg="waits", value=waits, known=WAITS)
    steps, collectives, held = _parts(trace, sizes)
    if waits == "first use":
        steps = as_streams_run(steps)
    sizes = {**getattr(trace, "sizes", {}), **(sizes or {})}
    machine = Machine.of(machine)
    prices = pricing(collectives, machine, costs, sizes)
    results = {c.id: len(c.shapes) for c in collectives}
    contention = Contention.of(machine, collectives)
    read = StepUnits(steps, prices, waits == "first use", results, contention)
    rank = alone(read.units, range(len(steps)), read.waits_first)
    flights = flight_spans(steps, rank)
    spans = tuple(dict(sorted((compute_spans(steps, rank) | flights).items())).values())
    id_of = {u: span.collective or 0 for u, span in flights.items()}
    pieces = [(u, Span(steps[u].name, "compute", a, b, id_of[u])) for u, a, b in rank.exposed()]
    exposed = dict.fromkeys(id_of.values(), 0.0)
    for u, piece in pieces:
        exposed[id_of[u]] += piece.us
    memory = _memory(steps, rank, held)
    return Timeline(
        spans=spans,
        step_us=max((s.end_us for s in spans), default=0.0),
        compute_us=sum(s.us for s in spans if s.stream == "compute"),
        exposed_us=exposed,
        hidden_us={id_of[u]: span.us - exposed[id_of[u]] for u, span in flights.items()},
        issued_us={id_of[u]: rank.begins[u] for u in flights},
        waited_us={id_of[u]: us for u, us in rank.waited.items()},
        blocked=tuple(piece for _, piece in pieces),
        memory=memory,
        peak_bytes=max((nbytes for _, nbytes in memory), default=held),
        steps=steps,
        collectives=collectives,
        machine=machine,
        rank=getattr(trace, "rank", 0),
        mesh=dict(getattr(trace, "mesh", {})),
        forms={c.id: prices.form(c) for c in collectives},
        host_waits=late_spans(steps, rank),
    )


def _parts(
    trace: Any, sizes: Mapping[str, int] | None
) -> tuple[tuple[Step, ...], tuple[Any, ...], int]:
    if isinstance(trace, tuple):
        return tuple(trace[0]), tuple(trace[1]), 0
    if sizes and trace.graph_module is not None:
        known = {**trace.sizes, **sizes}
        steps = steps_of(trace.graph_module, trace.collectives, sizes=known)
        return steps, trace.collectives, trace.input_bytes
    return trace.steps, trace.collectives, getattr(trace, "input_bytes", 0)


def pricing(
    collectives: Sequence[Any],
    machine: Machine,
    costs: Costs | None,
    sizes: Mapping[str, int] | None,
) -> Prices:
    """The time of a step. Collectives that are alike are priced once."""
    return Prices(collectives, machine, costs, sizes)


class Prices:
    """What steps cost: what the user gives, else what the machine's model says."""

    def __init__(
        self,
        collectives: Sequence[Any],
        machine: Machine,
        costs: Costs | None,
        sizes: Mapping[str, int] | None,
    ) -> None:
        if not (costs is None or callable(costs) or isinstance(costs, Mapping)):
            known = "{node name: us}, a function of a Step"
            raise BadOption(op="schedule", arg="costs", value=costs, known=known)
        self.machine, self.sizes = machine, sizes
        self.by_name = costs if isinstance(costs, Mapping) else {}
        self.by_step = costs if callable(costs) else None
        self.issued = {c.id: c for c in collectives}
        self.given: dict[int, float] = {}  # the time of collectives, where the user gave it
        self.known: dict[Any, float] = {}
        self.forms: dict[Any, str] = {}

    def __call__(self, step: Step) -> float:
        given = self.by_step(step) if self.by_step else self.by_name.get(step.name)
        if given is not None:
            us = _time(step, given)
            if step.kind == "start" and step.collective is not None:
                self.given[step.collective] = us
            return us
        if step.kind == "wait":
            return 0.0
        if step.kind == "compute" or step.collective is None:
            return number(compute_us(step, self.machine), self.sizes)
        return self.collective(self.issued[step.collective])

    def collective(self, c: Any) -> float:
        key = (c.op, c.bytes, c.ranks)
        if key not in self.known:
            cost = collective_us(c.op, len(c.ranks), c.bytes, self.machine, c.ranks)
            self.known[key] = number(cost, self.sizes)
        return self.known[key]

    def form(self, c: Any) -> str:
        """The form that a collective was priced by; "given" if the user gave it another time."""
        key = (c.op, c.bytes, c.ranks)
        try:
            if self.given.get(c.id) not in (None, self.collective(c)):
                return "given"
            if key not in self.forms:
                nbytes = number(c.bytes, self.sizes)
                self.forms[key] = form_of(c.op, len(c.ranks), nbytes, self.machine, c.ranks)
        except MissingSize:  # only of one whose time was given
            return "given"
        return self.forms[key]


def _time(step: Step, given: Any) -> float:
    """What a user gives as a time; an order by times that are none would have no end."""
    try:
        us = float(given)
    except (TypeError, ValueError):
        us = math.nan
    if not 0.0 <= us < math.inf:
        raise BadOption(op=step.name, arg="costs", value=given, known="us, 0 or more, and None")
    return us


# -- from steps to units and back ---


class StepUnits:
    """Steps as the clock takes them: a unit each, in their order. ``lazy``: waits are put off to
    where the result is used; ``results`` are how many tensors each collective has a wait for."""

    def __init__(
        self,
        steps: Sequence[Step],
        price: Callable[[Step], float],
        lazy: bool,
        results: Mapping[int, int],
        contention: Contention | None,
    ) -> None:
        self.lazy, self.results = lazy, results
        self.flying: dict[str, int] = {}  # step -> the start whose end its result needs
        self.put_off: set[str] = set()  # waits
        self.waits: dict[int, int] = {}  # start -> how many waits for it may still be put off
        self.waits_first: dict[int, list[int]] = {}  # starts of such results block compute
        streams = list(dict.fromkeys(s.stream for s in steps if s.kind == "start"))
        number = {name: i for i, name in enumerate(streams)}
        self.units = units = Units(
            kind=[], us=[], stream=[], flights=[], streams=streams, contention=contention
        )
        for u, step in enumerate(steps):
            us = price(step)
            kind, flights = self.read(step, u)
            units.kind.append(kind)
            units.us.append(0.0 if kind == WAIT else us)
            units.stream.append(number[step.stream] if kind == START else -1)
            units.flights.append(flights)
            if contention is not None:
                carried = step.collective if kind == START else None
                units.links.append(0 if carried is None else contention.links.get(carried, 0))
                units.launches.append(launches(step, us))

    def read(self, step: Step, u: int) -> tuple[int, list[int]]:
        """What kind of unit it is, and the starts that it needs."""
        flying = self.flying
        flights = [flying[name] for name in step.inputs if name in flying]
        if step.kind == "start" and step.collective is not None:
            if first := [flying[name] for name in step.inputs if name in self.put_off]:
                self.waits_first[u] = first
            flying[step.name] = u
            self.waits[u] = self.results.get(step.collective, 1)
            return START, flights
        if step.kind == "wait" and self.lazy and self.is_put_off(step, flights):
            return WAIT, []
        return COMPUTE, flights

    def is_put_off(self, wait: Step, flights: list[int]) -> bool:
        """A second wait for a collective is a use of it. A list has a wait for each result."""
        again = not self.put_off.isdisjoint(wait.inputs)
        if len(flights) != 1 or (again and self.waits[flights[0]] <= 0):
            return False
        (start,) = flights
        self.waits[start] -= 1
        self.put_off.add(wait.name)
        self.flying[wait.name] = start
        return True


def compute_spans(steps: Sequence[Step], rank: RankClock) -> dict[int, Span]:
    """Of the steps that take time on the compute stream, by position."""
    times = enumerate(zip(steps, rank.begins, rank.ends, rank.units.kind, strict=True))
    return {
        u: Span(step.name, "compute", begin, end)
        for u, (step, begin, end, kind) in times
        if kind != START and end > begin
    }


def flight_spans(steps: Sequence[Step], rank: RankClock) -> dict[int, Span]:
    """Of the collectives, by the position of their start."""
    return {
        u: Span(steps[u].name, steps[u].stream, *rank.flight(u), steps[u].collective)
        for u in rank.tasks
    }


def late_spans(steps: Sequence[Step], rank: RankClock) -> tuple[Span, ...]:
    """When compute waited for the host."""
    return tuple(Span(steps[u].name, "compute", a, b) for u, a, b in rank.late)


def _memory(steps: Sequence[Step], rank: RankClock, held: int) -> tuple[tuple[float, int], ...]:
    """Bytes over time: what is freed at a moment is free for what is allocated then. What only a
    collective uses is free when that ends."""
    changes: list[tuple[float, int, int]] = []  # (us, 0 free or 1 allocate, bytes)
    sizes: dict[str, int] = {}
    for step, begin, end in zip(steps, rank.begins, rank.ends, strict=True):
        if step.out_bytes:
            sizes[step.name] = step.out_bytes
            changes.append((begin, 1, step.out_bytes))
        if step.last_use_of:
            freed = [sizes.pop(name) for name in step.last_use_of if name in sizes]
            changes += [(end, 0, -nbytes) for nbytes in freed]
    points: list[tuple[float, int]] = [(0.0, held)]
    for us, _, nbytes in sorted(changes):
        held += nbytes
        if points[-1][0] == us:
            points[-1] = (us, held)
        else:
            points.append((us, held))
    return tuple(points)


def busy_us(spans: Iterable[Span]) -> dict[str, float]:
    """How long each stream has something to do."""
    total: dict[str, float] = {}
    for span in spans:
        total[span.stream] = total.get(span.stream, 0.0) + span.us
    return total
