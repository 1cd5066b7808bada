"""``fcoll.schedule``: a trace or a graph -> a verified plan."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from fcoll.costs.machine import Machine
from fcoll.costs.model import number
from fcoll.errors import BadOption, BadPlan, MemoryCapTooSmall
from fcoll.graph.issued import Issued, collectives_of
from fcoll.graph.steps import Step, input_bytes, sizes_of, steps_of
from fcoll.scheduling import classic
from fcoll.scheduling import schedulers as _schedulers  # noqa: F401  they register themselves
from fcoll.scheduling.bounds import Outcome
from fcoll.scheduling.buckets import Bucket, merged, small_runs
from fcoll.scheduling.contention import Contention
from fcoll.scheduling.graph_changes import changes
from fcoll.scheduling.node_order import node_order
from fcoll.scheduling.overlap import Overlap
from fcoll.scheduling.priced import Budget, Change, Priced, Wanted
from fcoll.scheduling.problem import problem_of
from fcoll.scheduling.rewrite import fake_mode_of, values_kept
from fcoll.scheduling.runtime import Runtime
from fcoll.scheduling.scheduler_registry import Entry, Job, Scheduler, scheduler_of
from fcoll.scheduling.timeline import Costs, pricing
from fcoll.scheduling.value_moves import Unsure
from fcoll.scheduling.verified_plan import Plan, check_plan, verify_plan
from fcoll.scheduling.verify_graphs import Side
from fcoll.units import show_bytes

_NEVER = float("inf")
#: Nodes of changed graphs that are made to be planned, and of graphs with few layers on which is
#: tried what gains: by default and where changes are asked for.
BY_DEFAULT, ASKED_FOR = Budget(9_000, 7_000), Budget(80_000, 40_000)
GRAPHS = 5  # by default no more
SUMS = "sums"  # of ``splits``


def schedule(
    trace: Any,
    machine: Machine | str | Path = "h100",
    costs: Costs | None = None,
    *,
    memory_cap: int | str | None = "+0%",
    scheduler: str | Scheduler = "overlap",
    sizes: Mapping[str, int] | None = None,
    buckets: bool | None = None,
    splits: bool | str | None = None,
    reuse: bool | None = None,
    runtime: Runtime | None = None,
    seeds: Sequence[str | Scheduler] = (),
) -> Plan:
    """Order a program's compute and communication so that it takes the least time.

    ``trace`` is a Trace, any FX GraphModule with ``meta["val"]`` (fcoll or ``_c10d_functional``
    ops), or a pair (steps, collectives). ``costs`` are times in us that go before the machine's
    model: {node name: us}, or a function of a Step that gives None where it knows nothing; with
    them every node is a kernel of its own. ``memory_cap`` is in bytes, or relative to the order
    that came in ("+0%", "+5%"), or None. ``scheduler`` is a name or a function: Steps in, names
    out.

    ``buckets``: may small collectives be sent as one, where that is faster? ``splits``: may large
    ones, and the products around them, be run in chunks? ``reuse``: may one that has run before on
    the same data be left out, and the result kept? By default yes, but with {node name: us}, which
    says nothing of the nodes that come of it. With True these get prices that follow from the given
    ones (priced.py), so that ``plan.order`` has nodes that the graph had not. ``splits="sums"`` is
    True, and products over rows (``x.t() @ y``, the gradients of weights) may be summed chunk by
    chunk, too. That rounds to the tensor's dtype once more a chunk, so nothing else does it.
    ``runtime`` says how a compiler carries steps out, where that is not by kernels and streams.

    ``seeds`` are schedulers whose orders ``overlap`` and ``search`` start from, too: no plan is
    slower than one of them that fits the cap. The rules of Inductor and ``safe`` always are.
    ``seeds=["torch"]`` takes 0.4 ms a node; a seed that fails on a graph is left out.

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
    splits, sums = split_switch(splits)
    budget = ASKED_FOR if True in (buckets, splits, reuse) else BY_DEFAULT
    buckets = allowed if buckets is None else buckets and entry.buckets
    splits = allowed if splits is None else splits and entry.buckets
    reuse = allowed if reuse is None else reuse and entry.buckets
    with without_collector(), values_kept():
        entries = tuple(scheduler_of(seed) for seed in seeds)
        reading = _Pricing(machine, costs, sizes, runtime or Runtime(), entries)
        wanted = Wanted(buckets, splits, reuse, sums and splits)
        return _schedule(trace, reading, memory_cap, entry, wanted, budget)


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


