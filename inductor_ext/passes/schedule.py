"""``schedule``: order compute and communication by a plan of ``fcoll.schedule``.

This file says what fcoll.schedule cannot know of a graph that Inductor compiles: what lies in the
arena takes no memory of the graph's, what blocks, and what a collective takes on its carrier.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fcoll.costs.machine import Machine
from fcoll.errors import FcollError, MissingSize
from fcoll.graph.issued import Issued
from fcoll.graph.nodes import collectives, waits_of
from fcoll.graph.steps import Step
from fcoll.scheduling.apply import apply_in_place
from fcoll.scheduling.planner import schedule as plan_of
from fcoll.scheduling.runtime import Runtime
from fcoll.scheduling.scheduler_registry import scheduler_of
from fcoll.scheduling.verified_plan import Plan
from inductor_ext._torch import is_view
from inductor_ext.choice import Choice, calls_of, choice_of, set_choice
from inductor_ext.config import config
from inductor_ext.errors import SchedulerFailed
from inductor_ext.graph_prices import machine_for, network, us_over
from inductor_ext.passes.choose import carrier_of


@dataclass(frozen=True)
class Planned:
    """What the plan of a compiled graph is worth, by the prices that it was made with."""

    scheduler: str
    original_us: float  # in the program's own order
    makespan_us: float
    lower_bound_us: float
    peak_bytes: int


_planned: deque[Planned] = deque(maxlen=1000)


def plans() -> list[Planned]:
    """The plans of the graphs that this process has compiled, the last one last; none is made of a
    graph from a cache, or of one that has nothing to hide."""
    return list(_planned)


def schedule(graph: Graph) -> list[str]:
    """Give a graph the order, and the buckets, of ``config.schedule``."""
    if config.schedule is None or (config.schedule == "safe" and _has_one_order(graph)):
        return []
    module = graph.owning_module or GraphModule(torch.nn.Module(), graph)
    carriers = _Carriers(machine_for(_devices(graph)))
    runtime = Runtime(carriers.us_of, carriers.amend, config.merge_bytes)
    try:
        plan = plan_of(
            module,
            carriers.machine,
            scheduler=config.schedule,
            memory_cap=config.memory_cap,
            splits=config.splits,
            runtime=runtime,
        )
    except MissingSize as missing:
        return [f"left as it is: {missing}"]
    except FcollError:
        raise
    except Exception as error:  # of a function of a user's: Inductor shows no traceback
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise SchedulerFailed(
            scheduler=scheduler_of(config.schedule).name,
            error=f"{type(error).__name__}: {error}",
            where=f"{at.filename}:{at.lineno}",
        ) from error
    assert plan.graph_module is not None
    _planned.append(Planned(**{f.name: getattr(plan, f.name) for f in fields(Planned)}))
    changes, calls = dict(_changes(graph, plan)), _calls(graph, plan)
    apply_in_place(graph, plan.graph_module.graph, plan.order)
    for node in graph.nodes:
        if node.name in changes:
            set_choice(node, replace(choice_of(node) or Choice(), plan=changes[node.name]))
        if node.name in calls:
            set_choice(node, replace(choice_of(node) or Choice(), calls=calls[node.name]))
    return [f"{name}: {what}" for name, what in changes.items()]


def _has_one_order(graph: Graph) -> bool:
    """Is there one collective, and nothing to compute beside it? Then there is nothing to plan."""
    starts = [node for node, _ in collectives(graph)]
    if len(starts) != 1 or config.splits:
        return False
    tied = {starts[0]}
    for node in graph.nodes:  # what comes of it
        if not tied.isdisjoint(node.all_input_nodes):
            tied.add(node)
    before = list(starts)
    while before:  # what it is made of
        for node in before.pop().all_input_nodes:
            if node not in tied:
                tied.add(node)
                before.append(node)
    return all(node in tied for node in graph.nodes if node.op == "call_function")


class _Carriers:
    """How the collectives of a graph travel, by the names of their starts."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.network = machine, network()
        self.carrier: dict[str, str] = {}

    def amend(
        self, module: GraphModule, steps: tuple[Step, ...], calls: tuple[Issued, ...]
    ) -> tuple[Step, ...]:
        """The steps as they are in compiled code.

        What is read in place lies in the arena: its part, which its producer writes there, and the
        result, which its reader computes. A kernel on shared memory has done all when it returns.
        """
        nodes = {node.name: node for node in module.graph.nodes}
        changes: dict[str, dict[str, Any]] = {}
        for call in calls:
            node = nodes[call.start]
            carrier = self.carrier[call.start] = carrier_of(node)
            if carrier == "in place":
                changes[call.start] = {"out_bytes": 0}
                if producer := _only_for(node):
                    changes[producer] = {"out_bytes": 0}
            elif carrier == "kernel" and not call.row.is_p2p:
                changes[call.start] = {"kind": "compute", "stream": "compute"}
        return tuple(replace(s, **changes[s.name]) if s.name in changes else s for s in steps)

    def us_of(self, call: Issued, nbytes: float) -> float | None:
        """The time of a call: in place only the meeting's, as its bytes are the reader's time."""
        carrier = self.carrier[call.start]
        if carrier == "process group":
            return us_over(self.network, call, nbytes)
        if carrier == "in place" and nbytes <= config.one_shot_limit(call.n):
            return us_over(self.machine, call, 1)
        return None


