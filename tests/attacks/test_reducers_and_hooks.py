"""Collectives in a hook between two data parallel layers, while a bucket is under way in place."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import launch
from torch import nn

import fcoll


def norms_in_a_hook(rank: int) -> tuple[torch.Tensor, list[float]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    first, second = (fcoll.DataParallel(nn.Linear(4, 4)) for _ in range(2))
    seen = []

    def look(grad: torch.Tensor) -> None:
        norm = fcoll.all_reduce(grad.square().sum())  # while the bucket of `second` is under way
        count = fcoll.all_reduce(torch.ones(1), "sum", pair)
        seen.append(float(norm) / float(count))

    for _ in range(3):
        first.zero_grad()
        hidden = first(torch.ones(2, 4) * (rank + 1))
        hidden.register_hook(look)
        second(hidden).sum().backward()
    return first.module.weight.grad, seen


def test_collectives_in_a_hook_between_two_models(compiled):
    done = launch(norms_in_a_hook, 2, timeout=100, env={"FCOLL_NATIVE": "1"}, init=False)
    assert done.errors == [None, None], done.errors
    (weight, seen), (other_weight, other_seen) = done.results
    assert torch.equal(weight, other_weight)
    assert seen == other_seen and len({*seen}) == 1 and len(seen) == 3
