"""Small collectives that are sent as one: faster by the model, the same values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll.costs.machine import Machine
from fcoll.graph.issued import collectives_of
from fcoll.scheduling.buckets import proposals, saturating_bytes

c10d = torch.ops._c10d_functional
WIDTH = 64


def reduced(x, group):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))


def gathered(x, n, group):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, n, group))


def scattered(x, n, group):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", n, group))


def step(x, ws, n, group):
    """Eight layers of sharded weights; their gradients are scattered, those of scales reduced."""
    scattered_, reduced_ = [], []
    for w in ws:
        whole = gathered(w, n, group)
        x = torch.relu(x @ whole)
        scattered_.append(scattered(whole * x.mean(), n, group))
        reduced_.append(reduced(x.sum(0), group))
    return x, *scattered_, *reduced_


def graph_of(n: int, group: str):
    x, ws = torch.ones(WIDTH, WIDTH), [torch.ones(WIDTH // n, WIDTH) for _ in range(8)]
    return make_fx(lambda x, *ws: step(x, ws, n, group), tracing_mode="fake")(x, *ws)


def test_many_small_messages_become_few(tmp_path):
    with fcoll.fake_world(dp=8) as mesh:
        graph = graph_of(8, mesh.get_group("dp").group_name)
        plan = fcoll.schedule(graph, memory_cap=None)
        alone = fcoll.schedule(graph, memory_cap=None, buckets=False)
        assert not alone.buckets and len(plan.buckets) >= 2
        assert plan.makespan_us < 0.8 * alone.makespan_us
        assert plan.makespan_us >= plan.lower_bound_us
        assert plan.original_us == alone.original_us
        starts = [s for s in plan.steps if s.kind == "start"]
        merged = sum(len(b.members) for b in plan.buckets)
        assert len(starts) == 24 - merged + len(plan.buckets)
        assert [n.name for n in plan.apply().graph.nodes] == list(plan.order)
        assert plan.digest == fcoll.schedule(graph, memory_cap=None).digest
        plan.save(tmp_path / "plan.json")
        again = fcoll.Plan.load(tmp_path / "plan.json", graph)
        assert again.buckets == plan.buckets
        assert again.apply().code == plan.apply().code


@pytest.mark.parametrize("cap", ["+0%", "+10%", None])
def test_never_slower_and_never_over_the_cap(cap):
    with fcoll.fake_world(dp=8) as mesh:
        graph = graph_of(8, mesh.get_group("dp").group_name)
        for machine in ("h100", "a100"):
            plan = fcoll.schedule(graph, machine, memory_cap=cap)
            alone = fcoll.schedule(graph, machine, memory_cap=cap, buckets=False)
            assert plan.makespan_us <= alone.makespan_us
            assert plan.cap_bytes is None or plan.peak_bytes <= plan.cap_bytes == alone.cap_bytes


def test_a_larger_cap_is_never_slower_with_buckets():
    with fcoll.fake_world(dp=8) as mesh:
        graph = graph_of(8, mesh.get_group("dp").group_name)
        caps = ("+0%", "+3%", "+8%", "+25%", "+60%", None)
        times = [fcoll.schedule(graph, memory_cap=cap).makespan_us for cap in caps]
        assert times == sorted(times, reverse=True) and times[-1] < times[0]


def test_given_prices_make_no_buckets():
    with fcoll.fake_world(dp=8) as mesh:
        graph = graph_of(8, mesh.get_group("dp").group_name)
        costs = {node.name: 1.0 for node in graph.graph.nodes}
        assert not fcoll.schedule(graph, costs=costs, memory_cap=None).buckets


def test_a_bucket_holds_what_saturates_the_link():
    with fcoll.fake_world(dp=8) as mesh:
        graph = graph_of(8, mesh.get_group("dp").group_name)
        calls = collectives_of(graph)
        machine = Machine.of("h100")
        ready = sorted(graph.graph.nodes, key=lambda n: "wait" in n.name)  # all is under way
        for times, found in zip((4.0, 32.0), proposals(ready, calls, machine), strict=False):
            most = {c.op: times * saturating_bytes(c, machine) for c in calls}
            assert all(b.bytes <= most[b.op] and len(b.members) > 1 for b in found)
            assert len({(b.op, b.group, b.dtype) for b in found}) == 3


def values_with_buckets(rank):
    n, group = dist.get_world_size(), dist.group.WORLD.group_name
    graph = graph_of(n, group)
    plan = fcoll.schedule(graph, memory_cap=None)
    assert {b.op for b in plan.buckets} >= {"all_reduce", "reduce_scatter_tensor"}
    torch.manual_seed(rank)
    inputs = [torch.rand(WIDTH, WIDTH) / WIDTH] + [torch.rand(WIDTH // n, WIDTH) for _ in range(8)]
    for one, other in zip(graph(*inputs), plan.apply()(*inputs), strict=True):
        assert torch.equal(one, other)
    return plan.digest


def test_the_same_values_with_buckets(ranks2):
    assert len(set(ranks2.run(values_with_buckets))) == 1
