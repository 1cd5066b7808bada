"""Large results lie in blocks that are used again, and only when nobody has them any more."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

import fcoll
from fcoll.table import partition

LARGE = (8 << 20) // 4  # floats: 8 MiB
kept = torch.ops.fcoll_native


def reused(rank: int) -> dict[str, bool]:
    x = torch.arange(float(LARGE)) + rank
    expected = 2 * torch.arange(float(LARGE)) + 1
    fcoll.all_reduce(
        torch.ones(1)
    )  # at the first call the ranks meet, on the way that Python takes
    fcoll.symm_mem.empty_cache()
    first = fcoll.wait_tensor(fcoll.all_reduce(x))
    at, view = first.data_ptr(), first[100:200]
    del first
    second = fcoll.wait_tensor(fcoll.all_reduce(x + 1))
    found = {
        "a view keeps its block": second.data_ptr() != at,
        "the view is as it was": torch.equal(view, expected[100:200]),
    }
    del view
    third = fcoll.wait_tensor(fcoll.all_reduce(x))
    found["a free block is used again"] = third.data_ptr() == at
    found["values"] = torch.equal(third, expected) and torch.equal(second, expected + 2)
    del second, third
    gc.collect()
    found["both are kept"] = kept.warm_bytes() == 2 * 4 * LARGE
    fcoll.symm_mem.empty_cache()
    found["none is kept"] = kept.warm_bytes() == 0
    return found


def test_blocks_are_used_again(shared2):
    for found in shared2.run(reused):
        assert all(found.values()), found


def bounded(rank: int) -> list[int]:
    """600 MiB of results at once, freed one after the other."""
    fcoll.symm_mem.empty_cache()
    x, seen = torch.ones(25 * LARGE // 8), []
    results = [fcoll.wait_tensor(fcoll.all_reduce(x)) for _ in range(24)]
    while results:
        results.pop()
        seen.append(kept.warm_bytes())
    fcoll.symm_mem.empty_cache()
    return seen


def test_what_is_kept_is_bounded(shared2):
    for seen in shared2.run(bounded):
        assert seen[0] == 26 << 20  # 25 MiB in huge pages of 2
        assert max(seen) <= 512 << 20 and seen[-1] > 480 << 20


def as_any_tensor(rank: int) -> bool:
    """Resized, made by a thread and freed by another, forked, the last reference a gradient's."""
    x = torch.ones(LARGE)
    y = fcoll.wait_tensor(fcoll.all_reduce(x))
    y.resize_(2 * LARGE)
    right = bool((y[:LARGE] == 2).all())
    thread = threading.Thread(target=y.set_)
    del y
    thread.start()
    thread.join()
    del thread
    z = fcoll.wait_tensor(fcoll.all_reduce(x))
    child = os.fork()
    if child == 0:
        z.fill_(7)
        os._exit(0 if bool((z == 7).all()) else 1)
    right &= os.waitpid(child, 0)[1] == 0 and bool((z == 2).all())
    w = torch.ones(LARGE, requires_grad=True)
    fcoll.all_reduce(w * 2).sum().backward()
    return right and bool((w.grad == 4).all())


def test_a_result_is_as_any_tensor(shared2):
    assert shared2.run(as_any_tensor) == [True, True]


@pytest.mark.parametrize("op", ["all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"])
def test_all_large_results_are_in_blocks(shared2, op):
    assert shared2.run(in_a_block, op) == [True, True]


def in_a_block(rank: int, op: str) -> bool:
    """Blocks begin at a huge page; malloc's memory never does."""
    more = {"broadcast": (1,)}.get(op, ())
    y = fcoll.wait_tensor(getattr(fcoll, op)(torch.ones(2 * LARGE), *more))
    if op == "broadcast" and rank == 1:
        return True  # the root's is a copy of its argument
    return y.data_ptr() % (2 << 20) == 0


# -- of stacked ranks ---


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    return fcoll.all_to_all_single(x)


def of_stacked_ranks(rank: int) -> dict[str, bool]:
    """40 MiB: the copy of what the ranks exchanged, and its gradient's."""
    fcoll.symm_mem.empty_cache()
    x_W = torch.arange(10.0 * (1 << 20)).view(8, 8, -1)
    exchange = fcoll.simulate(all_to_all, mesh_shape={"all": 8})
    first = exchange(x_W)
    at = first.data_ptr()
    found = {"values": torch.equal(first, x_W.transpose(0, 1)), "in a block": at % (2 << 20) == 0}
    del first
    gc.collect()
    found["it is kept"] = kept.warm_bytes() == x_W.nbytes
    found["and used again"] = exchange(x_W + 1).data_ptr() == at
    exchange(x_W.requires_grad_()).sum().backward()
    found["gradient"] = torch.equal(x_W.grad, torch.ones_like(x_W))
    small = exchange(x_W[:, :, :1024].detach())
    found["small ones are torch's"] = small.data_ptr() % (2 << 20) != 0
    return found


def test_large_results_of_stacked_ranks_are_in_blocks(shared2):
    for found in shared2.run(of_stacked_ranks):
        assert all(found.values()), found


def test_without_the_library_they_are_in_fresh_memory(monkeypatch):
    monkeypatch.setattr(partition.build, "load_if_compiled", lambda: False)
    x = torch.arange(10 << 20).view(8, -1).t()
    y = partition._contiguous(x)
    assert y.is_contiguous() and torch.equal(x, y) and y.data_ptr() % (2 << 20)
