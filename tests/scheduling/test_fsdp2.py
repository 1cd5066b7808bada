"""FSDP2's steps: its copies are no barriers, plans keep what lies in memory, and none is worse than
what eager does by itself, which waits at the first use."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_iter

import fcoll
from fcoll.graph.nodes import effect_of, is_start, is_wait, start_of
from fcoll.scheduling.timeline import timeline


@pytest.fixture(scope="module")
def trace():
    with fcoll.fake_world(dp=4) as mesh:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            model(x).sum().backward()
            optimizer.step()

        return fcoll.trace(step, torch.randn(32, 64))


def storages(values) -> set[int]:
    tensors = (n.meta.get("val") for n in values)
    return {x.untyped_storage()._cdata for v in tensors for x in tree_iter(v)
            if isinstance(x, torch.Tensor)}  # fmt: skip


def touched(node) -> tuple[set[int], set[int]]:
    """The memory that a call reads, and what it writes, by the traced tensors themselves."""
    if node.op != "call_function":
        return set(), set()
    written = []
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            written += [x for x in tree_iter(given) if isinstance(x, torch.fx.Node)]
    if "all_gather_copy_in" in str(node.target):
        written.append(node.args[1])  # its schema does not say so
    return storages(node.all_input_nodes), storages(written)


def conflicts(nodes) -> list[tuple[str, str]]:
    """(first, second) of calls that may not change places: one writes what the other touches.
    A collective writes until its wait."""
    found = []
    memory = [touched(node) for node in nodes]
    for j, node in enumerate(nodes):
        for i in range(j):
            (read, wrote), (reads, writes) = memory[i], memory[j]
            if not (wrote.isdisjoint(reads | writes) and writes.isdisjoint(read)):
                found.append((nodes[i].name, node.name))
    return found


@pytest.mark.parametrize("scheduler", ["safe", "overlap"])
@pytest.mark.parametrize("cap", ["+0%", None])
def test_what_lies_in_memory_keeps_its_order(trace, scheduler, cap):
    nodes = [n for n in trace.graph_module.graph.nodes if n.op == "call_function"]
    assert not [n.name for n in nodes if effect_of(n) == "barrier"]
    plan = fcoll.schedule(trace, scheduler=scheduler, memory_cap=cap, buckets=False, splits=False)
    place = {name: i for i, name in enumerate(plan.order)}
    waits = {start_of(n).name: place[n.name] for n in nodes if is_wait(n)}
    checked = 0
    for one, other in conflicts(nodes):
        assert place[one] < place[other], (one, other)
        checked += 1
    for node in nodes:
        for x in node.all_input_nodes:
            if is_start(x) and not is_wait(node):
                assert waits[x.name] < place[node.name]
    assert checked > 20


def test_no_plan_is_worse_than_eager(trace):
    eager = timeline(trace, waits="first use")
    assert eager.step_us < timeline(trace).step_us
    plan = fcoll.schedule(trace, memory_cap=eager.peak_bytes)
    assert plan.makespan_us < eager.step_us
    assert fcoll.schedule(trace, memory_cap=None).makespan_us <= plan.makespan_us


def test_advice_on_its_gathers(trace):
    found = {(told.kind, told.op) for told in fcoll.advice(trace)}
    assert ("prefetch", "all_gather_into_tensor_out") in found and ("plan", "") in found
