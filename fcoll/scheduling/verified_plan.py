"""What ``fcoll.schedule`` gives: an order with its proof."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from torch.fx import GraphModule

from fcoll.costs.machine import Machine
from fcoll.errors import BadPlan, BadPlanFile, NoGraph
from fcoll.graph.call_agreement import calls_by_group, compare
from fcoll.graph.issued import Issued
from fcoll.graph.steps import Step
from fcoll.groups import GroupLike, by_name, resolve
from fcoll.scheduling import apply, verify_order
from fcoll.scheduling.buckets import Bucket, made_again
from fcoll.scheduling.explanation import explain
from fcoll.scheduling.reuse import Reuse, without
from fcoll.scheduling.splits import Split, split_graph
from fcoll.scheduling.streams import freed_in_order as freed_in_order
from fcoll.scheduling.timeline import Timeline, timeline
from fcoll.scheduling.value_moves import Unsure
from fcoll.scheduling.verify_changes import check_changes
from fcoll.scheduling.verify_graphs import Side
from fcoll.units import show_bytes


@dataclass(frozen=True)
class Plan:
    """An order of a graph's nodes, and what it is worth.

    ``order`` are the names of nodes (of a plan without a graph: of steps), ``steps`` the steps in
    the planned order. ``original_us`` and ``original_peak_bytes`` are those of the order that came
    in, ``cap_bytes`` is the memory cap, None without one. ``buckets`` say which collectives are
    sent as one, ``splits`` which are run in chunks with the products around them, ``reuses`` which
    are left out because their result is there already; then ``graph_module`` is the graph in which
    that is done, ``order`` one of its nodes, the bound one for that graph, and ``source`` the graph
    that came in.
    """

    scheduler: str
    order: tuple[str, ...]
    makespan_us: float
    lower_bound_us: float
    peak_bytes: int
    exposed_us: float
    original_us: float
    original_peak_bytes: int
    cap_bytes: int | None
    buckets: tuple[Bucket, ...]
    splits: tuple[Split, ...]
    steps: tuple[Step, ...] = field(repr=False)
    original_steps: tuple[Step, ...] = field(repr=False)
    us: Mapping[str, float] = field(repr=False)
    held_bytes: int = field(repr=False, default=0)
    collectives: tuple[Issued, ...] = field(repr=False, default=())
    machine: Machine | None = field(repr=False, default=None)
    graph_module: GraphModule | None = field(repr=False, default=None, compare=False)
    source: GraphModule | None = field(repr=False, default=None, compare=False)
    reuses: tuple[Reuse, ...] = ()

    @property
    def over_bound(self) -> float:
        """How many times the lower bound it takes: 1.0 is optimal."""
        return self.makespan_us / self.lower_bound_us if self.lower_bound_us else 1.0

    @property
    def speedup(self) -> float:
        """Over the order that came in."""
        return self.original_us / self.makespan_us if self.makespan_us else 1.0

    @cached_property
    def digest(self) -> str:
        """The same on all ranks that have the same plan."""
        issued = [(s.stream, s.name) for s in self.steps if s.kind == "start"]
        changed = [vars(x) for x in (*self.splits, *self.buckets, *self.reuses)]
        text = json.dumps([self.order, issued, changed], default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def timeline(self) -> Timeline:
        """When everything runs."""
        steps = freed_in_order(self.steps)
        made = timeline((steps, self.collectives), self.machine or "h100", self.us)
        return replace(made, peak_bytes=self.peak_bytes)

    def verify(self) -> None:
        """Raise BadPlan unless the plan is right."""
        verify_plan(self)

    def compare(self, group: GroupLike = None) -> None:
        """Raise PlanMismatch, on all ranks, unless the ranks of a group have planned to issue the
        same collectives on it; without one, those of every group of the plan. All of them call
        it: who does not come is a CollectiveTimeout, or a PeerDied."""
        place = {name: i for i, name in enumerate(self.order)}
        issued = sorted(self.collectives, key=lambda call: place[call.start])
        by_group = calls_by_group(issued)
        given = [resolve(group)] if group is not None else map(by_name, by_group)
        for g in sorted(given, key=lambda g: (g.ranks, g.name)):
            compare(g, by_group.get(g.name, []))

    def apply(self) -> GraphModule:
        """A new graph module in this order, buckets and splits made; it gives the same values."""
        if self.graph_module is None:
            raise NoGraph(what="steps alone, or from a file,")
        return apply.apply(self.graph_module, self.order)

    def explain(self, step: str) -> str:
        """Why a step is where it is, and what it waits for."""
        return explain(self, step)

    def diff(self, other: Plan) -> str:
        """What the other plan does otherwise."""
        return _diff(self, other)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, without its graph and timeline."""
        plain = {name: getattr(self, name) for name in _SAVED}
        plain["buckets"] = [vars(b) for b in self.buckets]
        plain["splits"] = [vars(s) for s in self.splits]
        plain["reuses"] = [vars(r) for r in self.reuses]
        plain["steps"] = [_plain(s) for s in self.steps]
        plain["original_steps"] = [s.name for s in self.original_steps]
        plain["digest"] = self.digest
        Path(path).write_text(json.dumps(plain))

    @staticmethod
    def load(path: str | Path, graph_module: GraphModule | None = None) -> Plan:
        """A plan from a file. With the graph it was made of it can be applied again."""
        try:
            return _loaded(json.loads(Path(path).read_text()), graph_module)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadPlanFile(path=str(path), why=f"{type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        rows = [
            f"{self.scheduler}: {self.makespan_us:,.0f} us, {self.over_bound:.3f} x the bound of "
            f"{self.lower_bound_us:,.0f} us; it was {self.original_us:,.0f} us",
            f"exposed {self.exposed_us:,.0f} us; peak {show_bytes(self.peak_bytes)}, "
            f"it was {show_bytes(self.original_peak_bytes)}",
        ]
        if self.buckets:
            merged = sum(len(b.members) for b in self.buckets)
            rows.append(f"{merged} collectives are sent as {len(self.buckets)}")
        if self.reuses:
            rows.append(f"{len(self.reuses)} collectives are left out: they have run before")
        if self.splits:
            rows.append(f"{sum(len(s.collectives) for s in self.splits)} collectives are in chunks")
        return "\n".join(rows)


