"""Compiled steps whose ranks do not run the same graphs once got another call's data."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import fcoll
import inductor_ext
from inductor_ext.lower import ir
from inductor_ext.lowered import lane_disagreements

pytestmark = pytest.mark.usefixtures("compiled")


def uses_differ(rank):
    """The ranks' graphs have the same collectives and read them at other places."""
    torch._dynamo.reset()

    def step(x):
        a = fcoll.all_reduce(x)
        c = fcoll.all_reduce(x * a.sum())
        return c + a if rank else c * 2

    def chain(x, w):
        a = fcoll.all_reduce(x.double() * 3)
        h = x
        for _ in range(66):
            h = fcoll.all_reduce(h @ w)
        return a.sum() + h.sum() * 0

    x, w = torch.full((4, 4), rank + 1.0), torch.eye(4) * 0.5
    with inductor_ext.config.patch(compare=False):
        for _ in range(2):
            torch.compile(step, backend="fcoll")(x)
        found = [torch.compile(chain, backend="fcoll")(x, w).item() for _ in range(2)]
    return found, lane_disagreements(torch.distributed.group.WORLD.group_name)


def test_parts_are_those_of_their_call_after_ranks_ran_other_graphs(shared2):
    for found, disagreed in shared2.run(uses_differ, timeout=170):
        assert found == [16 * 3 * 3.0] * 2
        assert disagreed > 0


def many_at_once(rank, count):
    """All but six of the lanes seem to be taken."""
    torch._dynamo.reset()
    taken = {lane: (None, None) for lane in range(250)}

    def program(xs):
        parts = [fcoll.all_reduce(x + 1) for x in xs]
        return [part * 2 for part in reversed(parts)]

    xs = [torch.full((2,), float(i + rank)) for i in range(count)]
    in_order = inductor_ext.config.patch(schedule=None, merge_bytes=0)
    with torch.no_grad(), in_order, mock.patch.object(ir, "lanes", lambda: taken):
        found = torch.compile(program, backend="fcoll")(xs)
    return [y[0].item() for y in reversed(found)]


def test_more_collectives_at_once_than_lanes_and_spare_places(shared2):
    count = 80
    expected = [2.0 * (2 * i + 3) for i in range(count)]
    assert shared2.run(many_at_once, count, timeout=170) == [expected] * 2
