"""fcoll.trace on simulated ranks shows what it shows in a fake world, and exchanges nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fcoll

W = 4


def everything_in_place(x: Tensor) -> Tensor:
    n, me = dist.get_world_size(), dist.get_rank()
    dist.all_reduce(x)
    dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True).wait()
    dist.broadcast(x, 1)
    dist.reduce(x, 0)
    parts = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(parts, x)
    whole = x.new_empty(n * x.shape[0])
    dist.all_gather_single(whole, x)
    dist.reduce_scatter_single(x, whole)
    dist.reduce_scatter(x, parts)
    dist.all_to_all([torch.empty_like(x) for _ in range(n)], parts)
    dist.all_to_all_single(torch.empty_like(whole), whole)
    dist.gather(x, parts if me == 0 else None, 0)
    dist.scatter(x, parts if me == 0 else None, 0)
    dist.barrier()
    return x + sum(parts) + whole.sum()


def messages(x: Tensor) -> Tensor:
    me, n = dist.get_rank(), dist.get_world_size()
    got = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, (me + 1) % n), dist.P2POp(dist.irecv, got, (me - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if me % 2 == 0:
        dist.send(got, me + 1)
    else:
        dist.recv(got, me - 1)
    return got * 2


def in_groups() -> Callable[[Tensor], Tensor]:
    group, _ = dist.new_subgroups(2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def step(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=mesh.get_group("tp"))
        return x

    return step


def sharded() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (W,)))

    def step(x: Tensor) -> Tensor:
        loss = model(x.view(1, 8)).sum()
        loss.backward()
        return loss

    return step


PROGRAMS = {
    "in place": lambda: everything_in_place,
    "messages": lambda: messages,
    "groups": in_groups,
    "fsdp2": sharded,
}


def shown(build: Callable[[], Callable[[Tensor], Any]]) -> list[tuple[Any, ...]]:
    trace = fcoll.trace(build(), torch.ones(8))
    return [(c.op, c.ranks, c.bytes, c.dtypes, c.source, c.phase) for c in trace.collectives]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trace_is_that_of_a_fake_world(name: str) -> None:
    build = PROGRAMS[name]
    on_ranks = fcoll.simulate_ranks(lambda rank: shown(build), W)
    for rank in range(W):
        with fcoll.fake_world(dp=W, rank=rank):
            assert on_ranks[rank] == shown(build)
    assert on_ranks[0]


def test_ranks_go_on_with_values_after_a_trace() -> None:
    def program(rank: int) -> list[float]:
        x = torch.full((8,), float(rank))
        if rank == 1:  # nobody else need trace with it
            fcoll.trace(everything_in_place, x)
        assert x.tolist() == [rank] * 8
        dist.all_reduce(x)
        return x.tolist()

    assert fcoll.simulate_ranks(program, W) == [[6.0] * 8] * W


def test_fake_tensors_without_a_trace_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def program(rank: int) -> None:
        with FakeTensorMode():
            dist.all_reduce(torch.ones(2))

    with pytest.raises(fcoll.FcollError, match="fake or meta tensors"):
        fcoll.simulate_ranks(program, 2)
