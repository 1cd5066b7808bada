"""fake_world: any number of ranks, and nothing left behind."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fcoll
from fcoll import groups
from fcoll.errors import BadMesh, NotInitialized


def test_mesh_is_that_of_the_rank():
    with fcoll.fake_world(dp=4, tp=2, rank=5) as mesh:
        assert list(mesh.get_coordinate()) == [2, 1]
        assert (dist.get_rank(), dist.get_world_size()) == (5, 8)
        assert groups.resolve((mesh, "tp")).ranks == (4, 5)
        assert groups.resolve((mesh, "dp")).ranks == (1, 3, 5, 7)
        assert groups.resolve((mesh, "dp")).axis == "dp"
        assert groups.resolve(None).ranks == tuple(range(8))
        assert mesh["tp"].get_local_rank() == 1
    assert not dist.is_initialized()


def test_one_axis_is_the_default_group():
    """As init_device_mesh has it: so a call on None and one on the mesh are on one group."""
    with fcoll.fake_world(dp=4) as mesh:
        assert mesh.get_group() is dist.group.WORLD
        assert groups.resolve(None).axis == "dp"


def test_a_hundred_thousand_ranks():
    start = time.process_time()
    with fcoll.fake_world(dp=1250, pp=10, tp=8, rank=99_999) as mesh:
        assert list(mesh.get_coordinate()) == [1249, 9, 7]
        assert groups.resolve((mesh, "dp")).n == 1250
    assert time.process_time() - start < 5


def test_worlds_nest():
    with fcoll.fake_world(dp=2, tp=2) as outer:
        name = groups.resolve((outer, "tp")).name
        with fcoll.fake_world(tp=8, rank=3) as inner:
            assert dist.get_world_size() == 8
            assert groups.resolve(inner).ranks == tuple(range(8))
        assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
        assert groups.by_name(name).ranks == (0, 1)
        fcoll.wait_tensor(fcoll.all_reduce(torch.ones(2), "sum", (outer, "tp")))


def test_inside_a_real_world(solo):
    before = fcoll.groups.resolve(None)
    with fcoll.fake_world(dp=4, rank=2):
        assert dist.get_world_size() == 4
        dist.new_group([1, 2])
    assert dist.group.WORLD is solo
    assert fcoll.groups.resolve(None) == before
    x = torch.ones(3)
    dist.all_reduce(x)  # the real group still works
    assert fcoll.all_reduce(x).tolist() == [1.0, 1.0, 1.0]


def test_eager_calls_do_not_look_for_shared_memory():
    with fcoll.fake_world(tp=2) as mesh:
        assert groups.resolve(mesh).serves == ()  # all devices
        assert "moves no bytes" in str(fcoll.symm_mem.status(mesh))
        y = fcoll.all_gather_into_tensor(torch.ones(3, device="cpu"), mesh)
        assert fcoll.wait_tensor(y).shape == (6,)


def test_restored_after_an_error():
    with pytest.raises(KeyError), fcoll.fake_world(dp=2):
        raise KeyError
    assert not dist.is_initialized()
    with pytest.raises(NotInitialized):
        fcoll.all_reduce(torch.ones(1))


def test_dtensor_does_not_remember_another_rank():
    """Its caches hold meshes; equal meshes of two ranks must not be taken for one another."""
    parts = {}
    for rank in (0, 1):
        with fcoll.fake_world(tp=2, rank=rank) as mesh:
            whole = distribute_tensor(torch.arange(4.0), mesh, [Replicate()], src_data_rank=None)
            parts[rank] = whole.redistribute(placements=[Shard(0)]).to_local().tolist()
    assert parts == {0: [0.0, 1.0], 1: [2.0, 3.0]}


@pytest.mark.parametrize("axes", [{}, {"dp": 0}, {"dp": 2, "rank": 2}, {"dp": 2, "rank": -1}])
def test_impossible_worlds(axes):
    with pytest.raises(BadMesh):
        fcoll.fake_world(**axes)
    assert not dist.is_initialized()
