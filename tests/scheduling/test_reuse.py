"""Collectives that have run before on the same data: left out where memory allows, values equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import row_programs as rows
import stacked_ranks
import torch

import fcoll
from fcoll.costs.machine import Link, Machine
from fcoll.errors import BadPlan
from fcoll.graph.nodes import is_start
from fcoll.scheduling.reuse import Reuse, repeated, without
from fcoll.scheduling.verified_plan import verify_plan

N = 4
#: Slow links: what is not sent is time saved.
SLOW = Machine(
    "slow", {"float64": 1.0}, memory_gb_per_s=1e3, intra=Link(0.0, 1e-2), inter=Link(0.0, 1e-2),
    launch_us=0.02, collective_us=0.02,
)  # fmt: skip


def whole(w, n, group):
    part = w[: rows.D // n].clone(memory_format=torch.contiguous_format)
    return rows.gathered(part, n, group)


def forward_and_backward(x, w, n, group):
    """Parameters are gathered for each pass, as FSDP does; large values live in between."""
    first = (x @ whole(w, n, group)).relu()
    second = first @ whole(w.t(), n, group)
    kept = torch.cat([second] * 40)
    back = kept.sum(0) * (second @ whole(w.t(), n, group))
    return back @ whole(w, n, group), first


def twice_with_a_write(x, w, n, group):
    """The parameter is updated in between: another value is gathered."""
    y = x @ rows.gathered(w, n, group)[: rows.D]
    w.view(-1).add_(1)
    return y @ rows.gathered(w, n, group)[: rows.D]


def result_is_written(x, w, n, group):
    y = rows.gathered(w, n, group)
    y.view(-1).mul_(2)
    return x @ y[: rows.D] @ rows.gathered(w, n, group)[: rows.D]


def result_leaves(x, w, n, group):
    return rows.gathered(w, n, group), x @ rows.gathered(w, n, group)[: rows.D]


def both_leave(x, w, n, group):
    return rows.gathered(w, n, group), rows.gathered(w, n, group)


def three_times(x, w, n, group):
    """The last update comes behind all of them."""
    for _ in range(3):
        x = (x @ rows.gathered(w, n, group)[: rows.D]).relu()
    w.view(-1).add_(1)
    return (x,)


def starts(module) -> int:
    return sum(map(is_start, module.graph.nodes))


def values(module, graph) -> list:
    return stacked_ranks.run(module, [rows.inputs_of(graph, rank) for rank in range(N)])


def same(one, other) -> bool:
    pairs = [(a, b) for mine, theirs in zip(one, other, strict=True)
             for a, b in zip(mine, theirs, strict=True)]  # fmt: skip
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def group():
    with fcoll.fake_world(tp=N) as mesh:
        yield mesh.get_group("tp").group_name


def test_left_out_where_there_is_room(group):
    graph = rows.graph_of(forward_and_backward, N, group)
    plan = fcoll.schedule(graph, SLOW, memory_cap=None, buckets=False, splits=False)
    assert len(plan.reuses) == 2 and starts(plan.apply()) == starts(graph) - 2
    assert same(values(plan.apply(), graph), values(graph, graph))
    alone = fcoll.schedule(graph, SLOW, memory_cap=None, reuse=False, buckets=False, splits=False)
    assert not alone.reuses and plan.makespan_us < alone.makespan_us
    assert "2 collectives are left out" in str(plan) and plan.digest != alone.digest


def test_a_smaller_cap_leaves_out_less_and_is_never_faster(group):
    graph = rows.graph_of(forward_and_backward, N, group)
    free = fcoll.schedule(graph, SLOW, memory_cap=None)
    least = fcoll.schedule(graph, SLOW, memory_cap="+0%", reuse=False)
    found = []
    for cap in range(least.original_peak_bytes, free.peak_bytes + 512, 256):
        plan = fcoll.schedule(graph, SLOW, memory_cap=cap)
        assert plan.peak_bytes <= cap
        found.append((plan.makespan_us, len(plan.reuses)))
    assert found == sorted(found, reverse=True)
    assert found[0][1] < found[-1][1] == 2


@pytest.mark.parametrize(
    "program", [twice_with_a_write, result_is_written, result_leaves, both_leave]
)
def test_not_where_memory_is_written_or_leaves(program, group):
    graph = rows.graph_of(program, N, group)
    assert starts(graph) == 2 and repeated(graph) == []
    plan = fcoll.schedule(graph, SLOW, memory_cap=None)
    assert same(values(plan.apply(), graph), values(graph, graph))


def test_three_of_one(group):
    graph = rows.graph_of(three_times, N, group)
    found = repeated(graph)
    assert len(found) == 2
    for some in (found, found[:1], found[1:]):
        made = without(graph, some)
        assert starts(made) == 3 - len(some)
        assert same(values(made, graph), values(graph, graph))


def test_saved_and_loaded(group, tmp_path):
    graph = rows.graph_of(forward_and_backward, N, group)
    plan = fcoll.schedule(graph, SLOW, memory_cap=None)
    plan.save(tmp_path / "plan.json")
    again = fcoll.scheduling.verified_plan.Plan.load(tmp_path / "plan.json", graph)
    assert again.reuses == plan.reuses and again.digest == plan.digest
    assert same(values(again.apply(), graph), values(graph, graph))


def pretended(program, group):
    """A plan of a graph from which the second collective was taken, whatever that does."""
    graph = rows.graph_of(program, N, group)
    plan = fcoll.schedule(graph, SLOW, memory_cap=None, reuse=False)
    one, two = (node for node in graph.graph.nodes if is_start(node))
    waits = [next(iter(node.users)).name for node in (one, two)]
    wrong = Reuse(two.name, one.name, ((two.name, one.name), (waits[1], waits[0])))
    made = without(graph, [wrong])
    left = fcoll.schedule(made, SLOW, memory_cap=None, reuse=False)
    return replace(left, source=graph, reuses=(wrong,)), plan


@pytest.mark.parametrize("program", [twice_with_a_write, result_is_written, both_leave])
def test_the_verifier_finds_what_must_not_be_left_out(program, group):
    wrong, right = pretended(program, group)
    verify_plan(right)
    with pytest.raises(BadPlan, match=r"takes .* where it took|share memory now"):
        verify_plan(wrong)


def test_the_verifier_proves_more_than_the_planner_leaves_out(group):
    """The result that is kept leaves the graph, and nothing else that leaves it lies there."""
    plan, _ = pretended(result_leaves, group)
    verify_plan(plan)
    assert same(values(plan.apply(), plan.source), values(plan.source, plan.source))
    with pytest.raises(BadPlan, match="others than the plan says"):
        verify_plan(replace(plan, reuses=()))


def test_the_verifier_finds_another_value(group):
    def other(x, w, n, group):
        y = x @ rows.gathered(w, n, group)[: rows.D]
        return y @ rows.gathered(w * 2, n, group)[: rows.D]

    wrong, _ = pretended(other, group)
    with pytest.raises(BadPlan, match=r"takes .* where it took"):
        verify_plan(wrong)
