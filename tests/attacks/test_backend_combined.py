"""Calls of the backend "fcoll" combined as programs combine them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import launch
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fcoll._torch import ONE_RANK_CONFIG

ENV = {"FCOLL_NATIVE": "1"}


def run(fn: Any) -> None:
    made = launch(fn, 2, init=False, env=ENV, timeout=90)
    assert made.errors == [None, None], made.stderr


# -- a call is retried after an exception, without a wait for the first one ---


def again_without_a_wait(rank: int) -> None:
    dist.init_process_group("fcoll")
    x = torch.ones(4)
    try:
        dist.all_reduce(x, async_op=True)
        raise ValueError("the program fails between the call and its wait")
    except ValueError:
        dist.all_reduce(x, async_op=True).wait()
    assert x.tolist() == [4.0] * 4
    for n in (4, 9):  # what one call fills another one reads
        parts, whole = torch.ones(n), torch.empty(2 * n)
        dist.all_reduce(parts, async_op=True)
        dist.all_gather_single(whole, parts, async_op=True).wait()
        assert whole.tolist() == [2.0] * 2 * n
    dist.destroy_process_group()


def test_a_call_on_what_an_earlier_one_fills(compiled: None) -> None:
    run(again_without_a_wait)


# -- graphs whose group is a value (torch's compile_on_one_rank) ---


def one_graph_for_all_ranks(rank: int) -> None:
    dist.init_process_group("fcoll")
    mesh = init_device_mesh("cpu", (2,))
    shards = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor, shards: torch.Tensor) -> torch.Tensor:
        whole = (shards * 2).redistribute(mesh, [Replicate()]).to_local()
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + whole.sum(0)

    with ONE_RANK_CONFIG.patch(compile_on_one_rank=True):
        y = step(torch.full((2,), rank + 1.0), shards)
    assert y.tolist() == [6 + 24.0, 6 + 32.0]
    dist.destroy_process_group()


def test_compile_on_one_rank(compiled: None) -> None:
    run(one_graph_for_all_ranks)
