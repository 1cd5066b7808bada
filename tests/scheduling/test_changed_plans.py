"""Plans with all changes, under every cap: proved, the same values, under the cap, never slower."""

from __future__ import annotations

import pytest
import row_programs as rows
import torch
from test_splits import SLOW, same_values, starts_of
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll.scheduling import planner
from fcoll.scheduling.priced import Budget

CAPS = ("+0%", None)


def training_step(seed: int, layers: int):
    """Layers as tensor parallel steps have them, and as FSDP: gathered twice, with the gradients of
    weights as products over rows. What is kept, and what of it is sent, is the seed's."""

    def program(x, w, n, group):
        part = w[: rows.D // n].contiguous()
        saved = []
        for i in range(layers):
            h = rows.gathered(x.remainder(3), n, group)
            weight = rows.gathered(part, n, group) if seed % 2 else w
            a = (h @ weight).relu()
            x = x + rows.scattered(a @ w, n, group).remainder(5)
            saved.append((h, a))
            if seed % 3 == 2 and i % 2:
                x = rows.reduced(x.remainder(2), group)
        out, grad = [], x
        for h, a in reversed(saved):
            d = rows.gathered(grad.remainder(3), n, group)
            weight = rows.gathered(part, n, group) if seed % 2 else w
            da = (d @ w.t()).remainder(3)
            out.append(rows.reduced(a.t() @ d, group) if seed % 5 else a.t() @ d)
            out.append(h.t() @ da)
            grad = grad + rows.scattered(da @ weight.t(), n, group).remainder(2)
        return (grad, *out)

    return program


def cheap(monkeypatch) -> None:
    """Few changed graphs: the test is not of the best plan."""
    monkeypatch.setattr(planner, "ASKED_FOR", Budget(700, 500))
    monkeypatch.setattr(planner, "BY_DEFAULT", Budget(600, 400))


@pytest.mark.parametrize("splits", [None, True, "sums"])
@pytest.mark.parametrize(("seed", "layers"), [(1, 2), (2, 5)])
def test_plans_under_every_cap(seed, layers, splits, monkeypatch):
    cheap(monkeypatch)
    n, before = 2 + 2 * (seed % 2), None
    with fcoll.fake_world(tp=n) as mesh:
        graph = rows.graph_of(training_step(seed, layers), n, mesh.get_group("tp").group_name)
        change = {} if splits is None else {"buckets": True, "reuse": True, "splits": splits}
        digests = set()
        for cap in CAPS:
            plan = fcoll.schedule(graph, SLOW, memory_cap=cap, **change)
            plan.verify()
            assert plan.makespan_us <= plan.original_us
            assert before is None or plan.makespan_us <= before * (1 + 1e-9)
            assert plan.cap_bytes is None or plan.peak_bytes <= plan.cap_bytes
            assert splits == "sums" or not any(split.sums for split in plan.splits)
            before = plan.makespan_us
            if plan.digest not in digests:
                same_values(graph, plan.apply(), n)
            digests.add(plan.digest)
        assert plan.splits or plan.reuses or plan.buckets


def test_a_graph_that_was_traced_with_real_tensors():
    """Its values have a fake mode each."""
    x = torch.ones(16, rows.D, dtype=torch.float64)
    w = torch.ones(rows.D, rows.D, dtype=torch.float64)
    with fcoll.fake_world(tp=2) as mesh:
        group = mesh.get_group("tp").group_name
        graph = make_fx(lambda x, w: rows.rows_parallel(x, w, 2, group))(x, w)
        plan = fcoll.schedule(graph, SLOW, memory_cap=None)
        assert plan.splits
        same_values(graph, plan.apply(), 2)


@pytest.mark.parametrize("seed", range(2))
def test_given_prices(seed, monkeypatch):
    """Random times by name: what comes of them is priced by them."""
    cheap(monkeypatch)
    made = torch.Generator().manual_seed(seed)
    with fcoll.fake_world(tp=2) as mesh:
        graph = rows.graph_of(training_step(seed, 2), 2, mesh.get_group("tp").group_name)
        names = [node.name for node in graph.graph.nodes if node.op == "call_function"]
        us = (20 * torch.rand(len(names), generator=made, dtype=torch.float64)).tolist()
        costs = dict(zip(names, us, strict=True)) | {x: 0.0 for x in names if "wait" in x}
        as_it_is = fcoll.schedule(graph, SLOW, costs, memory_cap=None)
        assert set(as_it_is.order) == {node.name for node in graph.graph.nodes}
        plan = fcoll.schedule(
            graph, SLOW, costs, memory_cap=None, splits=True, buckets=True, reuse=True
        )
        assert plan.makespan_us <= as_it_is.makespan_us <= as_it_is.original_us
        assert len(starts_of(graph)) and plan.original_us == as_it_is.original_us
        same_values(graph, plan.apply(), 2)


def test_arguments_that_are_none():
    with fcoll.fake_world(tp=2) as mesh:
        graph = rows.graph_of(training_step(0, 1), 2, mesh.get_group("tp").group_name)
        with pytest.raises(fcoll.errors.BadOption, match="splits='exact'"):
            fcoll.schedule(graph, SLOW, splits="exact")
        with pytest.raises(fcoll.errors.BadOption, match="costs=5"):
            fcoll.schedule(graph, SLOW, costs=5)
        with pytest.raises(fcoll.errors.BadOption, match="trace='Linear'"):
            fcoll.schedule(torch.nn.Linear(2, 2))
