"""Two ranks make calls that differ in anything: both raise, whatever the difference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll.errors import CollectiveMismatch

Call = Callable[[Any], Any]


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*(shape or (4, 4)), dtype=dtype)


F = fcoll
I32, F64, BF16 = torch.int32, torch.float64, torch.bfloat16

#: name -> calls of it that differ from each other; the first is the plain one
CALLS: dict[str, list[Call]] = {
    "all_reduce": [
        lambda g: F.all_reduce(x(), "sum", g),
        lambda g: F.all_reduce(x(), "max", g),
        lambda g: F.all_reduce(x(), "avg", g),
        lambda g: F.all_reduce(x(dtype=I32), "sum", g),
        lambda g: F.all_reduce(x(dtype=F64), "sum", g),
        lambda g: F.all_reduce(x(2, 8), "sum", g),
        lambda g: F.all_reduce(x(16), "sum", g),
        lambda g: F.all_reduce(x(0), "sum", g),
        lambda g: F.all_reduce(x(), "sum", g, grad="identity"),
        lambda g: F.all_reduce(x(64, 64), "sum", g),
    ],
    "all_gather_into_tensor": [
        lambda g: F.all_gather_into_tensor(x(), g),
        lambda g: F.all_gather_into_tensor(x(), g, dim=1),
        lambda g: F.all_gather_into_tensor(x(dtype=I32), g),
        lambda g: F.all_gather_into_tensor(x(2, 8), g),
        lambda g: F.all_gather_into_tensor(x(16), g),
        lambda g: F.all_gather_into_tensor(x(0, 4), g),
        lambda g: F.all_gather_into_tensor(x(8, 4, dtype=BF16), g),
        lambda g: F.all_gather_into_tensor(x(), g, sizes=[4, 4]),
    ],
    "uneven": [
        lambda g: F.all_gather_into_tensor(x(4 - F.groups.resolve(g).rank), g, sizes=[4, 3]),
        lambda g: F.all_gather_into_tensor(x(4 - 2 * F.groups.resolve(g).rank), g, sizes=[4, 2]),
        lambda g: F.reduce_scatter_tensor(x(7), "sum", g, sizes=[4, 3]),
        lambda g: F.reduce_scatter_tensor(x(7), "sum", g, sizes=[3, 4]),
    ],
    "reduce_scatter_tensor": [
        lambda g: F.reduce_scatter_tensor(x(), "sum", g),
        lambda g: F.reduce_scatter_tensor(x(), "sum", g, dim=1),
        lambda g: F.reduce_scatter_tensor(x(), "min", g),
        lambda g: F.reduce_scatter_tensor(x(dtype=I32), "sum", g),
        lambda g: F.reduce_scatter_tensor(x(2, 8), "sum", g),
        lambda g: F.reduce_scatter_tensor(x(16), "sum", g),
    ],
    "all_to_all_single": [
        lambda g: F.all_to_all_single(x(), g),
        lambda g: F.all_to_all_single(x(dtype=I32), g),
        lambda g: F.all_to_all_single(x(4, 2, 2), g),
        lambda g: F.all_to_all_single(x(4, 8, dtype=BF16), g),
    ],
    "broadcast": [
        lambda g: F.broadcast(x(), 0, g),
        lambda g: F.broadcast(x(), 1, g),
        lambda g: F.broadcast(x(dtype=I32), 0, g),
        lambda g: F.broadcast(x(16), 0, g),
        lambda g: F.broadcast(x(16), 1, g),
    ],
    "reduce": [
        lambda g: F.reduce(x(), 0, "sum", g),
        lambda g: F.reduce(x(), 1, "sum", g),
        lambda g: F.reduce(x(), 0, "max", g),
        lambda g: F.reduce(x(dtype=I32), 0, "sum", g),
        lambda g: F.reduce(x(16), 0, "sum", g),
    ],
    "gather": [
        lambda g: F.gather(x(), 0, g),
        lambda g: F.gather(x(), 1, g),
        lambda g: F.gather(x(), 0, g, dim=1),
        lambda g: F.gather(x(dtype=I32), 0, g),
        lambda g: F.gather(x(2, 8), 0, g),
    ],
    "scatter": [
        lambda g: F.scatter(x(), 0, g),
        lambda g: F.scatter(x(), 1, g),
        lambda g: F.scatter(x(), 0, g, dim=1),
        lambda g: F.scatter(x(dtype=I32), 0, g),
        lambda g: F.scatter(x(2, 8), 0, g),
    ],
    "permute": [
        lambda g: F.permute(x(), [1, 0], g),
        lambda g: F.permute(x(), [0, 1], g),
        lambda g: F.permute(x(), [1, -1], g),
        lambda g: F.permute(x(), [-1, 0], g),
        lambda g: F.permute(x(dtype=I32), [1, 0], g),
        lambda g: F.permute(x(16), [1, 0], g),
    ],
    "shard_dim_alltoall": [
        lambda g: F.shard_dim_alltoall(x(), 0, 1, g),
        lambda g: F.shard_dim_alltoall(x(), 1, 0, g),
        lambda g: F.shard_dim_alltoall(x(dtype=I32), 0, 1, g),
        lambda g: F.shard_dim_alltoall(x(2, 8), 0, 1, g),
    ],
    "all_reduce_coalesced": [
        lambda g: F.all_reduce_coalesced([x(2), x(3)], "sum", g),
        lambda g: F.all_reduce_coalesced([x(3), x(2)], "sum", g),
        lambda g: F.all_reduce_coalesced([x(5)], "sum", g),
        lambda g: F.all_reduce_coalesced([x(2), x(3)], "max", g),
        lambda g: F.all_reduce_coalesced([x(2, dtype=I32), x(3)], "sum", g),
        lambda g: F.all_reduce_coalesced([x(2), x(3, dtype=I32)], "sum", g),
    ],
    "all_gather_into_tensor_coalesced": [
        lambda g: F.all_gather_into_tensor_coalesced([x(2), x(3)], g),
        lambda g: F.all_gather_into_tensor_coalesced([x(3), x(2)], g),
        lambda g: F.all_gather_into_tensor_coalesced([x(2, 2), x(1)], g),
        lambda g: F.all_gather_into_tensor_coalesced([x(2, 2), x(1)], g, dim=[1, 0]),
        lambda g: F.all_gather_into_tensor_coalesced([x(2, dtype=I32), x(3)], g),
    ],
    "reduce_scatter_tensor_coalesced": [
        lambda g: F.reduce_scatter_tensor_coalesced([x(2), x(4)], "sum", g),
        lambda g: F.reduce_scatter_tensor_coalesced([x(4), x(2)], "sum", g),
        lambda g: F.reduce_scatter_tensor_coalesced([x(2), x(4)], "min", g),
        lambda g: F.reduce_scatter_tensor_coalesced([x(2), x(4, dtype=I32)], "sum", g),
    ],
    "barrier": [lambda g: F.barrier(g)],
}


def pairs() -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Every plain call against every other collective's, and all of one against each other."""
    plain = [(name, 0) for name in CALLS]
    found = list(itertools.combinations(plain, 2))
    for name, calls in CALLS.items():
        found += itertools.combinations([(name, i) for i in range(len(calls))], 2)
    return found


