"""Resharding: gradients, traces, errors, second use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from layouts import RANKS, blocks, plain, two_layouts

import fcoll
from fcoll import sharded
from fcoll.sharded import EnumerableShardingSpec, ShardMetadata


def check_gradient(rank, size, old, new):
    """Every rank's loss is of the whole; what the shards get is the sum of all ranks' losses."""
    tensor = sharded.arange(old, size, dtype=torch.float64, requires_grad=True)
    other = sharded.reshard(tensor, new)
    assert other.requires_grad
    whole = other.all_gather()
    ((rank + 1) * whole.square()).sum().backward()
    wanted = 2 * plain(size).double() * sum(range(1, RANKS + 1))
    held = [s for s in tensor.local_shards() if s.tensor.numel()]
    assert len(held) == sum(r == rank for r, _, _ in blocks(old, size))
    for shard in held:
        ends = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        assert torch.equal(shard.tensor.grad, wanted[tuple(slice(a, a + n) for a, n in ends)])


@given(two_layouts())
@settings(max_examples=30)
def test_the_gradient_goes_the_way_back(layouts):
    fcoll.simulate_ranks(lambda rank: check_gradient(rank, *layouts), RANKS)


def on_real_ranks(rank):
    check_gradient(rank, (5, 6), sharded.chunk(0, [0, 2]), sharded.chunk(1, [3, 1, 0]))
    check_gradient(rank, (5, 6), sharded.grid((2, 2), 4), sharded.chunk(0, [1]))


def test_the_gradient_on_real_ranks(ranks4):
    ranks4.run(on_real_ranks)


def test_gradients_of_gradients():
    def twice(rank):
        tensor = sharded.full(sharded.chunk(0, 2), (2, 2), 3.0, requires_grad=True)
        moved = sharded.reshard(tensor, sharded.chunk(1, 2)).local_tensor()
        (first,) = torch.autograd.grad(moved.pow(3).sum(), tensor.local_tensor(), create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), tensor.local_tensor())
        return first.flatten().tolist(), second.flatten().tolist()

    assert fcoll.simulate_ranks(twice, 2) == [([27.0, 27.0], [18.0, 18.0])] * 2


def test_a_parameter_that_is_moved_without_a_graph_stays_a_leaf():
    def move(rank):
        tensor = sharded.rand(sharded.chunk(0, 2), 4, 4, requires_grad=True)
        with torch.no_grad():
            tensor.reshard(sharded.chunk(1, 2))
        assert tensor.requires_grad and tensor.local_tensor().is_leaf
        assert tensor.local_tensor().requires_grad
        (tensor.all_gather() * 2).sum().backward()
        return tensor.local_tensor().grad.unique().tolist()

    assert fcoll.simulate_ranks(move, 2) == [[4.0], [4.0]]


def test_other_layouts_of_other_tensors():
    few = EnumerableShardingSpec([ShardMetadata([0, 0], [2, 2], "rank:0/cpu")])

    def wrong(rank):
        tensor = sharded.ones(sharded.chunk(0, 4), 8, 4)
        with pytest.raises(NotImplementedError, match="Only ChunkShardingSpec supported for"):
            tensor.reshard(few)
        with pytest.raises(ValueError, match=r"No shard holds .2:8, 0:4"):
            tensor.reshard(few)
        with pytest.raises(ValueError, match="Invalid sharding dim: 2"):
            tensor.reshard(sharded.chunk(2, 4))
        with pytest.raises(ValueError, match="Global rank 4 does not exist"):
            tensor.reshard(sharded.chunk(0, 5))
        with pytest.raises(TypeError, match="Expecting ShardingSpec"):
            tensor.reshard("columns")
        tensor._local_shards = tensor.local_shards() * 2
        with pytest.raises(NotImplementedError, match="Only single local shard supported"):
            tensor.reshard(sharded.chunk(1, 4))
        tensor._local_shards = tensor.local_shards()[:1]
        return tensor.reshard(sharded.chunk(1, 4)).local_tensor().shape  # it can go on

    assert fcoll.simulate_ranks(wrong, 4) == [(8, 1)] * 4
