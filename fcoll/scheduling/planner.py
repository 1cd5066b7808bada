"""``fcoll.schedule``: a trace or a graph -> a verified plan."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from fcoll.costs.machine import Machine
from fcoll.errors import BadOption, BadPlan, MemoryCapTooSmall
from fcoll.graph.issued import Issued, collectives_of
from fcoll.graph.steps import Step, input_bytes, sizes_of, steps_of
from fcoll.scheduling import schedulers as _schedulers  # noqa: F401  they register themselves
from fcoll.scheduling.bounds import Outcome
from fcoll.scheduling.changes import Change, Priced, changes
from fcoll.scheduling.contention import Contention
from fcoll.scheduling.node_order import node_order
from fcoll.scheduling.overlap import Overlap
from fcoll.scheduling.plan import Plan, verify_plan
from fcoll.scheduling.problem import problem_of
from fcoll.scheduling.registry import Entry, Job, Scheduler, scheduler_of
from fcoll.scheduling.timeline import Costs, pricing
from fcoll.units import show_bytes

_NEVER = float("inf")
CHANGES_UP_TO = 6000  # units: each proposal is planned anew


def schedule(
    trace: Any,
    machine: Machine | str | Path = "h100",
    costs: Costs | None = None,
    *,
    memory_cap: int | str | None = "+0%",
    scheduler: str | Scheduler = "overlap",
    sizes: Mapping[str, int] | None = None,
    buckets: bool | None = None,
    splits: bool | None = None,
) -> Plan:
    """Order a program's compute and communication so that it takes the least time.

    ``trace`` is a Trace, any FX GraphModule with ``meta["val"]`` (fcoll or ``_c10d_functional``
    ops), or a pair (steps, collectives). ``costs`` are times in us that go before the machine's
    model: {node name: us}, or a function of a Step that gives None where it knows nothing; with
    them every node is a kernel of its own. ``memory_cap`` is in bytes, or relative to the order
    that came in ("+0%", "+5%"), or None. ``scheduler`` is a name or a function: Steps in, names
    out.

    ``buckets``: may small collectives be sent as one, where that is faster? ``splits``: may large
    ones, and the products around them, be run in chunks? By default yes, but with {node name: us},
    which says nothing of the nodes that come of it. With True these get prices that follow from
    the given ones (changes.py), so that ``plan.order`` has nodes that the graph had not.

    The plan is verified. It depends on nothing but these arguments: ranks that pass the same ones
    get the same plan, so prices must not be measured on each rank by itself.

        >>> import torch, fcoll
        >>> with fcoll.fake_world(tp=4) as mesh:
        ...     x = torch.ones(64, 64)
        ...     program = lambda x: (fcoll.all_reduce(x @ x, "sum", mesh), (x + 1) @ x)
        ...     plan = fcoll.schedule(fcoll.trace(program, x), memory_cap=None)
        >>> plan.makespan_us <= plan.original_us
        True
    """
    machine, entry = Machine.of(machine), scheduler_of(scheduler)
    allowed = entry.buckets and not isinstance(costs, Mapping)
    buckets = allowed if buckets is None else buckets and entry.buckets
    splits = allowed if splits is None else splits and entry.buckets
    with without_collector():
        return _schedule(trace, machine, costs, memory_cap, entry, sizes, buckets, splits)


@contextmanager
def without_collector() -> Iterator[None]:
    """Planning makes many small objects and no cycles: the garbage collector would look through
    all of torch again and again (a third of the time at 10,000 nodes)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _schedule(
    trace: Any,
    machine: Machine,
    costs: Costs | None,
    memory_cap: int | str | None,
    entry: Entry,
    sizes: Mapping[str, int] | None,
    buckets: bool,
    splits: bool,
) -> Plan:
    by_name = costs if isinstance(costs, Mapping) else None
    program = _read(trace, sizes, costs is None, by_name or {})
    job = _job(program, machine, costs)
    cap = _cap_bytes(memory_cap, job.original.peak_bytes) if entry.keeps_cap else None
    job.cap_bytes = _NEVER if cap is None else cap
    plan = _plan(job, entry, cap, program, machine)
    verify_plan(plan)
    if program.graph_module is None or job.problem.n > CHANGES_UP_TO or not (buckets or splits):
        return plan
    base = Priced(Change(program.graph_module, (), (), by_name), job, program.collectives)
    again = _Again(plan, program, machine, costs)
    for change in changes(base, machine, again.read, buckets, splits):
        again.plan(change, entry)
    return again.best


def _job(program: _Program, machine: Machine, costs: Costs | None) -> Job:
    price = pricing(program.collectives, machine, costs, program.sizes)
    us = {step.name: price(step) for step in program.steps}
    contention = Contention.of(machine, program.collectives)
    problem = problem_of(program.steps, lambda step: us[step.name], program.held_bytes, contention)
    return Job.of(problem, us, _NEVER, program.graph_module)


