"""To DTensor and back: the same values on any mesh, no needless sends or copies, gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import RANKS, check_local, plain, sizes, specs
from torch.distributed.tensor import Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardedDim

import fcoll
from fcoll import sharded
from fcoll.sharded.errors import MeshesDiffer

MESHES = [(4,), (2, 2), (4, 1)]


@st.composite
def meshes(draw, dims):
    shape = draw(st.sampled_from(MESHES))
    kinds = [Replicate(), *(ShardedDim(d) for d in range(dims))]
    return shape, [draw(st.sampled_from(kinds)) for _ in shape]


@given(st.data())
@settings(max_examples=40)
def test_any_layout_is_any_dtensor(data):
    size = data.draw(sizes())
    old, new = data.draw(specs(size)), data.draw(specs(size))
    shape, placements = data.draw(meshes(len(size)))

    def check(rank):
        mesh = dist.init_device_mesh("cpu", shape)
        expected = distribute_tensor(plain(size), mesh, placements)
        x = sharded.to_dtensor(sharded.arange(old, *size, dtype=torch.float32), mesh, placements)
        assert x.placements == expected.placements and x.shape == size
        assert x.stride() == expected.stride()
        assert torch.equal(x.to_local(), expected.to_local())
        back = sharded.from_dtensor(x)
        assert torch.equal(back.all_gather(), plain(size))
        check_local(sharded.from_dtensor(x, new), new, size, rank)

    fcoll.simulate_ranks(check, RANKS)


def real(rank):
    for shape, old in itertools.product(
        MESHES, [sharded.chunk(0, [2, 0, 3]), sharded.grid((2, 2), 4)]
    ):
        mesh = dist.init_device_mesh("cpu", shape)
        for placements in itertools.product((Replicate(), ShardedDim(0), ShardedDim(1)), repeat=2):
            placed = placements[: len(shape)]
            made = sharded.arange(old, 5, 6, dtype=torch.float32)
            x = sharded.to_dtensor(made, mesh, placed)
            assert torch.equal(
                x.to_local(), distribute_tensor(plain((5, 6)), mesh, placed)._local_tensor
            )
            assert torch.equal(sharded.from_dtensor(x).all_gather(), plain((5, 6)))
            check_local(sharded.from_dtensor(x, old), old, (5, 6), rank)


def test_on_real_ranks(ranks4):
    ranks4.run(real, timeout=120)


def shared(rank):
    """Where the blocks lie right, the memory is the same and nothing is sent."""
    st = sharded.ones(sharded.chunk(1, 4), 2, 6)
    x = sharded.to_dtensor(st)
    assert x.placements == (ShardedDim(1),)
    x.to_local().zero_()
    assert not st.local_tensor().any()
    back = sharded.from_dtensor(x)
    assert back.sharding_spec() == sharded.chunk(1, 4)
    assert back.local_tensor().data_ptr() == x.to_local().data_ptr()


def test_nothing_is_sent_or_copied_where_nothing_must_be(monkeypatch):
    sent = []
    monkeypatch.setattr(fcoll.functions, "all_to_all_single", lambda *args: sent.append(args))
    fcoll.simulate_ranks(shared, 4)
    assert not sent


def gradients(rank):
    """Through both: each element's gradient is its weight, whoever holds it."""
    weights = plain((4, 6))
    mesh = dist.init_device_mesh("cpu", (2, 2))
    for placements in ([ShardedDim(0), Replicate()], [Replicate(), ShardedDim(1)]):
        table = sharded.ones(sharded.chunk(0, [1, 2]), 4, 6, requires_grad=True)
        x = sharded.to_dtensor(table, mesh, placements)
        (x * distribute_tensor(weights, mesh, placements)).sum().full_tensor().backward()
        for shard in table.local_shards():
            row = shard.metadata.shard_offsets[0]
            assert torch.equal(shard.tensor.grad, weights[row : row + 2])
        y = distribute_tensor(torch.ones(4, 6), mesh, placements).requires_grad_()
        moved = sharded.from_dtensor(y, sharded.chunk(1, [3, 0]))
        assert moved.requires_grad
        loss = moved.all_gather() * weights  # summed over the 4 ranks
        loss.sum().backward()
        assert torch.equal(y.grad.full_tensor(), 4 * weights)


def test_gradients(ranks4):
    ranks4.run(gradients)
    fcoll.simulate_ranks(gradients, 4)


def test_what_is_no_layout_is_refused():
    def check(rank):
        mesh = dist.init_device_mesh("cpu", (2, 2))
        st = sharded.ones(sharded.chunk(0, 4), 4, 4)
        with pytest.raises(MeshesDiffer, match="no placements for a mesh of 2 dims"):
            sharded.to_dtensor(st, mesh)
        with pytest.raises(MeshesDiffer, match="holds sums that are not made yet"):
            sharded.to_dtensor(st, mesh, [Partial(), Replicate()])
        if rank < 2:
            part = sharded.ones(sharded.chunk(0, 2), 4, 4, process_group=[0, 1])
            with pytest.raises(
                MeshesDiffer, match=r"ranks \[2, 3\] of the mesh are not in the tensor's"
            ):
                sharded.to_dtensor(part, mesh, [ShardedDim(0), Replicate()])

    fcoll.simulate_ranks(check, 4)


def test_a_mesh_of_some_ranks():
    def check(rank):
        mesh = dist.DeviceMesh("cpu", [1, 3])
        st = sharded.arange(sharded.chunk(0, 4), 6, 2, dtype=torch.float32)
        x = sharded.to_dtensor(st, mesh, [ShardedDim(0)])
        if rank in (1, 3):
            assert torch.equal(x.full_tensor(), plain((6, 2)))
            back = sharded.from_dtensor(x)
            assert back.group.ranks == (1, 3) and back.sharding_spec() == sharded.chunk(0, [1, 3])
            assert torch.equal(back.all_gather(), plain((6, 2)))
        everywhere = sharded.from_dtensor(x, process_group=list(range(4)))
        assert torch.equal(everywhere.all_gather(), plain((6, 2)))

    fcoll.simulate_ranks(check, 4)
