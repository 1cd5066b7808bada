"""Backends that are not torch's own, and what a rank does to its environment."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fcoll


class Custom(dist.ProcessGroup):
    label = "custom"

    def getBackendName(self):
        return "custom"


def make(store, rank, size, timeout):
    return Custom(rank, size)


@pytest.fixture
def custom():
    if not hasattr(dist.Backend, "FCOLL_CUSTOM"):  # it stays for the whole process
        dist.Backend.register_backend("fcoll_custom", make, devices=["cpu"])
    return "fcoll_custom"


def test_a_registered_backend_that_is_replaced_is_said(custom):
    def program(rank):
        dist.init_process_group(custom)
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    with pytest.warns(RuntimeWarning, match=r"place of the backend 'fcoll_custom' at .*\.py:35"):
        assert fcoll.simulate_ranks(program, 2) == [2.0, 2.0]


def test_fake_groups_may_be_of_any_size():
    def program(rank):
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
        pair = dist.new_group([3, 5])
        dist.all_reduce(torch.ones(1), group=pair)
        trace = fcoll.trace(lambda x: fcoll.all_reduce(x, "sum"), torch.ones(2))
        sizes = dist.get_world_size(), dist.get_rank(), pair.size(), trace.collectives[0].n
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        return *sizes, x.item()

    assert fcoll.simulate_ranks(program, 2) == [(64, 3, 2, 64, 2.0)] * 2


def test_what_a_rank_does_to_its_own_variables_stays():
    def program(rank):
        if rank < 2:
            os.environ["LOCAL_RANK"] = str(rank % 2 + 10)
        else:
            del os.environ["LOCAL_RANK"]
        dist.barrier()
        return os.environ["RANK"], os.environ.get("LOCAL_RANK")

    before = os.environ.get("LOCAL_RANK")
    assert fcoll.simulate_ranks(program, 3) == [("0", "10"), ("1", "11"), ("2", None)]
    assert os.environ.get("LOCAL_RANK") == before
