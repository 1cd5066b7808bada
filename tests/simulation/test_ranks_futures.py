"""Futures of simulated collectives: waits let other ranks run, callbacks run on their own rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fcoll
from fcoll.simulation.baton import this_rank


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(steps, 4, 8, generator=torch.Generator().manual_seed(1))
    for i in range(steps):
        optimizer.zero_grad()
        model(x[i]).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_a_future_made_of_others() -> None:
    def program(rank: int) -> Any:
        work = dist.all_reduce(torch.ones(2) * rank, async_op=True)
        doubled = work.get_future().then(lambda f: f.value()[0] * 2)
        return torch.futures.collect_all([doubled]).wait()[0].wait().tolist()

    assert fcoll.simulate_ranks(program, 3) == [[6.0, 6.0]] * 3


def test_a_callback_that_calls_a_collective_runs_on_its_rank() -> None:
    def program(rank: int) -> Any:
        def again(future: Any) -> Any:
            y = future.value()[0] + dist.get_rank()
            dist.all_reduce(y)
            return y

        first = dist.all_reduce(torch.ones(1), async_op=True)
        return first.get_future().then(again).wait().item()

    assert fcoll.simulate_ranks(program, 3) == [12.0] * 3  # 3 + 4 + 5


def test_a_future_that_never_comes_is_a_deadlock() -> None:
    def program(rank: int) -> None:
        if rank:
            dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda f: f).wait()

    with pytest.raises(fcoll.FcollError, match="rank 1 waits in all_reduce"):
        fcoll.simulate_ranks(program, 2)


def test_a_future_is_asked_until_it_is_done() -> None:
    def program(rank: int) -> bool:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        while not future.done():
            pass
        return True

    assert fcoll.simulate_ranks(program, 2, timeout=20) == [True, True]


def test_ddp_with_uneven_inputs() -> None:
    def program(rank: int) -> list[torch.Tensor]:
        model = DistributedDataParallel(small_model())
        with Join([model]):
            return train(model, 2 + rank)

    ends = fcoll.simulate_ranks(program, 3, timeout=60)
    # who has joined contributes zeros and gets the parameters of the last
    assert all(torch.equal(a, b) for a, b in zip(ends[0], ends[2], strict=True))


def test_a_hook_whose_callbacks_reduce_again() -> None:
    def program(rank: int) -> list[torch.Tensor]:
        model = DistributedDataParallel(small_model())
        state = power_sgd.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, power_sgd.powerSGD_hook)
        return train(model, 4)

    ends = fcoll.simulate_ranks(program, 2, timeout=60)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_torchs_wait_is_as_it_was() -> None:
    before = vars(torch._C.Future)["wait"]

    def program(rank: int) -> None:
        assert vars(torch._C.Future)["wait"] is not before
        raise KeyError("as planned")

    with pytest.raises(KeyError):
        fcoll.simulate_ranks(program, 2)
    assert vars(torch._C.Future)["wait"] is before


def test_works_that_are_done_are_not_kept() -> None:
    def program(rank: int) -> int:
        for _ in range(3):
            dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
        me = this_rank()
        assert me is not None
        return len(me.futures) + len(me.settling)

    assert fcoll.simulate_ranks(program, 2) == [0, 0]
