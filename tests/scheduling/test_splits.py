"""Collectives and products in chunks: the same values, faster by the model, proved."""

from __future__ import annotations

import pytest
import row_programs as rows
import stacked_ranks
import torch
import torch.distributed as dist

import fcoll
from fcoll.costs.machine import Link, Machine
from fcoll.graph.nodes import is_start
from fcoll.scheduling.chunks import chunk_dim, chunk_shape
from fcoll.scheduling.splits import Infeasible, grown, split_graph

#: Slow at everything, so that small programs have something to hide.
SLOW = Machine(
    "slow", {"float64": 1e-3}, memory_gb_per_s=1e3, intra=Link(0.0, 0.3), inter=Link(0.0, 0.3),
    launch_us=0.02, collective_us=0.02,
)  # fmt: skip


def starts_of(graph) -> list[str]:
    return [node.name for node in graph.graph.nodes if is_start(node)]


def same_values(graph, made, n: int) -> None:
    inputs = [rows.inputs_of(graph, rank) for rank in range(n)]
    for mine, theirs in zip(
        stacked_ranks.run(made, inputs), stacked_ranks.run(graph, inputs), strict=True
    ):
        assert len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def test_where_the_rows_of_chunks_are():
    x = torch.arange(2 * 8 * 3).view(2, 8, 3)
    for blocks, k in ((1, 2), (2, 2), (2, 4), (4, 2), (8, 2)):
        d = chunk_dim(x.shape, blocks, k)
        parts = [x.reshape(blocks, k, -1)[:, j] for j in range(k)]
        assert d is not None
        assert all(p.numel() == torch.Size(chunk_shape(x.shape, blocks, k)).numel() for p in parts)
    assert chunk_dim(x.shape, 16, 2) is None and chunk_dim((5,), 1, 2) is None


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("program", rows.SHAPES, ids=lambda p: p.__name__)
def test_the_same_values_in_chunks(program, k, n):
    with fcoll.fake_world(tp=n) as mesh:
        graph = rows.graph_of(program, n, mesh.get_group("tp").group_name)
        made = 0
        for reach in (0.0, 1.0, 100.0):
            for some in (starts_of(graph), starts_of(graph)[1:], starts_of(graph)[:1]):
                us = {node.name: 1.0 for node in graph.graph.nodes}
                splits = grown(graph, dict.fromkeys(some, k), us, reach)
                made += len(splits)
                if splits:
                    changed = split_graph(graph, splits)
                    assert len(starts_of(changed)) > len(starts_of(graph))
                    same_values(graph, changed, n)
                    verdict = fcoll.verify(graph, changed)
                    assert verdict, str(verdict)
    assert made


@pytest.mark.parametrize("seed", range(20))
def test_the_same_values_of_random_programs(seed):
    n = 2 + 2 * (seed % 2)
    with fcoll.fake_world(tp=n) as mesh:
        graph = rows.graph_of(rows.random_program(seed), n, mesh.get_group("tp").group_name)
        us = {node.name: 1.0 for node in graph.graph.nodes}
        for k in (2, 4):
            splits = grown(graph, dict.fromkeys(starts_of(graph), k), us, 100.0)
            try:
                made = split_graph(graph, splits)
            except Infeasible:
                continue
            same_values(graph, made, n)
            verdict = fcoll.verify(graph, made)
            assert verdict, str(verdict)
        plan = fcoll.schedule(graph, SLOW, memory_cap=None)
        same_values(graph, plan.apply(), n)


# -- plans ---


def planned(program=rows.tensor_parallel, n=4, **options):
    """A plan of a program; it may be looked at when the world is gone."""
    with fcoll.fake_world(tp=n) as mesh:
        graph = rows.graph_of(program, n, mesh.get_group("tp").group_name)
        return graph, fcoll.schedule(graph, SLOW, **{"memory_cap": None, **options})


@pytest.mark.parametrize(
    "program",
    [rows.tensor_parallel, rows.sequence_parallel, rows.experts],
    ids=lambda p: p.__name__,
)
def test_a_plan_with_splits_is_faster(program):
    graph, plan = planned(program)
    _, alone = planned(program, splits=False)
    assert plan.splits and not alone.splits
    assert plan.makespan_us < 0.9 * alone.makespan_us
    assert plan.makespan_us >= plan.lower_bound_us - 1e-6
    assert plan.original_us == alone.original_us
    assert "collectives are in chunks" in str(plan)
    assert [node.name for node in plan.apply().graph.nodes] == list(plan.order)
    same_values(graph, plan.apply(), 4)


def test_a_larger_cap_is_never_slower_with_splits():
    caps = ("+0%", "+5%", "+12%", "+30%", "+100%", None)
    plans = [planned(memory_cap=cap)[1] for cap in caps]
    times = [plan.makespan_us for plan in plans]
    assert times == sorted(times, reverse=True) and times[-1] < times[0]
    assert all(p.cap_bytes is None or p.peak_bytes <= p.cap_bytes for p in plans)


def test_plans_with_splits_are_kept_and_read_again(tmp_path):
    graph, plan = planned()
    plan.save(tmp_path / "plan.json")
    again = fcoll.Plan.load(tmp_path / "plan.json", graph)
    assert again.splits == plan.splits and again.digest == plan.digest == planned()[1].digest
    assert again.apply().code == plan.apply().code
    assert planned(splits=False)[1].digest != plan.digest


def test_explain_speaks_of_chunks():
    _, plan = planned()
    name = plan.splits[0].collectives[0]
    k = plan.splits[0].chunks
    text = plan.explain(name)
    assert f"{name}: all_reduce in {k} chunks" in text
    assert "starts after its first chunk" in text
    assert f"chunk 1 of {k} of {name}" in plan.explain(f"{name}_c0")


def test_prices_by_name_change_nothing_unless_asked():
    graph, _ = planned()
    costs = {node.name: 10.0 for node in graph.graph.nodes if node.op == "call_function"}
    _, plan = planned(costs=costs)
    assert not plan.splits and sorted(plan.order) == sorted(n.name for n in graph.graph.nodes)
    _, asked = planned(costs=costs, splits=True, buckets=True)
    assert asked.splits and asked.makespan_us < plan.makespan_us
    for split in asked.splits:
        for name in (n for n in split.members if f"{n}_c0" in asked.us):
            chunks = [asked.us[f"{name}_c{j}"] for j in range(split.chunks)]
            assert sum(chunks) >= costs[name]


def values_in_chunks(rank):
    """One program by its plan, the others with all splits that can be made."""
    n, group = dist.get_world_size(), dist.group.WORLD.group_name
    for program in (rows.sequence_parallel, rows.rows_parallel, rows.experts):
        graph = rows.graph_of(program, n, group)
        us = {node.name: 1.0 for node in graph.graph.nodes}
        made = split_graph(graph, grown(graph, dict.fromkeys(starts_of(graph), 2), us, 100.0))
        assert len(starts_of(made)) > len(starts_of(graph))
        same_on_this_rank(graph, made, rank)
    graph = rows.graph_of(rows.tensor_parallel, n, group)
    plan = fcoll.schedule(graph, SLOW, memory_cap=None)
    assert plan.splits
    same_on_this_rank(graph, plan.apply(), rank)
    return plan.digest


def same_on_this_rank(graph, made, rank) -> None:
    inputs = rows.inputs_of(graph, rank)
    assert all(map(torch.equal, graph(*inputs), made(*inputs)))


def test_the_same_values_on_real_ranks(ranks):
    assert len(set(ranks.run(values_in_chunks))) == 1
