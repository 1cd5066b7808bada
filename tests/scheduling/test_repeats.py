"""Layers that repeat: what is chosen on a few of them is done in all."""

from __future__ import annotations

import random

import pytest
import row_programs as rows
import torch
import torch.distributed._functional_collectives as funcol
from test_splits import SLOW, same_values, starts_of
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll.scheduling.repeats import KEPT, fewer_layers, like, runs
from fcoll.scheduling.split_choice import kind


def layers(count: int):
    """So many of rows_parallel's second half, one behind the other."""

    def program(x, w, n, group):
        for _ in range(count):
            h = rows.gathered(x * 2, n, group)
            x = x + rows.scattered((h @ w).relu() @ w, n, group).remainder(5)
        return x

    return program


@pytest.mark.parametrize("seed", range(10))
def test_runs_are_found_between_other_things(seed):
    rng = random.Random(seed)
    forward, backward = ([f"{x}{i}" for i in range(rng.randint(3, 9))] for x in "fb")
    count = rng.randint(2 * KEPT + 1, 12)
    row = ["first", *forward * count, "loss", *backward * count, "last"]
    found = [(run.begin, run.period, run.count) for run in runs(row)]
    behind = 2 + len(forward) * count
    assert found == [(1, len(forward), count), (behind, len(backward), count)]


def test_without_repetition_there_are_no_runs():
    assert runs(range(50)) == [] and runs("") == [] and runs("abab") == []


def test_a_smaller_graph_has_the_layers_at_both_ends():
    with fcoll.fake_world(tp=2) as mesh:
        group = mesh.get_group("tp").group_name
        graph = rows.graph_of(layers(12), 2, group)
        small = fewer_layers(graph)
        assert small is not None
        kept = {node.name for node in small.graph.nodes}
        starts = starts_of(graph)
        ends = [*starts[: 2 * KEPT], *starts[-2 * KEPT :]]  # two collectives a layer
        assert [name for name in starts if name in kept] == ends
        calls, few = (
            [node for node in module.graph.nodes if node.op == "call_function"]
            for module in (graph, small)
        )
        assert set(map(like, few)) == set(map(like, calls))
        kinds = {kind(node) for node in calls if node.name in starts}
        assert {kind(node) for node in few if node.name in starts} == kinds
        small.graph.lint()
        assert fewer_layers(rows.graph_of(layers(3), 2, group)) is None


def test_every_layer_is_changed_and_the_values_are_the_same():
    with fcoll.fake_world(tp=2) as mesh:
        graph = rows.graph_of(layers(12), 2, mesh.get_group("tp").group_name)
        plan = fcoll.schedule(graph, SLOW, memory_cap=None)
        assert plan.makespan_us < plan.original_us
        assert sum(len(split.collectives) for split in plan.splits) >= 20
        same_values(graph, plan.apply(), 2)


def test_graphs_with_symbols_for_sizes_are_planned():
    def program(x):
        for _ in range(6):
            y = funcol.all_reduce(x * 2, "sum", group)
            x = y @ y.t() @ x
        return x

    with fcoll.fake_world(tp=2) as mesh:
        group = mesh.get_group("tp")
        graph = make_fx(program, tracing_mode="symbolic")(torch.randn(6, 4))
        assert fewer_layers(graph) is not None
        plan = fcoll.schedule(graph, machine="h100")
        assert plan.makespan_us <= plan.original_us
