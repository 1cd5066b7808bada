"""The vocabulary of graphs: starts, waits, arguments, and a graph that is not sound."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll.errors import NeverWaited
from fcoll.graph.nodes import arguments, collectives, is_used, is_wait, start_of, waits_of
from fcoll.graph.soundness import verify


def traced(fn, *args) -> torch.fx.Graph:
    with fcoll.fake_world(tp=4):
        return make_fx(fn, tracing_mode="fake")(*args).graph


def test_a_start_its_wait_and_its_arguments():
    graph = traced(lambda x: fcoll.all_reduce(x, "max") + 1, torch.ones(3))
    ((start, row),) = collectives(graph)
    (wait,) = waits_of(start)
    assert row.name == "all_reduce" and is_wait(wait) and start_of(wait) is start
    found = arguments(start)
    assert found["reduce_op"] == "max" and found["grad"] == "sum"
    assert is_used(start)


def test_waits_are_found_through_lists():
    graph = traced(lambda x: fcoll.all_reduce_coalesced([x, x])[1], torch.ones(3))
    ((start, _),) = collectives(graph)
    waits = waits_of(start)
    assert len(waits) == 2 and {start_of(w) for w in waits} == {start}


def test_a_result_that_is_used_without_a_wait_is_not_sound():
    op = torch.ops.fcoll.all_reduce
    with fcoll.fake_world(tp=4):
        good = make_fx(lambda x: fcoll.all_reduce(x))(torch.ones(3)).graph
        name = "world"
        bad = make_fx(lambda x: op(x, "sum", name) + 1, tracing_mode="fake")(torch.ones(3)).graph
        verify(good)
        with pytest.raises(NeverWaited, match="all_reduce"):
            verify(bad)
        verify(bad, is_complete=lambda node: True)