_SAVED = (
    *("scheduler", "order", "makespan_us", "lower_bound_us", "peak_bytes", "exposed_us"),
    *("original_us", "original_peak_bytes", "cap_bytes", "us", "held_bytes"),
)


def verify_plan(plan: Plan) -> None:
    """Raise BadPlan unless the plan keeps every dependency, every wait, every group's issue order
    and the memory cap, and its graph computes what the graph that came in does. It runs on every
    plan before ``fcoll.schedule`` returns it."""
    source = None if plan.source is None else Side(plan.source.graph.nodes)
    try:
        check_plan(plan, source)
    except Unsure as error:
        raise BadPlan(scheduler=plan.scheduler, why=str(error)) from None


def check_plan(plan: Plan, source: Side | None) -> None:
    """The same, with what was read of the graph that came in, if the plan has changed it. Unsure is
    raised where it cannot be told whether the changed graph computes the same."""

    def fail(why: str) -> NoReturn:
        raise BadPlan(scheduler=plan.scheduler, why=why)

    cap = float("inf") if plan.cap_bytes is None else plan.cap_bytes
    verify_order.check_steps(plan.original_steps, plan.steps, fail)
    verify_order.check_memory(plan.steps, plan.held_bytes, plan.peak_bytes, cap, fail)
    if plan.graph_module is not None and source is None:
        verify_order.check_nodes(plan.graph_module, plan.order, fail)
    elif plan.graph_module is not None and source is not None:
        nodes = verify_order.nodes_in(plan.graph_module, plan.order, fail)
        check_changes(source, nodes, plan.splits, plan.buckets, plan.reuses, fail)


def _diff(one: Plan, other: Plan) -> str:
    lines = [
        f"{name}: {getattr(one, name):,.0f} -> {getattr(other, name):,.0f}"
        for name in ("makespan_us", "exposed_us", "peak_bytes")
        if getattr(one, name) != getattr(other, name)
    ]
    place = {name: i for i, name in enumerate(other.order)}
    moved = [
        (abs(i - place[name]), f"{name}: {i} -> {place[name]}")
        for i, name in enumerate(one.order)
        if name in place and place[name] != i
    ]
    moved.sort(key=lambda m: (-m[0], m[1]))
    lines += [f"{len(moved)} nodes stand elsewhere"] if moved else []
    lines += [f"  {text}" for _, text in moved[:10]]
    gone, new = set(one.order) - set(other.order), set(other.order) - set(one.order)
    lines += [f"- {name}" for name in sorted(gone)] + [f"+ {name}" for name in sorted(new)]
    return "\n".join(lines) or "the same plan"


def _plain(step: Step) -> dict[str, Any]:
    """A step as JSON; sizes that are expressions were only needed for its price."""
    plain = dict(vars(step))
    for name in ("flops", "read_bytes", "write_bytes"):
        plain[name] = plain[name] if isinstance(plain[name], (int, float)) else 0
    return plain


def _loaded(data: dict[str, Any], graph_module: GraphModule | None) -> Plan:
    digest = data.pop("digest")
    steps = tuple(Step(**{k: _tuple(v) for k, v in row.items()}) for row in data.pop("steps"))
    by_name = {step.name: step for step in steps}
    originals = tuple(by_name[name] for name in data.pop("original_steps"))
    buckets = tuple(Bucket(**{k: _tuple(v) for k, v in b.items()}) for b in data.pop("buckets"))
    splits = tuple(Split(**{k: _tuple(v) for k, v in s.items()}) for s in data.pop("splits"))
    reuses = tuple(Reuse(**{k: _tuple(v) for k, v in r.items()}) for r in data.pop("reuses", ()))
    data["order"] = tuple(data["order"])
    source = graph_module
    if reuses and graph_module is not None:
        graph_module = without(graph_module, reuses)
    if splits and graph_module is not None:
        graph_module = split_graph(graph_module, splits)
    if buckets and graph_module is not None:
        graph_module = made_again(graph_module, data["order"], buckets)
    plan = Plan(
        **data,
        source=source if buckets or splits or reuses else None,
        reuses=reuses,
        buckets=buckets,
        splits=splits,
        steps=steps,
        original_steps=originals,
        graph_module=graph_module,
    )
    if plan.digest != digest:
        raise ValueError("its order is not the one that was saved")
    verify_plan(plan)
    return plan


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
