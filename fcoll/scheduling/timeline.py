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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fcoll.costs.machine import Machine
from fcoll.costs.model import collective_us, compute_us, form_of, number
from fcoll.errors import BadOption, MissingSize
from fcoll.graph.steps import Step, steps_of
from fcoll.scheduling.contention import Contention, Flow, launches
from fcoll.scheduling.streams import as_streams_run

WAITS = ("in place", "first use")
Costs = Mapping[str, float] | Callable[[Step], float | None]


@dataclass(frozen=True)
class Span:
    """A step's time on a stream."""

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
    run = _Run(prices, waits == "first use", Contention.of(machine, collectives) or Contention())
    run.results = {c.id: len(c.shapes) for c in collectives}
    for step in steps:
        run.step(step)
    spans = run.finished()
    memory = run.memory(held)
    return Timeline(
        spans=spans,
        step_us=max((s.end_us for s in spans), default=0.0),
        compute_us=sum(s.us for s in spans if s.stream == "compute"),
        exposed_us=run.exposed,
        hidden_us={i: run.span_of(i).us - exposed for i, exposed in run.exposed.items()},
        issued_us=run.issued,
        waited_us=run.waited,
        blocked=tuple(run.blocked),
        memory=memory,
        peak_bytes=max((nbytes for _, nbytes in memory), default=held),
        steps=steps,
        collectives=collectives,
        machine=machine,
        rank=getattr(trace, "rank", 0),
        mesh=dict(getattr(trace, "mesh", {})),
        forms={c.id: prices.form(c) for c in collectives},
        host_waits=tuple(run.host_waits),
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
        self.machine, self.costs, self.sizes = machine, costs, sizes
        self.issued = {c.id: c for c in collectives}
        self.given: dict[int, float] = {}  # the time of collectives, where the user gave it
        self.known: dict[Any, float] = {}
        self.forms: dict[Any, str] = {}

    def __call__(self, step: Step) -> float:
        if self.costs is not None:
            given = self.costs(step) if callable(self.costs) else self.costs.get(step.name)
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


class _Run:
    """The state of the streams while the steps go by."""

    def __init__(self, price: Callable[[Step], float], lazy: bool, contention: Contention) -> None:
        self.price, self.lazy, self.contention = price, lazy, contention
        self.flow = Flow(contention.slowdown)
        self.now = 0.0  # of the compute stream
        self.host = 0.0  # when the host has issued all so far
        self.spans: list[Span | int] = []  # a collective until its end is known
        self.blocked: list[Span] = []
        self.host_waits: list[Span] = []
        self.flights: dict[int, int] = {}  # collective -> its number in the flow
        self.carried: list[tuple[int, Step]] = []  # by that number: the collective and its start
        self.exposed: dict[int, float] = {}
        self.issued: dict[int, float] = {}
        self.waited: dict[int, float] = {}
        self.flying: dict[str, int] = {}  # step -> collective whose end its result needs
        self.last: dict[str, int] = {}  # stream -> its last collective
        self.changes: list[tuple[float, int, int]] = []  # (us, 0 free or 1 allocate, bytes)
        self.frees: list[tuple[int, int]] = []  # (collective, bytes that are free at its end)
        self.held: dict[str, int] = {}
        self.put_off: set[str] = set()  # waits
        self.results: dict[int, int] = {}  # collective -> how many tensors it has one wait each for
        self.waits: Counter[int] = Counter()

    def step(self, step: Step) -> None:
        us = self.price(step)
        self.launch(step, us)
        begin = self.now
        if step.kind == "start" and step.collective is not None:
            self.block(name for name in step.inputs if name in self.put_off)
            begin = self.now
            self.start(step, step.collective, us)
        elif not (step.kind == "wait" and self.lazy and self.first_wait(step)):
            self.block(step.inputs)
            begin = self.now
            self.now = self.flow.compute(begin, us)
            if self.now > begin:
                self.spans.append(Span(step.name, "compute", begin, self.now))
        if step.out_bytes:
            self.held[step.name] = step.out_bytes
            self.changes.append((begin, 1, step.out_bytes))
        for name in step.last_use_of:
            if name in self.held:
                self.free(step, self.held.pop(name))

    def launch(self, step: Step, us: float) -> None:
        """The host issues the step's kernel; the compute stream waits for that if it is late."""
        if not self.contention.host_us or not launches(step, us):
            return
        self.host += self.contention.host_us
        if self.host > self.now:
            self.host_waits.append(Span(step.name, "compute", self.now, self.host))
            self.now = self.host

    def start(self, step: Step, collective: int, us: float) -> None:
        """Issue: behind the one before on its stream, and after collectives that it needs."""
        before = [self.flying[name] for name in step.inputs if name in self.flying]
        if step.stream in self.last:
            before.append(self.last[step.stream])
        after = [self.flights[other] for other in before]
        links = self.contention.links.get(collective, 0)
        self.flights[collective] = self.flow.issue(self.now, us, after, links)
        self.carried.append((collective, step))
        self.spans.append(collective)
        self.exposed[collective] = 0.0
        self.issued[collective] = self.now
        self.flying[step.name] = self.last[step.stream] = collective

    def free(self, step: Step, nbytes: int) -> None:
        if step.kind == "start" and step.collective is not None:
            self.frees.append((step.collective, nbytes))
        else:
            self.changes.append((self.now, 0, -nbytes))

    def finished(self) -> tuple[Span, ...]:
        """All spans, once the last flight has ended."""
        self.flow.drain()
        spans = [s if isinstance(s, Span) else self.span_of(s) for s in self.spans]
        self.changes += [(self.span_of(c).end_us, 0, -nbytes) for c, nbytes in self.frees]
        return tuple(spans)

    def span_of(self, collective: int) -> Span:
        """Of a flight that has ended."""
        flight = self.flights[collective]
        end, step = self.flow.ended[flight], self.carried[flight][1]
        assert end is not None
        return Span(step.name, step.stream, self.flow.begun[flight], end, collective)

    def first_wait(self, step: Step) -> bool:
        """Put a wait off to where its result is used; a second wait for it is such a use. A list
        has a wait for each result."""
        started = [name for name in step.inputs if name in self.flying]
        if len(started) != 1:
            return False
        collective = self.flying[started[0]]
        if started[0] in self.put_off and self.waits[collective] >= self.results.get(collective, 1):
            return False
        self.waits[collective] += 1
        self.put_off.add(step.name)
        self.flying[step.name] = collective
        return True

    def block(self, names: Iterable[str]) -> None:
        """Compute stands still until the collectives that these steps stand for are done."""
        for name in names:
            collective = self.flying.get(name)
            if collective is None:
                continue
            if (until := self.flow.until(self.flights[collective])) > self.now:
                self.expose(collective, self.now, until)
                self.now = until
            self.waited.setdefault(collective, self.now)

    def expose(self, collective: int, begin: float, end: float) -> None:
        """Charge [begin, end) to the collective, and what it queued for to those before it."""
        at: int | None = collective
        pieces: list[Span] = []
        while at is not None and end > begin:
            span = self.span_of(at)
            low = max(begin, span.start_us)
            if end > low:
                self.exposed[at] += end - low
                pieces.append(Span(span.step, "compute", low, end, at))
                end = low
            cause = self.flow.cause[self.flights[at]]
            at = None if cause is None else self.carried[cause][0]
        self.blocked.extend(reversed(pieces))

    def memory(self, held: int) -> tuple[tuple[float, int], ...]:
        """Bytes over time: what is freed at a moment is free for what is allocated then."""
        points: list[tuple[float, int]] = [(0.0, held)]
        for us, _, nbytes in sorted(self.changes):
            held += nbytes
            if points[-1][0] == us:
                points[-1] = (us, held)
            else:
                points.append((us, held))
        return tuple(points)


def what_hides(line: Timeline, collective: int, most: int = 5) -> list[tuple[str, float]]:
    """(step, us) of the compute that runs while a collective does, the longest first."""
    span = next(s for s in line.spans if s.collective == collective)
    shared = [
        (s.step, min(s.end_us, span.end_us) - max(s.start_us, span.start_us))
        for s in line.spans
        if s.stream == "compute" and s.start_us < span.end_us and s.end_us > span.start_us
    ]
    return sorted(shared, key=lambda x: -x[1])[:most]


def busy_us(spans: Iterable[Span]) -> dict[str, float]:
    """How long each stream has something to do."""
    total: dict[str, float] = {}
    for span in spans:
        total[span.stream] = total.get(span.stream, 0.0) + span.us
    return total
