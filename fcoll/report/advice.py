"""Advice on a step: what could be changed, and what it saves when the timeline is run again.

Nothing is a rule of thumb: every change is one that the planner makes of the step's own steps
(fcoll/scheduling/step_changes.py), priced and run; what saves nothing is not told. Each saving is
that of the change by itself: two of them may save the same time. One rank is looked at: of
messages, that the rank at the other end does the same and is as far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from fcoll.costs.machine import Machine
from fcoll.costs.model import number
from fcoll.errors import FcollError, MemoryCapTooSmall
from fcoll.graph.issued import Issued
from fcoll.graph.steps import Step
from fcoll.report.places import moved_to
from fcoll.report.summary import Row, rows
from fcoll.scheduling.planner import schedule, without_collector
from fcoll.scheduling.sequence_parallel import sharded
from fcoll.scheduling.step_changes import bucketed, prefetched
from fcoll.scheduling.step_program import StepProgram
from fcoll.scheduling.streams import freed_in_order
from fcoll.scheduling.timeline import Costs, Timeline, pricing, timeline
from fcoll.table.p2p import IRECV
from fcoll.units import show_bytes, show_us

LINES = 8  # the most exposed ones are looked at,
LEAST = 0.005  # if that much of the step, and what saves a tenth of it is told
TOP = 3


@dataclass(frozen=True)
class Advice:
    """A change, and what it saves by itself.

    ``kind`` is "prefetch", "bucket", "shard", "axis" or "plan"; ``source`` is the line that it is
    about, empty if it is the whole step. ``step_us`` is the step afterwards and ``more_bytes`` what
    its peak memory grows by.
    """

    kind: str
    what: str
    source: str
    op: str
    axis: str
    phase: str
    count: int
    saved_us: float
    share: float  # of the step, that is saved
    step_us: float
    more_bytes: int

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        memory = ""
        if abs(self.more_bytes) >= 1 << 20:
            more = "more" if self.more_bytes > 0 else "less"
            memory = f"; {show_bytes(abs(self.more_bytes))} {more} memory"
        return f"{show_us(self.saved_us)} ({self.share:.1%}) {where}{self.what}{memory}"


def advice(
    trace: Any,
    machine: Machine | str | Path = "h100",
    costs: Costs | None = None,
    *,
    waits: str = "first use",
    plan: bool = True,
) -> tuple[Advice, ...]:
    """What would make a step faster, the most first; each is the change by itself.

    ``trace`` is a Trace, or a pair (steps, collectives). For each exposed line the calls are
    started earlier, sent in buckets, or turned into reduce-scatter and all-gather, the mesh is laid
    out in another order, and (``plan``) the step is planned; then the timeline is run again.

        >>> import torch, fcoll
        >>> def step(x, w):  # the gather needs nothing of what is before it
        ...     return (x @ x).sum() + fcoll.all_gather_into_tensor(w, mesh).sum()
        >>> with fcoll.fake_world(dp=4) as mesh:
        ...     trace = fcoll.trace(step, torch.ones(4096, 4096), torch.ones(1 << 20))
        >>> best = fcoll.advice(trace)[0]
        >>> best.kind, best.saved_us > 0
        ('prefetch', True)
    """
    program = _program(trace, Machine.of(machine), costs, waits)
    with without_collector():
        told = [make() for make in _candidates(program, costs is not None, plan)]
    least = 0.1 * LEAST * program.line.step_us
    return tuple(_best([x for x in told if x is not None and x.saved_us > least]))


def _program(trace: Any, machine: Machine, costs: Costs | None, waits: str) -> StepProgram:
    """The steps with numbers for sizes and for times."""
    pair = isinstance(trace, tuple)
    steps, calls = trace if pair else (trace.steps, trace.collectives)
    sizes: Mapping[str, int] = {} if pair else trace.sizes
    graph_module = None if pair else trace.graph_module
    price = pricing(calls, machine, costs, sizes)
    us = {step.name: price(step) for step in steps}
    return StepProgram(
        steps=freed_in_order(tuple(_numbered(step, sizes) for step in steps)),
        collectives=tuple(replace(c, bytes=int(number(c.bytes, sizes))) for c in calls),
        us=us,
        machine=machine,
        waits=waits,
        mesh={} if pair else trace.mesh,
        nodes={n.name: n for n in graph_module.graph.nodes} if graph_module is not None else {},
    )


def _numbered(step: Step, sizes: Mapping[str, int]) -> Step:
    counts = step.flops, step.read_bytes, step.write_bytes
    if all(isinstance(x, (int, float)) for x in counts):
        return step
    flops, read, write = (number(x, sizes) for x in counts)
    return replace(step, flops=flops, read_bytes=read, write_bytes=write)


def _best(found: Sequence[Advice]) -> Iterator[Advice]:
    """Of each line and kind the one that saves the most (and then takes the least memory)."""
    seen = set()
    for one in sorted(found, key=lambda a: (-round(a.saved_us, 3), a.more_bytes)):
        if (key := (one.kind, one.source, one.op, one.axis, one.phase)) not in seen:
            seen.add(key)
            yield one


# -- what is tried ---

Make = Callable[[], Advice | None]


def _candidates(program: StepProgram, measured: bool, plan: bool) -> Iterator[Make]:
    exposed = [r for r in rows(program.line) if r.exposed_us >= LEAST * program.line.step_us]
    calls = {c.id: c for c in program.collectives}
    for row in exposed[:LINES]:
        mine = [calls[i] for i in row.ids]
        yield partial(_prefetch, program, row, mine)
        yield partial(_bucket, program, row, mine)
    for axis in dict.fromkeys(r.axis for r in exposed):
        first = next(r for r in exposed if r.axis == axis)
        yield partial(_shard, program, first)
    if exposed and not measured:  # what was measured was measured on these links
        yield partial(_axis, program, exposed)
    if exposed and plan:
        yield partial(_plan, program)


def _told(program: StepProgram, row: Row | None, kind: str, what: str, after: Timeline) -> Advice:
    before = program.line
    saved = before.step_us - after.step_us
    return Advice(
        kind=kind,
        what=what,
        source=row.source if row else "",
        op=row.op if row else "",
        axis=row.axis if row else "",
        phase=row.phase if row else "",
        count=row.count if row else len(program.collectives),
        saved_us=saved,
        share=saved / before.step_us,
        step_us=after.step_us,
        more_bytes=after.peak_bytes - before.peak_bytes,
    )


def _calls(row: Row) -> str:
    return f"the {row.count} {row.op} calls" if row.count > 1 else f"{row.op}"


def _peers(calls: Iterable[Issued]) -> str:
    return ", on both ranks of each message" if any(c.row.is_p2p for c in calls) else ""


def _prefetch(program: StepProgram, row: Row, calls: list[Issued]) -> Advice | None:
    """Just in time takes less memory; as early as can be only if that saves more."""
    soon = prefetched(program, calls, just_in_time=True)
    if soon is None:
        return None
    lead = max(program.compute_before_us[program.at[c.start]] - _lead(soon, c) for c in calls)
    what = f"prefetch: start {_calls(row)} up to {show_us(lead)} of compute earlier{_peers(calls)}"
    what += _by_units(program, row, calls)
    told = _told(program, row, "prefetch", what, soon.line)
    if row.exposed_us - told.saved_us > 0.05 * row.exposed_us:
        first = prefetched(program, calls, just_in_time=False)
        if first is not None and first.line.step_us < 0.99 * soon.line.step_us:
            it = "their" if row.count > 1 else "its"
            what = f"prefetch: start {_calls(row)} as soon as {it} inputs are there{_peers(calls)}"
            what += _by_units(program, row, calls)
            return _told(program, row, "prefetch", what, first.line)
    return told


def _by_units(program: StepProgram, row: Row, calls: Sequence[Issued]) -> str:
    """FSDP2 sends what its units say."""
    way = "forward" if row.phase == "fwd" else "backward"
    return f" (set_modules_to_{way}_prefetch)" if _of_fsdp2(program, calls[0]) else ""


def _of_fsdp2(program: StepProgram, call: Issued) -> bool:
    """Does it send what FSDP2 has copied together?"""
    inputs = program.steps[program.at[call.start]].inputs
    return any(program.steps[program.at[x]].op.startswith("fsdp::") for x in inputs)


def _lead(made: StepProgram, call: Issued) -> float:
    return made.compute_before_us[made.at[call.start]]


def _bucket(program: StepProgram, row: Row, calls: list[Issued]) -> Advice | None:
    made = bucketed(program, calls)
    if made is None:
        return None
    left = len(made.collectives) - (len(program.collectives) - len(calls))
    most = max(c.bytes for c in made.collectives if c.start.startswith("bucket_"))
    verb = "receive" if calls[0].row is IRECV else "send"
    what = f"bucket: {verb} {_calls(row)} as {left}, of up to {show_bytes(most)}{_peers(calls)}"
    if _of_fsdp2(program, calls[0]):  # its collectives are those of its units
        what += " (larger units: fully_shard on fewer, larger modules)"
    return _told(program, row, "bucket", what, made.line)


def _shard(program: StepProgram, row: Row) -> Advice | None:
    """All sums over an axis: what is between them is on shards only if all are."""
    calls = [c for c in program.collectives if c.label == row.axis]
    made = sharded(program, calls)
    if made is None:
        return None
    what = (
        f"shard: reduce_scatter in place of all_reduce over {row.axis}, norms and residuals on a "
        "shard of the rows, all_gather before the next product (sequence parallel)"
    )
    return _told(program, row, "shard", what, made.line)


def _axis(program: StepProgram, exposed: Sequence[Row]) -> Advice | None:
    """The best exchange of two axes."""
    best: tuple[StepProgram, list[str]] | None = None
    for one, other in combinations(program.mesh, 2):
        swap = {one: other, other: one}
        order = [swap.get(name, name) for name in program.mesh]
        made = _relaid(program, order)
        if best is None or made.line.step_us < best[0].line.step_us:
            best = made, order
    if best is None:
        return None
    made, order = best
    after = {r.ids: r for r in rows(made.line)}
    row = max(exposed, key=lambda r: r.exposed_us - after[r.ids].exposed_us)
    mesh = ", ".join(f"{name}={program.mesh[name]}" for name in order)
    what = f"axis: lay the mesh out as ({mesh}), so that {row.axis} is on other links"
    return _told(program, row, "axis", what, made.line)


def _relaid(program: StepProgram, order: Sequence[str]) -> StepProgram:
    """The mesh with its axes in another order, so that groups lie on other links."""
    calls = [
        replace(c, ranks=tuple(moved_to(r, program.mesh, order) for r in c.ranks))
        for c in program.collectives
    ]
    us = {c.start: program.model.collective(c) for c in calls}
    return replace(program, collectives=tuple(calls), us={**program.us, **us})


def _plan(program: StepProgram) -> Advice | None:
    """The step as the scheduler orders it at no more memory; buckets could save more. Plans count
    memory until the wait, so that no order may be under what the timeline counts."""
    pair = program.steps, program.collectives
    plan = None
    for cap in (program.line.peak_bytes, "+0%"):
        try:
            plan = schedule(pair, program.machine, program.us, memory_cap=cap)
            break
        except MemoryCapTooSmall:
            continue
        except FcollError:  # not every graph can be planned; there is other advice
            return None
    if plan is None:
        return None
    after = timeline((plan.timeline.steps, program.collectives), program.machine, program.us)
    what = "plan the step: inductor_ext.config.schedule, fcoll.schedule or --scheduler overlap"
    what += _peers(program.collectives)
    return _told(program, None, "plan", what, after)
