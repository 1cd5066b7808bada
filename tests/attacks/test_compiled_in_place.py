"""Compiled calls of the ops that write to an argument, as programs call them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from programs import compiled, no_graph_cache

Tensor = torch.Tensor


def world() -> str:
    return dist.group.WORLD.group_name


def sums_in_place(x: Tensor) -> Tensor:
    y = x * 2
    return torch.ops.fcoll.all_reduce_(y, "sum", world()) + y


def sums_its_argument(x: Tensor) -> Tensor:
    return torch.ops.fcoll.all_reduce_(x, "sum", world())


def sums_a_list(x: Tensor) -> Tensor:
    a, b = torch.ops.fcoll.all_reduce_coalesced_([x, x * 2], "sum", world())
    return a + b


def takes_another_ranks(x: Tensor) -> Tensor:
    return torch.ops.fcoll.broadcast_(x, 1, world()) * 2


def gathers_into(x: Tensor) -> Tensor:
    out = x.new_empty(2 * len(x))
    torch.ops.fcoll.all_gather_into_tensor_out(x, 2, world(), out=out)
    return out * 2


def looks_on_one_rank(x: Tensor) -> Tensor:
    out = x.new_empty(2 * len(x))
    torch.ops.fcoll.all_gather_into_tensor_out(x, 2, world(), out=out)
    total = torch.ops.fcoll.all_reduce_(x * 3, "sum", world())
    return total + out.sum() if dist.get_rank() == 0 else total


STEPS = [
    sums_in_place,
    sums_its_argument,
    sums_a_list,
    takes_another_ranks,
    gathers_into,
    looks_on_one_rank,
]


def differences(rank: int, steps: list[Callable], backend: str) -> list[str]:
    wrong = []
    for step in steps:
        eager, x = torch.full((4,), rank + 1.0), torch.full((4,), rank + 1.0)
        want = step(eager) + 0
        with no_graph_cache(merge_bytes=0):
            got = compiled(step, backend)(x)
        if not (torch.equal(got, want) and torch.equal(x, eager + 0)):
            wrong.append(f"{step.__name__}: {got} {x} instead of {want} {eager}")
    return wrong


@pytest.mark.parametrize("backend", ["fcoll", "inductor"])
def test_ops_that_write(shared2, backend):
    assert shared2.run(differences, STEPS, backend, timeout=170) == [[], []]
