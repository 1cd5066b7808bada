"""Process groups written in Python, with the names that torch 2.13 gives the primitives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

import fcoll


@pytest.fixture
def threaded():
    """torch's groups whose ranks are threads of this process."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    multi_threaded_pg._install_threaded_pg()
    isolate(True)  # names of groups are each thread's own
    yield
    isolate(False)
    multi_threaded_pg._uninstall_threaded_pg()


def collectives(rank: int, n: int, store: dist.Store) -> list[list[float]]:
    dist.init_process_group("threaded", rank=rank, world_size=n, store=store)
    x = torch.arange(float(n)) + rank
    calls = (
        fcoll.all_reduce(x),
        fcoll.all_gather_into_tensor(x),
        fcoll.reduce_scatter_tensor(x),
        fcoll.all_to_all_single(x),
        fcoll.broadcast(x, 1),
    )
    found = [y.tolist() for y in calls]
    dist.destroy_process_group()
    return found


def test_torchs_threaded_group(threaded):
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(collectives, rank, 2, store) for rank in range(2)]
    first, second = (rank.result(timeout=60) for rank in ranks)
    whole = [0.0, 1.0, 1.0, 2.0]
    assert first == [[1.0, 3.0], whole, [1.0], [0.0, 1.0], [1.0, 2.0]]
    assert second == [[1.0, 3.0], whole, [3.0], [1.0, 2.0], [1.0, 2.0]]


class Done(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True


class Doubling(dist.ProcessGroup):
    """A group that nobody has given a name."""

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> dist.Work:
        for x in tensors:
            x.mul_(2)
        return Done()


def doubled(rank: int) -> list[float]:
    with fcoll.accelerate_c10d():
        y = torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", Doubling(0, 1))
        return torch.ops._c10d_functional.wait_tensor(y).tolist()


def test_torchs_functions_on_a_group_without_a_name_while_they_are_accelerated(shared2):
    assert shared2.run(doubled) == [[2.0] * 3] * 2
