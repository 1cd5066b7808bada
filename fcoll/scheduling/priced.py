"""A changed graph: what was changed in it, and prices for what has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch.fx import GraphModule

from fcoll.costs.machine import Machine
from fcoll.costs.model import collective_us, number
from fcoll.graph.issued import Issued
from fcoll.scheduling.bounds import Outcome, exposed_us
from fcoll.scheduling.buckets import Bucket
from fcoll.scheduling.overlap import quick
from fcoll.scheduling.reuse import Reuse
from fcoll.scheduling.scheduler_registry import Job
from fcoll.scheduling.splits import Split


class Wanted(NamedTuple):
    """What may be changed."""

    buckets: bool
    splits: bool
    reuse: bool
    sums: bool  # in splits, products over rows chunk by chunk: not to the last bit the same


@dataclass
class Budget:
    """How many nodes of changed graphs may still be made: to make, price and plan one takes about
    0.2 ms. It is counted, not timed: the same graph has the same plan everywhere. ``tries`` are for
    graphs with few layers, on which is tried what gains."""

    nodes: int
    tries: int = 0

    def take(self, graph_module: GraphModule) -> bool:
        """Is there enough for one more graph about as large as this one?"""
        count = len(graph_module.graph.nodes)
        if self.nodes < count:
            return False
        self.nodes -= count
        return True


@dataclass(frozen=True)
class Change:
    """A graph to plan, with what was changed in it, in this order, and given prices."""

    graph_module: GraphModule
    reuses: tuple[Reuse, ...]
    splits: tuple[Split, ...]
    buckets: tuple[Bucket, ...]
    costs: Mapping[str, float] | None  # of the changed graph, where prices are given by name


@dataclass(frozen=True)
class Priced:
    """A graph that has been read."""

    change: Change
    job: Job
    collectives: tuple[Issued, ...]

    @cached_property
    def quick(self) -> Outcome:
        """A quick schedule without a cap."""
        return quick(self.job.problem)

    @property
    def quick_us(self) -> float:
        return self.quick.us

    @cached_property
    def exposed_us(self) -> dict[str, float]:
        """How long compute waits there for each collective."""
        return exposed_us(self.job.problem, self.quick.order)


#: Reads and prices a changed graph.
Reader = Callable[[Change], Priced]


# -- prices of what has none, where prices are given by name ---


def split_costs(
    costs: Mapping[str, float],
    splits: Sequence[Split],
    collectives: Sequence[Issued],
    machine: Machine,
    out_bytes: Mapping[str, int],
) -> dict[str, float]:
    """A chunk takes its share of the given time, and its share of the machine's fixed cost of a
    kernel or a collective comes to a whole one again. So chunks never take less in all than what
    they are of. A sum reads again what it is added to. Copies are priced by the machine's model."""
    latency = {c.start: _latency_us(c, machine) for c in collectives}
    made = dict(costs)
    for split in splits:
        k = split.chunks
        for name in split.members:
            if not (given := made.pop(name, None)):
                chunk = given
            else:
                chunk = given / k + latency.get(name, machine.launch_us) * (1 - 1 / k)
            if chunk is not None:
                made.update((f"{name}_c{j}", chunk) for j in range(k))
        for name in split.sums:
            if (given := made.pop(name, None)) is not None:
                chunk = given / k + machine.launch_us * (1 - 1 / k)
                made[f"{name}_c0"] = chunk
                again = out_bytes.get(name, 0) / (1000 * machine.memory_gb_per_s)
                made.update((f"{name}_c{j}", chunk + again) for j in range(1, k))
    return made


def bucket_costs(
    costs: Mapping[str, float],
    buckets: Sequence[Bucket],
    collectives: Sequence[Issued],
    machine: Machine,
) -> dict[str, float]:
    """A bucket takes what its members take but the latencies of all but one: of each the part of
    its given time that is latency by the machine's model, and no more than the latency there."""
    calls = {c.start: c for c in collectives}
    made = dict(costs)
    for bucket in buckets:
        given = [made.get(name) for name in bucket.members]
        known = [us for us in given if us is not None]
        if len(known) < len(given):
            continue
        saved = []
        for name, us in zip(bucket.members, known, strict=True):
            latency = _latency_us(calls[name], machine)
            model = max(_model_us(calls[name], machine), latency, 1e-9)
            saved.append(min(latency, us * latency / model))
        made[bucket.name] = sum(known) - sum(sorted(saved)[:-1])
        made[f"{bucket.name}_wait"] = 0.0
    return made


def _model_us(call: Issued, machine: Machine) -> float:
    return number(collective_us(call.op, call.n, call.bytes, machine, call.ranks))


def _latency_us(call: Issued, machine: Machine) -> float:
    return float(collective_us(call.op, call.n, 1, machine, call.ranks))
