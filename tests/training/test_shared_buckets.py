"""Buckets in memory that all ranks have mapped: gradients are summed where they lie."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fcoll
from fcoll.training.bucket_collectives import Collectives
from fcoll.transport.native import build


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))


def step(module: nn.Module, rank: int) -> list[torch.Tensor]:
    module.zero_grad()
    module(torch.arange(80.0).view(2, 40) * (rank + 1)).sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def right(n: int) -> list[torch.Tensor]:
    alone = [step(model(), rank) for rank in range(n)]
    return [sum(grads) / n for grads in zip(*alone, strict=True)]


def summed_in_place(rank: int) -> None:
    module = fcoll.DataParallel(model(), bucket_cap_mb=0.001)
    Collectives.sum_, before = None, Collectives.sum_  # no other sums
    try:
        for _ in range(3):  # buckets are rebuilt after the first
            grads = step(module, rank)
            torch.testing.assert_close(grads, right(dist.get_world_size()))
    finally:
        Collectives.sum_ = before
    buckets = module.reducer._buckets
    assert len(buckets) > 1 and all(b.shared is not None for b in buckets)
    inside = {view.data_ptr() for b in buckets for view in b.views}
    assert {p.grad.data_ptr() for p in module.parameters()} == inside


def test_gradients_are_summed_where_they_lie(shared2):
    shared2.run(summed_in_place)


def test_four_ranks(shared4):
    shared4.run(summed_in_place)


def without_memory(rank: int) -> None:
    made = build.fast.SharedBuckets
    if rank == 1:
        build.fast.SharedBuckets = lambda handle, size: made(handle, (1 << 63) - 1)
    try:
        module = fcoll.DataParallel(model())
        for _ in range(3):
            torch.testing.assert_close(step(module, rank), right(2))
        assert all(b.shared is None for b in module.reducer._buckets)
    finally:
        build.fast.SharedBuckets = made


def test_where_a_rank_has_no_memory_for_it_all_go_through_the_ring(shared2):
    shared2.run(without_memory)


class Broken(Exception):
    pass


def fails_and_goes_on(rank: int) -> None:
    module = fcoll.DataParallel(model(), bucket_cap_mb=0.001)
    step(module, rank)
    step(module, rank)
    before = [b.buffer.data_ptr() for b in module.reducer._buckets]

    def fail(grad: torch.Tensor) -> None:
        raise Broken

    # the last layer's bucket is under way then
    handle = module.module[0].weight.register_hook(fail)
    with pytest.raises(Broken):
        step(module, rank)
    assert module.reducer._buckets[0].work is not None
    handle.remove()
    module.reducer.reset_state()
    after = [b.buffer.data_ptr() for b in module.reducer._buckets]
    assert not {*before} & {*after}
    for _ in range(2):
        torch.testing.assert_close(step(module, rank), right(2))


def test_after_a_failure_peers_write_to_memory_of_before(shared2):
    shared2.run(fails_and_goes_on)


def moved(rank: int) -> None:
    module = fcoll.DataParallel(model())
    step(module, rank)
    step(module, rank)
    for p in module.parameters():
        p.grad.share_memory_()
    with pytest.raises(RuntimeError, match=r"memory of a bucket was moved[^.]*gradients of 2.bias"):
        module(torch.ones(2, 40)).sum().backward()


def test_a_bucket_that_was_moved_is_an_error(shared2):
    shared2.run(moved)
