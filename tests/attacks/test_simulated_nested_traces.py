"""A trace that a traced step makes is no part of that step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fcoll


@pytest.mark.parametrize("inner_mode", ["joint", "forward", "compiled"])
@pytest.mark.parametrize("own_backward", [False, True])
def test_the_inner_ones_calls_and_backward_are_its_own(inner_mode, own_backward):
    def part(x):
        loss = fcoll.all_reduce(x.relu(), "sum").sum()
        if inner_mode == "joint":
            loss.backward()
        return loss

    def step(x, looks):
        if looks:
            inner = fcoll.trace(part, x.detach().requires_grad_(), mode=inner_mode)
            assert len(inner.collectives) == 1 + (inner_mode != "forward")
        loss = fcoll.all_reduce(model(x).sum(), "sum")
        if own_backward:
            loss.backward()
        return loss

    with fcoll.fake_world(dp=4):
        model = nn.Linear(4, 4)
        alone, with_another = (fcoll.trace(step, torch.ones(3, 4), x) for x in (False, True))
    assert with_another.diff(alone).same
    graphs = [t.graph_module.graph for t in (alone, with_another)]
    calls = [[n.target for n in g.nodes if n.op == "call_function"] for g in graphs]
    assert calls[0] == calls[1]
    assert with_another.own_backward == own_backward
