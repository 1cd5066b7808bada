"""Ranks that do not do the same: an error on every rank that names the rank and the parameters."""

from __future__ import annotations

import os
import signal

import torch
from ranks import launch
from torch import nn

import fcoll
from fcoll.errors import CollectiveMismatch, FcollError, PeerDied, ReductionUnfinished

ENV = {"FCOLL_NATIVE": "1"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skip=False):
        return self.first(x) if skip else self.second(self.first(x))


def step(module: nn.Module, skip: bool = False) -> None:
    module(torch.ones(2, 4), skip).sum().backward()


def skips_a_parameter(rank: int) -> None:
    module = fcoll.DataParallel(Net())
    step(module)
    step(module, skip=rank == 1)
    step(module)


def makes_fewer_steps(rank: int) -> None:
    module = fcoll.DataParallel(Net())
    for _ in range(3 - rank):
        step(module)


def dies_in_the_backward_pass(rank: int) -> None:
    module = fcoll.DataParallel(Net())
    step(module)
    if rank == 1:
        module.module.first.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    step(module)


def other_buckets(rank: int) -> None:
    module = fcoll.DataParallel(Net())
    module.reducer.initialize_buckets([[0, 1], [2, 3]] if rank else [[0, 1, 2, 3]])
    step(module)


def test_a_rank_that_skips_a_parameter(compiled):
    done = launch(skips_a_parameter, 2, timeout=60, env=ENV)
    skipped, waited = done.errors[1], done.errors[0]
    assert isinstance(skipped, ReductionUnfinished)
    assert skipped.args[0].count("for rank 1: second.weight, second.bias") == 1
    assert isinstance(waited, PeerDied) and waited.rank == 1
    assert "It was bucket 0 of 1, with the gradients of second.bias, second.weight" in str(waited)


def test_a_rank_that_makes_fewer_steps(compiled):
    done = launch(makes_fewer_steps, 2, timeout=60, env=ENV)
    assert done.errors[1] is None
    assert isinstance(done.errors[0], FcollError) and "rank 1" in str(done.errors[0])
    assert "with the gradients of second.bias" in str(done.errors[0])


def test_a_rank_that_dies_in_the_backward_pass(compiled):
    done = launch(dies_in_the_backward_pass, 2, timeout=60, env=ENV)
    assert done.exitcodes[1] == -signal.SIGKILL
    assert isinstance(done.errors[0], PeerDied) and done.errors[0].rank == 1
    assert "with the gradients of second.bias" in str(done.errors[0])


def test_ranks_with_other_buckets(compiled):
    done = launch(other_buckets, 2, timeout=60, env=ENV)
    assert any(isinstance(error, CollectiveMismatch) for error in done.errors)
    assert all("with the gradients of first.weight" in str(error) for error in done.errors)