@dataclass(frozen=True)
class _Pricing:
    """How programs are read and priced: the one that came in, and those it is changed to."""

    machine: Machine
    costs: Costs | None
    sizes: Mapping[str, int] | None
    runtime: Runtime
    seeds: tuple[Entry, ...] = ()

    def program(self, trace: Any) -> _PlannedProgram:
        priced = self.costs if isinstance(self.costs, Mapping) else ()
        found = _read(trace, self.sizes, self.costs is None, priced)
        if found.graph_module is None or self.runtime.amend is None:
            return found
        steps = self.runtime.amend(found.graph_module, found.steps, found.collectives)
        return replace(found, steps=steps)

    def job(self, program: _PlannedProgram) -> Job:
        model = pricing(program.collectives, self.machine, self.costs, program.sizes)
        calls: dict[Any, Issued] = {c.id: c for c in program.collectives}
        us_of = self.runtime.us_of

        def price(step: Step) -> float:
            call = calls.get(step.collective) if us_of and step.kind != "wait" else None
            known = us_of(call, number(call.bytes, program.sizes)) if us_of and call else None
            return model(step) if known is None else known

        us = {step.name: price(step) for step in program.steps}
        contention = Contention.of(self.machine, program.collectives)
        held = program.held_bytes
        problem = problem_of(program.steps, lambda step: us[step.name], held, contention)
        return Job.of(problem, us, _NEVER, program.graph_module)


def _schedule(
    trace: Any,
    reading: _Pricing,
    memory_cap: int | str | None,
    entry: Entry,
    wanted: Wanted,
    budget: Budget,
) -> Plan:
    by_name = reading.costs if isinstance(reading.costs, Mapping) else None
    given = program = reading.program(trace)
    job = original = reading.job(program)
    small: list[Bucket] = []
    if reading.runtime.merge_bytes and not entry.buckets:
        program, small = _with_small_buckets(program, job, reading)
        job = reading.job(program) if small else job
    cap = cap_bytes(memory_cap, job.original.peak_bytes) if entry.keeps_cap else None
    job.cap_bytes = _NEVER if cap is None else cap
    plan = _plan(job, entry, cap, program, reading)
    if small:
        change = Change(given.graph_module, (), (), tuple(small), None)  # type: ignore[arg-type]
        plan = _of_change(plan, change, original.original, given.graph_module)
    verify_plan(plan)
    if program.graph_module is None or not any(wanted[:3]):
        return plan
    nodes = len(program.graph_module.graph.nodes)
    if nodes > budget.nodes:
        return plan
    most = GRAPHS * nodes if budget is BY_DEFAULT else budget.nodes
    budget = replace(budget, nodes=min(budget.nodes, most))
    base = Priced(Change(program.graph_module, (), (), (), by_name), job, program.collectives)
    again = _Again(plan, program, reading)
    us_of = reading.runtime.us_of
    for change in changes(base, reading.machine, again.read, wanted, budget, us_of):
        again.plan(change, entry)
    return again.best()


def _with_small_buckets(
    program: _PlannedProgram, job: Job, reading: _Pricing
) -> tuple[_PlannedProgram, list[Bucket]]:
    """The program with runs of small all-reduces as one, whatever that costs."""
    module = program.graph_module
    if module is None or fake_mode_of(module.graph.nodes) is None:
        return program, []
    late = classic.waits_late(job.problem, range(job.problem.n), _NEVER)
    nodes = node_order(module, job.names(late))
    found = list(small_runs(nodes, reading.runtime.merge_bytes))
    if not found:
        return program, []
    return replace(reading, sizes=program.sizes).program(merged(module, nodes, found)), found


def _of_change(plan: Plan, change: Change, before: Outcome, source: GraphModule | None) -> Plan:
    """The plan of a changed graph as one of the graph that it was made of."""
    return replace(
        plan,
        buckets=change.buckets,
        splits=change.splits,
        original_us=before.us,
        original_peak_bytes=before.peak_bytes,
        source=source,
    )


class _Again:
    """Plans changed graphs under the cap and by the prices of a plan, which was verified."""

    def __init__(self, plan: Plan, program: _PlannedProgram, reading: _Pricing) -> None:
        self.found = [plan]  # each faster than the one before it
        self.program, self.reading = program, reading
        self.known: dict[int, tuple[Change, _PlannedProgram, Job]] = {}

    def read(self, change: Change) -> Priced:
        costs = self.reading.costs if change.costs is None else change.costs
        reading = replace(self.reading, costs=costs, sizes=self.program.sizes)
        program = reading.program(change.graph_module)
        job = reading.job(program)
        self.known[id(change)] = change, program, job
        return Priced(change, job, program.collectives)

    def plan(self, change: Change, entry: Entry) -> None:
        if id(change) not in self.known:
            self.read(change)
        _, program, job = self.known[id(change)]
        before = self.found[-1]
        if job.lower_bound_us >= before.makespan_us:
            return
        job.cap_bytes = _NEVER if before.cap_bytes is None else before.cap_bytes
        try:
            made = _plan(job, entry, before.cap_bytes, program, self.reading)
        except MemoryCapTooSmall:
            return
        if made.makespan_us < before.makespan_us:
            made = replace(
                made,
                buckets=change.buckets,
                splits=change.splits,
                reuses=change.reuses,
                original_us=before.original_us,
                original_peak_bytes=before.original_peak_bytes,
                source=self.program.graph_module,
            )
            self.found.append(made)

    def best(self) -> Plan:
        """The fastest that is proved; what cannot be told to compute the same is not taken."""
        *first, last = self.found
        while first:
            with suppress(Unsure):
                check_plan(last, self.source)
                break
            last = first.pop()
        return last

    @cached_property
    def source(self) -> Side:
        assert self.program.graph_module is not None
        return Side(self.program.graph_module.graph.nodes)