class _Again:
    """Plans changed graphs under the cap and by the prices of a plan; ``best`` is the fastest."""

    def __init__(
        self, plan: Plan, program: _Program, machine: Machine, costs: Costs | None
    ) -> None:
        self.best, self.program, self.machine, self.costs = plan, program, machine, costs
        self.known: dict[int, tuple[Change, _Program, Job]] = {}

    def read(self, change: Change) -> Priced:
        costs = self.costs if change.costs is None else change.costs
        program = _read(change.graph_module, self.program.sizes, costs is None, change.costs or ())
        job = _job(program, self.machine, costs)
        self.known[id(change)] = change, program, job
        return Priced(change, job, program.collectives)

    def plan(self, change: Change, entry: Entry) -> None:
        if id(change) not in self.known:
            self.read(change)
        _, program, job = self.known[id(change)]
        before = self.best
        job.cap_bytes = _NEVER if before.cap_bytes is None else before.cap_bytes
        try:
            made = _plan(job, entry, before.cap_bytes, program, self.machine)
        except MemoryCapTooSmall:
            return
        if made.makespan_us < before.makespan_us:
            self.best = replace(
                made,
                buckets=change.buckets,
                splits=change.splits,
                original_us=before.original_us,
                original_peak_bytes=before.original_peak_bytes,
                source=self.program.graph_module,
            )
            verify_plan(self.best)


@dataclass(frozen=True)
class _Program:
    """What is planned."""

    steps: tuple[Step, ...]
    collectives: tuple[Issued, ...]
    held_bytes: int
    sizes: Mapping[str, int]
    graph_module: GraphModule | None


def _read(
    trace: Any, sizes: Mapping[str, int] | None, fuse: bool, priced: Collection[str]
) -> _Program:
    if isinstance(trace, tuple):
        return _Program(tuple(trace[0]), tuple(trace[1]), 0, sizes or {}, None)
    if isinstance(trace, GraphModule):
        collectives = collectives_of(trace)
        known = {**sizes_of(trace), **(sizes or {})}
        steps = steps_of(trace, collectives, sizes=known, fuse=fuse, priced=priced)
        return _Program(steps, collectives, input_bytes(trace), known, trace)
    known = {**trace.sizes, **(sizes or {})}
    steps = trace.steps
    if trace.graph_module is not None and (sizes or not fuse):
        steps = steps_of(
            trace.graph_module, trace.collectives, sizes=known, fuse=fuse, priced=priced
        )
    return _Program(steps, trace.collectives, trace.input_bytes, known, trace.graph_module)


def _cap_bytes(cap: int | str | None, peak: int) -> int | None:
    """A cap in bytes: as it is, or relative to a peak."""
    if cap is None or (isinstance(cap, int) and cap > 0):
        return cap
    found = re.fullmatch(r"([+-]\d+(\.\d+)?)%", cap.strip()) if isinstance(cap, str) else None
    if found is None:
        known = 'bytes, "+5%" and None'
        raise BadOption(op="schedule", arg="memory_cap", value=cap, known=known)
    return int(peak * (1 + float(found[1]) / 100))


def _plan(job: Job, entry: Entry, cap: int | None, program: _Program, machine: Machine) -> Plan:
    steps, outcome = _ordered(job, entry, cap)
    order = [step.name for step in steps]
    if program.graph_module is not None:
        order = [node.name for node in node_order(program.graph_module, order)]
    compute_us = sum(us for us, s in zip(job.problem.us, job.problem.stream, strict=True) if s < 0)
    return Plan(
        scheduler=entry.name,
        order=tuple(order),
        makespan_us=outcome.us,
        lower_bound_us=job.lower_bound_us,
        peak_bytes=outcome.peak_bytes,
        exposed_us=outcome.us - compute_us,
        original_us=job.original.us,
        original_peak_bytes=job.original.peak_bytes,
        cap_bytes=cap,
        buckets=(),
        splits=(),
        steps=steps,
        original_steps=program.steps,
        us=job.us,
        held_bytes=program.held_bytes,
        collectives=program.collectives,
        machine=machine,
        graph_module=program.graph_module,
    )


def _ordered(job: Job, entry: Entry, cap: int | None) -> tuple[tuple[Step, ...], Outcome]:
    """What the scheduler makes of the steps: an order that is complete, and what it is worth."""
    given = [x if isinstance(x, str) else x.name for x in entry.run(job)]
    if not given and len(job):
        raise MemoryCapTooSmall(
            cap=show_bytes(int(job.cap_bytes)),
            least=show_bytes(Overlap(job.problem, 0.0).leanest.peak_bytes),
            original=show_bytes(job.original.peak_bytes),
        )
    by_name = {step.name: step for step in job}
    if len(given) != len(by_name) or set(given) != by_name.keys():
        wrong = sorted(set(given) ^ set(by_name)) or [n for n, k in Counter(given).items() if k > 1]
        why = f"{wrong[0]} is missing, unknown or there twice"
        raise BadPlan(scheduler=entry.name, why=why)
    outcome = job.try_order(given)
    return tuple(by_name[name] for name in job.names(outcome.order)), outcome
