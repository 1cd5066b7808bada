"""A generator or coroutine function given in place of a program: a call of it runs nothing."""

from __future__ import annotations

import asyncio

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll.errors import NeverRan


def yields(x):
    dist.all_reduce(torch.ones(1))
    yield x


async def awaits(x):
    dist.all_reduce(torch.ones(1))


async def yields_async(x):
    dist.all_reduce(torch.ones(1))
    yield x


def traced(fn):
    with fcoll.fake_world(dp=2):
        fcoll.trace(fn, torch.ones(2))


RUNNERS = {
    "trace": traced,
    "trace compiled": lambda fn: fcoll.trace(fn, torch.ones(2), mode="compiled"),
    "check": lambda fn: fcoll.check(lambda mesh: (fn, (torch.ones(2),)), {"dp": 2}),
    "check's build": lambda fn: fcoll.check(fn, {"dp": 2}),
    "simulate_ranks": lambda fn: fcoll.simulate_ranks(fn, 2),
    "explore": lambda fn: fcoll.explore(fn, 2),
    "simulate": lambda fn: fcoll.simulate(fn, world_size=2)(torch.ones(2)),
}


@pytest.mark.parametrize("fn", [yields, awaits, yields_async, lambda x: yields(x)])
@pytest.mark.parametrize("runner", RUNNERS)
def test_it_is_an_error_that_says_so(runner, fn):
    with pytest.raises(NeverRan, match="none of it has run"):
        RUNNERS[runner](fn)


def test_a_program_that_runs_its_coroutine_is_run():
    async def total(rank):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        return x.item()

    assert fcoll.simulate_ranks(lambda rank: asyncio.run(total(rank)), 2) == [1.0, 1.0]
