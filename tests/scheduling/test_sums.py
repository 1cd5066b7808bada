"""Products over rows summed chunk by chunk: only where they are asked for, and proved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import row_programs as rows
import torch
from test_splits import SLOW, same_values, starts_of

import fcoll
from fcoll.errors import BadPlan
from fcoll.scheduling import graph_changes
from fcoll.scheduling.splits import grown, split_graph
from fcoll.scheduling.value_moves import Unsure
from fcoll.scheduling.verified_plan import Plan
from fcoll.scheduling.verify_changes import check_changes
from fcoll.scheduling.verify_graphs import Side

aten = torch.ops.aten


def summed(n: int, group: str, k: int = 2):
    graph = rows.graph_of(rows.rows_parallel, n, group)
    us = {node.name: 1.0 for node in graph.graph.nodes}
    splits = grown(graph, dict.fromkeys(starts_of(graph), k), us, 100.0, sums=True)
    return graph, splits, split_graph(graph, splits)


def check(graph, made, splits) -> None:
    def fail(why: str):
        raise BadPlan(scheduler="test", why=why)

    check_changes(Side(graph.graph.nodes), made.graph.nodes, splits, (), (), fail)


@pytest.mark.parametrize(("n", "k"), [(2, 2), (4, 2), (2, 4)])
def test_the_same_values(n, k):
    with fcoll.fake_world(tp=n) as mesh:
        graph, splits, made = summed(n, mesh.get_group("tp").group_name, k)
        assert [name for split in splits for name in split.sums] == ["mm_6"]
        check(graph, made, splits)
        same_values(graph, made, n)


def test_only_where_sums_are_asked_for(tmp_path, monkeypatch):
    # Without sums these splits are at least as fast: have them proposed with sums only.
    monkeypatch.setattr(graph_changes, "_with_and_without_sums", list)
    with fcoll.fake_world(tp=4) as mesh:
        graph = rows.graph_of(rows.rows_parallel, 4, mesh.get_group("tp").group_name)
        for splits in (None, True):
            plan = fcoll.schedule(graph, SLOW, memory_cap=None, splits=splits)
            assert plan.splits and not any(split.sums for split in plan.splits)
        plan = fcoll.schedule(graph, SLOW, memory_cap=None, splits="sums")
        assert any(split.sums for split in plan.splits)
        same_values(graph, plan.apply(), 4)
        assert "adds chunk 2 of" in plan.explain("mm_6_c1") and "mm_6_c0" in plan.explain("mm_6")
        plan.save(tmp_path / "plan.json")
        again = Plan.load(tmp_path / "plan.json", graph)
        assert again.digest == plan.digest
        same_values(graph, again.apply(), 4)


def the_first_chunk_is_left_out(nodes):
    nodes["mm_6_c1"].args = (nodes["wait_tensor_c0"], *nodes["mm_6_c1"].args[1:])


def a_chunk_is_added_twice(nodes):
    nodes["mm_6_c1"].args = (nodes["mm_6_c0"], *nodes["mm_6_c0"].args)


def chunks_of_different_numbers(nodes):
    nodes["mm_6_c1"].args = (*nodes["mm_6_c1"].args[:2], nodes["mm_6_c0"].args[1])


def it_is_added_only_half(nodes):
    nodes["mm_6_c1"].kwargs = {"beta": 0.5}


def the_chunk_is_not_turned(nodes):
    nodes["mm_6_c0"].args = (nodes["mm_6_t0"].args[0], nodes["mm_6_c0"].args[1])


def it_is_another_product(nodes):
    nodes["mm_6_c0"].target = aten.mul.Tensor


MUTATIONS = [
    *(the_first_chunk_is_left_out, a_chunk_is_added_twice, chunks_of_different_numbers),
    *(it_is_added_only_half, the_chunk_is_not_turned, it_is_another_product),
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_a_wrong_sum_is_found(mutate):
    with fcoll.fake_world(tp=4) as mesh:
        graph, splits, made = summed(4, mesh.get_group("tp").group_name)
        nodes = {node.name: node for node in made.graph.nodes}
        mutate(nodes)
        with pytest.raises((BadPlan, Unsure)):
            check(graph, made, splits)


def test_a_sum_that_is_not_there_or_of_something_else():
    with fcoll.fake_world(tp=4) as mesh:
        graph, splits, made = summed(4, mesh.get_group("tp").group_name)
        for wrong in ((), ("mm",), ("mm_6", "mm_1")):
            with pytest.raises((BadPlan, Unsure)):
                check(graph, made, [replace(s, sums=wrong if s.sums else ()) for s in splits])