def _devices(graph: Graph) -> set[torch.device]:
    values = (node.meta.get("val") for node in graph.nodes)
    return {x.device for x in values if isinstance(x, torch.Tensor)}


def _only_for(start: Node) -> str | None:
    """The node that computes what a collective sends, if nothing else uses it."""
    node = start.all_input_nodes[0]
    while len(node.users) == 1 and node.op == "call_function":
        if not is_view(node.target):
            return node.name
        node = node.all_input_nodes[0]
    return None


def _calls(graph: Graph, plan: Plan) -> dict[str, tuple[str, ...]]:
    """By the names of the starts that a plan makes: the program's calls that they make."""
    own_calls = {node.name: calls_of(node) for node, _ in collectives(graph)}
    calls: dict[str, tuple[str, ...]] = {}
    for bucket in plan.buckets:
        calls[bucket.name] = tuple(x for name in bucket.members for x in own_calls.get(name, ()))
    for split in plan.splits:
        for name in split.collectives:
            whole = calls.get(name, own_calls.get(name, ()))
            for j in range(split.chunks):
                calls[f"{name}_c{j}"] = (*whole, f"chunk {j + 1} of {split.chunks}")
    return calls


# -- what is said of it ---


def _changes(graph: Graph, plan: Plan) -> Iterator[tuple[str, str]]:
    """(start, what the plan does to it)."""
    for bucket in plan.buckets:
        yield bucket.name, f"{', '.join(bucket.members)} as one {bucket.op}"
    for reuse in plan.reuses:
        yield reuse.instead, f"its result serves {reuse.collective}, too, which is left out"
    for split in plan.splits:
        for name in split.collectives:
            for chunk in range(split.chunks):
                yield f"{name}_c{chunk}", f"1 of {split.chunks} chunks of {name}"
    work = (step for step in plan.steps if step.kind == "compute")
    kernels = {step.name for step in work if step.fused_with in (None, step.name)}
    before = _kernels_before([node.name for node in graph.nodes], kernels)
    after = _kernels_before(plan.order, kernels)
    for node in graph.nodes:
        if node.name in after and (waits := waits_of(node)):
            start = after[node.name] - before[node.name]
            late = after.get(waits[0].name, 0) - before[waits[0].name]
            moved = [*_moved("starts", start), *_moved("is waited for", late)]
            if moved:
                yield node.name, ", ".join(moved)


def _moved(what: str, by: int) -> Iterator[str]:
    if by:
        kernels = "1 kernel" if abs(by) == 1 else f"{abs(by)} kernels"
        yield f"{what} {kernels} {'later' if by > 0 else 'earlier'}"


def _kernels_before(order: Iterable[str], kernels: set[str]) -> dict[str, int]:
    """By the name of each node: how many kernels come before it."""
    counts: dict[str, int] = {}
    count = 0
    for name in order:
        counts[name] = count
        count += name in kernels
    return counts