def attempt(group: Any, call: Call) -> BaseException | None:
    try:
        out = call(group)
        for y in out if isinstance(out, list) else [out]:
            if y is not None:
                fcoll.wait_tensor(y)
    except Exception as error:
        return error
    return None


def differ(rank: int, start: int, stop: int) -> list[str]:
    """Make the calls of these pairs, each on a group of its own; what did not raise."""
    wrong = []
    for pair in pairs()[start:stop]:
        name, i = pair[rank]
        group = dist.new_group([0, 1], timeout=timedelta(seconds=10))
        assert fcoll.symm_mem.status(group).shared
        error = attempt(group, CALLS[name][i])
        if not isinstance(error, CollectiveMismatch):
            wrong.append(f"{pair}: {error!r}")
        elif "rank 0 calls" not in str(error) and "sends" not in str(error):
            wrong.append(f"{pair} shows no calls: {error}")
        dist.destroy_process_group(group)
    return wrong


STEP = 60


@pytest.mark.parametrize("start", range(0, len(pairs()), STEP))
def test_both_ranks_raise(shared2, start):
    assert len(pairs()) >= 270
    for wrong in shared2.run(differ, start, start + STEP, timeout=150):
        assert not wrong, "\n".join(wrong)


def message(rank: int) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=10))
    error = attempt(group, CALLS["reduce_scatter_tensor"][rank])
    dist.destroy_process_group(group)
    return str(error)


def test_the_message_shows_both_calls_in_full(shared2):
    for text in shared2.run(message):
        for dim in (0, 1):
            assert f"rank {dim} calls reduce_scatter_tensor(float32 [4, 4], sum, dim {dim})" in text


def agree(rank: int) -> int:
    """The same calls on both ranks, each the plain way and without the fast path on one rank."""
    from fcoll.transport.native import build

    made, fast = 0, build.fast
    for name, calls in CALLS.items():
        for i, call in enumerate(calls):
            if rank == 1 and i % 2:
                build.fast = None
            error = attempt(None, call)
            build.fast = fast
            assert error is None, (name, i, error)
            made += 1
    return made


def test_calls_that_agree_do_not_raise(shared2):
    assert shared2.run(agree) == [sum(map(len, CALLS.values()))] * 2
