"""What sizes are taken to be that only a run knows."""

from __future__ import annotations

import torch

import fcoll
from fcoll.graph.symbolic_sizes import Hints


def test_a_split_by_counts_that_only_a_run_knows_has_equal_parts():
    with fcoll.fake_world(ep=2) as mesh:

        def step(x: torch.Tensor) -> torch.Tensor:
            counts = torch.nn.functional.one_hot(x.argmax(1), 4).sum(0)
            received = fcoll.all_to_all_single(counts, mesh)
            sends, receives = (c.view(2, 2).sum(1).tolist() for c in (counts, received))
            rows = fcoll.all_to_all_single(x, mesh, receives, sends)
            of_experts = received.view(2, 2).sum(0).tolist()
            return torch.cat([part.relu() for part in rows.split(of_experts)])

        trace = fcoll.trace(step, torch.ones(12, 4))
        assert trace.steps  # they need a number for every size
    nodes = [n for n in trace.graph_module.graph.nodes if "relu" in n.name]
    assert [Hints(trace.sizes)(n.meta["val"].shape[0]) for n in nodes] == [6, 6]


def test_a_group_without_a_name_is_shown_by_its_ranks():
    with fcoll.fake_world(pp=8) as mesh:
        ends = torch.distributed.new_group([0, 7])
        trace = fcoll.trace(lambda x: fcoll.all_reduce(x, "sum", ends), torch.ones(4))
        named = fcoll.trace(lambda x: fcoll.all_reduce(x, "sum", mesh), torch.ones(4))
    assert trace.collectives[0].label == "ranks 0,7"
    assert "ranks 0,7" in str(trace)
    assert named.collectives[0].label == "pp"
