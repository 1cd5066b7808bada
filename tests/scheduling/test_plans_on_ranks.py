"""Planned graphs, with buckets and splits, on simulated ranks: the values do not change.

Each rank traces, plans and runs with the groups of its own world. The values are those of the
original graph on the same ranks, and of plain formulas (stacked_ranks).
"""

from __future__ import annotations

import pytest
import row_programs as rows
import stacked_ranks
import test_buckets as buckets
import torch
import torch.distributed as dist
from test_splits import SLOW

import fcoll
from fcoll.graph.nodes import is_start


def calls(graph) -> int:
    return sum(map(is_start, graph.graph.nodes))


def mesh_group(n: int):
    """The group that a graph's collectives are on: rows of a mesh of two such."""
    mesh = dist.init_device_mesh("cpu", (2, n), mesh_dim_names=("dp", "tp"))
    return mesh.get_group("tp").group_name


def same(results, others) -> None:
    for one, other in zip(results, others, strict=True):
        assert len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("program", rows.SHAPES, ids=lambda p: p.__name__)
def test_the_same_values_with_splits(program):
    n, graphs = 2, {}

    def run(rank):
        graph = rows.graph_of(program, n, mesh_group(n))
        plan = fcoll.schedule(graph, SLOW, memory_cap=None)
        made = plan.apply()
        graphs[rank] = graph, made, plan
        inputs = rows.inputs_of(graph, rank)
        return made(*inputs), graph(*inputs)

    results = fcoll.simulate_ranks(run, 2 * n)
    same([made for made, _ in results], [whole for _, whole in results])
    graph, made, plan = graphs[0]
    assert bool(plan.splits) == (calls(made) > calls(graph))
    for row in ((0, 1), (2, 3)):  # the two groups, each by itself
        inputs = [rows.inputs_of(graph, rank) for rank in row]
        same([results[rank][0] for rank in row], stacked_ranks.run(graph, inputs))


def test_some_of_them_have_splits():
    with fcoll.fake_world(dp=2, tp=2) as mesh:
        group = mesh.get_group("tp").group_name
        plans = [
            fcoll.schedule(rows.graph_of(p, 2, group), SLOW, memory_cap=None) for p in rows.SHAPES
        ]
    assert sum(bool(plan.splits) for plan in plans) >= 3


def test_the_same_values_with_buckets_on_ranks():
    n, width = 4, buckets.WIDTH

    def run(rank):
        graph = buckets.graph_of(n, dist.group.WORLD.group_name)
        plan = fcoll.schedule(graph, memory_cap=None)
        made = plan.apply()
        assert plan.buckets and calls(made) < calls(graph)
        torch.manual_seed(rank)
        inputs = [torch.rand(width, width) / width]
        inputs += [torch.rand(width // n, width) for _ in range(8)]
        return made(*inputs), graph(*inputs), plan.digest

    results = fcoll.simulate_ranks(run, n)
    same([made for made, *_ in results], [whole for _, whole, _ in results])
    assert len({digest for *_, digest in results}) == 1
    one, other = results[0][0], results[1][0]
    assert not torch.equal(one[1], other[1]), "the ranks have values of their own"


def test_a_wrong_plan_would_be_seen():
    """Ranks that run graphs of other orders do not meet: values are not compared by chance."""

    def run(rank):
        graph = buckets.graph_of(2, dist.group.WORLD.group_name)
        made = fcoll.schedule(graph, memory_cap=None).apply() if rank else graph
        inputs = [torch.ones(buckets.WIDTH, buckets.WIDTH)]
        return made(*inputs, *[torch.ones(buckets.WIDTH // 2, buckets.WIDTH)] * 8)

    with pytest.raises(fcoll.errors.CollectiveMismatch, match="rank"):
        fcoll.simulate_ranks(run, 2)
