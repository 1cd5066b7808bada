"""Compiled regions and branches that communicate, among calls that do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import compiled, no_graph_cache

import fcoll

COMPILE_S = 170.0
Tensor = torch.Tensor
c10d = torch.ops._c10d_functional


@torch.compiler.nested_compile_region
def block(x: Tensor) -> Tensor:
    return torch.tanh(fcoll.all_reduce(x @ x)) / 2


def exchanged_after_regions(x: Tensor, rank: int) -> Tensor:
    """What is exchanged depends on the regions before it on one rank only."""
    h = block(block(x))
    return fcoll.all_to_all_single(x + h if rank == 1 else x) + h


def summed_by_torch_after_a_branch(x: Tensor, rank: int) -> Tensor:
    name = dist.group.WORLD.group_name
    h = torch.cond(x.sum() > 0, lambda x: fcoll.all_reduce(x) * 2, lambda x: x * 3, (x,))
    y = x + h if rank == 1 else x + 1
    return c10d.wait_tensor(c10d.all_reduce(y, "max", name)) + h


def summed_by_torch_after_a_barrier(x: Tensor, rank: int) -> Tensor:
    name = dist.group.WORLD.group_name
    h = torch.relu(x @ x)
    fcoll.barrier()
    return c10d.wait_tensor(c10d.all_reduce(x if rank else h, "sum", name)) + h


STEPS = [exchanged_after_regions, summed_by_torch_after_a_branch, summed_by_torch_after_a_barrier]


def differences(rank: int, steps: list[Callable], backend: str, schedule: Any) -> list[str]:
    wrong = []
    x = torch.arange(64.0).reshape(8, 8) / 64 + rank + 1
    for step in steps:
        want = step(x, rank) + 0
        with no_graph_cache(schedule=schedule):
            f = compiled(lambda x, step=step: step(x, rank), backend)
            for _ in range(2):
                if not torch.allclose(got := f(x), want, rtol=1e-4, atol=1e-4):
                    wrong.append(f"{step.__name__}: {got[0, 0]} instead of {want[0, 0]}")
    return wrong


@pytest.mark.parametrize(
    ("pool", "backend", "schedule"),
    [
        ("shared2", "fcoll", "safe"),
        ("shared2", "inductor", None),
        ("ranks2", "fcoll", "overlap"),
        ("ranks2", "inductor", None),
    ],
)
def test_regions_and_branches_stay_in_order(request, pool, backend, schedule):
    ranks = request.getfixturevalue(pool)
    assert ranks.run(differences, STEPS, backend, schedule, timeout=COMPILE_S) == [[], []]
