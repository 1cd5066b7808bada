"""An order of steps and their costs -> spans on streams, exposed and hidden time, memory.

The compute stream takes its steps in order. When it reaches a start, the collective is issued and
runs on its group's stream after the one before it there; compute goes on. A wait, or any step that
needs a collective's result, blocks compute until it is there. Streams do not slow one another down.

One rank is looked at: peers are taken to be as far as it is, so the bubbles of a pipeline are not
seen.

A trace has a wait right behind each start, where eager gives an AsyncCollectiveTensor that waits at
its first use. ``waits="first use"`` is that; ``waits="in place"`` takes the order as it stands.

*Exposed* is the time that compute is blocked while a collective runs; *hidden* is the rest of its
time. If the awaited collective had to queue behind another one, that time is the other's: so no
collective is exposed longer than it takes, and the step is compute plus all that is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fcoll.costs.machine import Machine
from fcoll.costs.model import collective_us, compute_us, number
from fcoll.errors import BadOption
from fcoll.graph.steps import Step, steps_of

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
    sizes = {**getattr(trace, "sizes", {}), **(sizes or {})}
    machine = Machine.of(machine)
    run = _Run(pricing(collectives, machine, costs, sizes), lazy=waits == "first use")
    for step in steps:
        run.step(step)
    memory = run.memory(held)
    return Timeline(
        spans=tuple(run.spans),
        step_us=max((s.end_us for s in run.spans), default=0.0),
        compute_us=sum(s.us for s in run.spans if s.stream == "compute"),
        exposed_us=run.exposed,
        hidden_us={i: span.us - run.exposed[i] for i, span in run.running.items()},
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
) -> Callable[[Step], float]:
    """The time of a step. Collectives that are alike are priced once."""
    issued = {c.id: c for c in collectives}
    known: dict[Any, float] = {}

    def given(step: Step) -> float | None:
        if costs is None:
            return None
        return costs(step) if callable(costs) else costs.get(step.name)

    def price(step: Step) -> float:
        if (measured := given(step)) is not None:
            return float(measured)
        if step.kind == "wait":
            return 0.0
        if step.kind == "compute" or step.collective is None:
            return number(compute_us(step, machine), sizes)
        c = issued[step.collective]
        key = (c.op, c.bytes, c.ranks)
        if key not in known:
            cost = collective_us(c.op, len(c.ranks), c.bytes, machine, c.ranks)
            known[key] = number(cost, sizes)
        return known[key]

    return price


class _Run:
    """The state of the streams while the steps go by."""

    def __init__(self, price: Callable[[Step], float], lazy: bool) -> None:
        self.price = price
        self.lazy = lazy
        self.now = 0.0  # of the compute stream
        self.spans: list[Span] = []
        self.blocked: list[Span] = []
        self.running: dict[int, Span] = {}  # collective -> its span
        self.exposed: dict[int, float] = {}
        self.issued: dict[int, float] = {}
        self.waited: dict[int, float] = {}
        self.because: dict[int, int] = {}  # collective -> the one it had to wait for
        self.flying: dict[str, int] = {}  # step -> collective whose end its result needs
        self.last: dict[str, int] = {}  # stream -> its last collective
        self.changes: list[tuple[float, int, int]] = []  # (us, 0 free or 1 allocate, bytes)
        self.held: dict[str, int] = {}
        self.put_off: set[str] = set()  # waits

    def step(self, step: Step) -> None:
        begin = self.now
        if step.kind == "start" and step.collective is not None:
            self.block(name for name in step.inputs if name in self.put_off)
            begin, end = self.now, self.start(step, step.collective)
        elif step.kind == "wait" and self.lazy and self.first_wait(step):
            end = self.now
        else:
            self.block(step.inputs)
            begin, end = self.now, self.now + self.price(step)
            if end > begin:
                self.spans.append(Span(step.name, "compute", begin, end))
            self.now = end
        if step.out_bytes:
            self.held[step.name] = step.out_bytes
            self.changes.append((begin, 1, step.out_bytes))
        for name in step.last_use_of:
            if name in self.held:
                self.changes.append((end, 0, -self.held.pop(name)))

    def start(self, step: Step, collective: int) -> float:
        """Issue: behind the one before on its stream, and after collectives that it needs."""
        before = [self.flying[name] for name in step.inputs if name in self.flying]
        if step.stream in self.last:
            before.append(self.last[step.stream])
        begin = self.now
        for other in before:
            if self.running[other].end_us > begin:
                begin = self.running[other].end_us
                self.because[collective] = other
        span = Span(step.name, step.stream, begin, begin + self.price(step), collective)
        self.spans.append(span)
        self.running[collective] = span
        self.exposed[collective] = 0.0
        self.issued[collective] = self.now
        self.flying[step.name] = self.last[step.stream] = collective
        return span.end_us

    def first_wait(self, step: Step) -> bool:
        """Put a wait off to where its result is used; a second wait for it is such a use."""
        started = [name for name in step.inputs if name in self.flying]
        if len(started) != 1 or started[0] in self.put_off:
            return False
        self.put_off.add(step.name)
        self.flying[step.name] = self.flying[started[0]]
        return True

    def block(self, names: Iterable[str]) -> None:
        """Compute stands still until the collectives that these steps stand for are done."""
        for name in names:
            collective = self.flying.get(name)
            if collective is None:
                continue
            if (until := self.running[collective].end_us) > self.now:
                self.expose(collective, self.now, until)
                self.now = until
            self.waited.setdefault(collective, self.now)

    def expose(self, collective: int, begin: float, end: float) -> None:
        """Charge [begin, end) to the collective, and what it queued for to those before it."""
        at: int | None = collective
        pieces: list[Span] = []
        while at is not None and end > begin:
            span = self.running[at]
            low = max(begin, span.start_us)
            if end > low:
                self.exposed[at] += end - low
                pieces.append(Span(span.step, "compute", low, end, at))
                end = low
            at = self.because.get(at)
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