@dataclass(frozen=True)
class _PlannedProgram:
    """What is planned."""

    steps: tuple[Step, ...]
    collectives: tuple[Issued, ...]
    held_bytes: int
    sizes: Mapping[str, int]
    graph_module: GraphModule | None


def _read(
    trace: Any, sizes: Mapping[str, int] | None, fuse: bool, priced: Collection[str]
) -> _PlannedProgram:
    if isinstance(trace, tuple):
        return _PlannedProgram(tuple(trace[0]), tuple(trace[1]), 0, sizes or {}, None)
    if isinstance(trace, GraphModule):
        collectives = collectives_of(trace)
        known = {**sizes_of(trace), **(sizes or {})}
        steps = steps_of(trace, collectives, sizes=known, fuse=fuse, priced=priced)
        return _PlannedProgram(steps, collectives, input_bytes(trace), known, trace)
    if not hasattr(trace, "collectives"):
        takes = "a Trace (fcoll.trace), a torch.fx.GraphModule, (steps, collectives)"
        raise BadOption(op="schedule", arg="trace", value=type(trace).__name__, known=takes)
    known = {**trace.sizes, **(sizes or {})}
    steps = trace.steps
    if trace.graph_module is not None and (sizes or not fuse):
        steps = steps_of(
            trace.graph_module, trace.collectives, sizes=known, fuse=fuse, priced=priced
        )
    return _PlannedProgram(steps, trace.collectives, trace.input_bytes, known, trace.graph_module)


def split_switch(splits: bool | str | None) -> tuple[bool | None, bool]:
    """May there be splits, and sums by chunks in them?"""
    if not (splits is None or isinstance(splits, bool) or splits == SUMS):
        known = f"None, True, False, {SUMS!r}"
        raise BadOption(op="schedule", arg="splits", value=splits, known=known)
    return (True, True) if splits == SUMS else (splits, False)  # type: ignore[return-value]


def cap_bytes(cap: int | str | None, peak: int) -> int | None:
    """A cap in bytes: as it is, or relative to a peak."""
    if cap is None or (isinstance(cap, int) and not isinstance(cap, bool) and cap > 0):
        return cap
    found = re.fullmatch(r"([+-]\d+(\.\d+)?)%", cap.strip()) if isinstance(cap, str) else None
    if found is None:
        known = 'bytes, "+5%" and None'
        raise BadOption(op="schedule", arg="memory_cap", value=cap, known=known)
    return int(peak * (1 + float(found[1]) / 100))


def _plan(
    job: Job, entry: Entry, cap: int | None, program: _PlannedProgram, reading: _Pricing
) -> Plan:
    job.seeds = list(_seeds(job, reading.seeds))
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
        exposed_us=max(outcome.us - compute_us, 0.0),
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
        machine=reading.machine,
        graph_module=program.graph_module,
    )


def _names(entry: Entry, given: Any) -> list[str]:
    """What a scheduler gives, names or steps, as names."""
    made = list(given) if isinstance(given, Iterable) else [given]
    names = [x if isinstance(x, str) else getattr(x, "name", None) for x in made]
    if None in names:
        wrong = made[names.index(None)]
        raise BadPlan(scheduler=entry.name, why=f"it gives {wrong!r}, which is no step or name")
    return [str(name) for name in names]


def _ordered(job: Job, entry: Entry, cap: int | None) -> tuple[tuple[Step, ...], Outcome]:
    """What the scheduler makes of the steps: an order that is complete, and what it is worth."""
    given = _names(entry, entry.run(job))
    if not given and job.cap_bytes < job.original.peak_bytes:
        raise MemoryCapTooSmall(
            cap=show_bytes(int(job.cap_bytes)),
            least=show_bytes(Overlap(job.problem, 0.0).leanest.peak_bytes),
            original=show_bytes(job.original.peak_bytes),
        )
    by_name = {step.name: step for step in job}
    outcome = job.try_order(_complete(job, entry, given))
    return tuple(by_name[name] for name in job.names(outcome.order)), outcome


def _seeds(job: Job, entries: Iterable[Entry]) -> Iterator[list[int]]:
    """Their orders, made valid, where they do not fail."""
    for entry in entries:
        try:
            given = entry.run(job)
        except BadPlan:
            continue
        names = _complete(job, entry, _names(entry, given))
        yield classic.with_needs(job.problem, job.units(names))


def _complete(job: Job, entry: Entry, names: list[str]) -> list[str]:
    """The names, if they are those of all steps."""
    known = {step.name for step in job}
    if len(names) != len(known) or set(names) != known:
        wrong = sorted(set(names) ^ known) or [n for n, k in Counter(names).items() if k > 1]
        why = f"{wrong[0]} is missing, unknown or there twice"
        raise BadPlan(scheduler=entry.name, why=why)
    return names
