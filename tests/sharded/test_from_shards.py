"""Tensors of shards that ranks have: what is compared, and who hears of it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from layouts import plain

import fcoll
from fcoll import sharded
from fcoll.errors import FcollError
from fcoll.sharded import Shard, ShardedTensor, ShardedTensorMetadata, ShardMetadata

WHOLE = plain((4, 6))


def quarter(rank, **changes):
    """This rank's 2 x 3 block of WHOLE as a Shard; changed as told."""
    tensor = changes.pop("tensor", None)
    where = [rank // 2 * 2, rank % 2 * 3]
    metadata = ShardMetadata(where, [2, 3], f"rank:{rank}/cpu")
    if tensor is None:
        tensor = WHOLE[where[0] : where[0] + 2, where[1] : where[1] + 3].contiguous()
    for name, value in changes.items():
        setattr(metadata, name, value)
    return Shard(tensor, metadata)


def errors_of(fn, n=4):
    """What each simulated rank raises."""

    def caught(rank):
        try:
            fn(rank)
        except FcollError as error:
            return error
        return None

    return fcoll.simulate_ranks(caught, n)


def test_blocks_of_all_ranks():
    def made(rank):
        tensor = sharded.init_from_local_shards([quarter(rank)], 4, 6)
        assert torch.equal(tensor.all_gather(), WHOLE)
        assert [s.placement.rank() for s in tensor.metadata().shards_metadata] == [0, 1, 2, 3]
        assert isinstance(tensor.sharding_spec(), sharded.EnumerableShardingSpec)
        assert tensor.requires_grad is False and tensor.dtype == torch.float32

    fcoll.simulate_ranks(made, 4)


def test_chunks_are_told_from_blocks_whatever_their_order():
    def made(rank):
        row = 3 - rank
        shard = Shard.from_tensor_and_offsets(WHOLE[row : row + 1].clone(), [row, 0], rank)
        tensor = sharded.init_from_local_shards([shard], (4, 6))
        assert tensor.sharding_spec() == sharded.chunk(0, [3, 2, 1, 0])
        assert torch.equal(tensor.all_gather(), WHOLE)

    fcoll.simulate_ranks(made, 4)


def test_ranks_with_none_and_ranks_with_two():
    def made(rank):
        held = {1: [0, 3], 2: [1, 2]}.get(rank, [])
        shards = [quarter(b) for b in held]
        for shard in shards:
            shard.metadata.placement = sharded.chunk(0, [rank]).placements[0]
        tensor = sharded.init_from_local_shards(shards[::-1], 4, 6)
        assert len(tensor.local_shards()) == len(held)
        assert torch.equal(tensor.all_gather(), WHOLE)
        assert torch.equal(sharded.reshard(tensor, sharded.chunk(1, 4)).all_gather(), WHOLE)

    fcoll.simulate_ranks(made, 4)


@pytest.mark.parametrize(
    ("size", "dim"), [((None, 3), 0), ((None, None), 0), ((2, None), 1), (([None, 3],), 0)]
)
def test_unknown_sizes_are_recomputed(size, dim):
    """Parts of other lengths along the dim, offsets that say nothing; rank 2 has no part."""

    def made(rank):
        shape = [2, 3]
        shape[dim] = rank + 1
        shard = Shard.from_tensor_and_offsets(torch.full(shape, float(rank)), [0, 0], rank)
        tensor = sharded.init_from_local_shards([shard] if rank != 2 else [], *size)
        shape[dim] = 1 + 2 + 4
        assert tensor.shape == tuple(shape)
        wanted = torch.tensor([0.0, 1, 1, 3, 3, 3, 3])
        view = (-1, 1) if dim == 0 else (1, -1)
        assert torch.equal(tensor.all_gather(), wanted.view(view).expand(shape))
        assert shard.metadata.shard_offsets == [0, 0], "the caller's shard is not changed"

    fcoll.simulate_ranks(made, 4)


SPARSE = torch.eye(2, 3).to_sparse()
# what rank 2 passes instead of its quarter, and the words that all ranks hear
ODD_ONES = {
    "dtype": (lambda: quarter(2, tensor=torch.ones(2, 3, dtype=torch.int64)), "dtype property"),
    "requires_grad": (
        lambda: quarter(2, tensor=torch.ones(2, 3, requires_grad=True)),
        "requires_grad property",
    ),
    "layout": (lambda: quarter(2, tensor=SPARSE), "Only torch.strided layout is currently"),
    "memory format": (
        lambda: quarter(2, tensor=torch.ones(3, 2).t()),
        "Only torch.contiguous_format memory_format is currently supported",
    ),
    "owner": (
        lambda: quarter(2, placement=sharded.chunk(0, [3]).placements[0]),
        "metadata's rank does not match with the rank in its process group",
    ),
    "overlap": (lambda: quarter(2, shard_offsets=[1, 0]), "overlap"),
    "gap": (
        lambda: Shard.from_tensor_and_offsets(torch.ones(1, 3), [2, 0], 2),
        "does not match tensor volume.*No shard holds .3:4, 0:3",
    ),
    "beyond": (lambda: quarter(2, shard_offsets=[3, 0]), "exceeds tensor dim"),
    "no place": (lambda: quarter(2, placement=None), "remote device is None"),
    "no rank of the group": (
        lambda: quarter(2, placement=sharded.chunk(0, [9]).placements[0]),
        "Global rank 9 does not exist in input process group",
    ),
    "not a shard": (lambda: None, "rank 2|NoneType"),
}


@pytest.mark.parametrize("what", ODD_ONES)
def test_one_odd_shard_is_an_error_on_every_rank(what):
    make, words = ODD_ONES[what]

    def build(rank):
        shards = [make() if rank == 2 else quarter(rank)]
        try:
            sharded.init_from_local_shards(shards, 4, 6)
        except Exception as error:
            return str(error), type(error)
        return None

    for rank, (text, kind) in enumerate(fcoll.simulate_ranks(build, 4)):
        assert re.search(words, text), text
        assert issubclass(kind, ValueError) or rank == 2


def test_ranks_that_mean_other_sizes():
    def build(rank):
        sharded.init_from_local_shards([quarter(rank)], 4, 6 if rank else 7)

    for error in errors_of(build):
        assert "global_size property does not match from different ranks" in str(error)
        assert "on rank:0" in str(error) and error.rank == 1


def test_nobody_has_a_shard():
    for error in errors_of(lambda rank: sharded.init_from_local_shards([], 4, 6)):
        assert "have no local shards on all ranks" in str(error)


def metadata(**changes):
    shards = [quarter(rank).metadata for rank in range(4)]
    whole = ShardedTensorMetadata(shards, torch.Size([4, 6]), sharded.TensorProperties())
    for name, value in changes.items():
        setattr(whole.tensor_properties, name, value)
    return whole


def test_global_metadata_need_no_communication(monkeypatch):
    monkeypatch.setattr(fcoll.functions, "all_gather_into_tensor", None)

    def made(rank):
        tensor = sharded.init_from_local_shards_and_global_metadata([quarter(rank)], metadata())
        assert tensor.shape == (4, 6)
        assert torch.equal(tensor.local_tensor(), quarter(rank).tensor)

    fcoll.simulate_ranks(made, 4)


@pytest.mark.parametrize(
    ("shards", "whole", "kind", "words"),
    [
        (lambda r: [], {}, RuntimeError, "does not match number of local shards metadata.*rank"),
        (lambda r: [quarter(r)] * 2, {}, RuntimeError, r"Number of local shards \(2\)"),
        (
            lambda r: [quarter(r)],
            {"dtype": torch.int32},
            ValueError,
            "Local shards' tensor dtype property is incompatible with.*on rank [0-3]",
        ),
        (
            lambda r: [quarter(r)],
            {"requires_grad": True},
            ValueError,
            "requires_grad property is incompatible with",
        ),
        (
            lambda r: [quarter(r)],
            {"pin_memory": True},
            ValueError,
            "pin_memory property is incompatible with",
        ),
        (
            lambda r: [quarter(r, tensor=SPARSE)],
            {},
            ValueError,
            "layout property is incompatible with",
        ),
        (
            lambda r: [quarter(r, tensor=torch.ones(3, 2).t())],
            {},
            ValueError,
            "Only torch.contiguous_format memory_format is currently supported",
        ),
        (
            lambda r: [quarter(r)],
            {"layout": torch.sparse_coo},
            ValueError,
            "Only torch.strided layout is currently supported",
        ),
    ],
)
def test_shards_that_are_not_what_the_metadata_say(shards, whole, kind, words):
    def build(rank):
        with pytest.raises(kind, match=words):
            ShardedTensor._init_from_local_shards_and_global_metadata(
                shards(rank), metadata(**whole)
            )

    fcoll.simulate_ranks(build, 4)


def test_a_local_tensor_of_each_rank():
    def made(rank):
        part = WHOLE.chunk(2)[rank // 2 if rank % 2 else 0].clone()
        spec = sharded.chunk(0, [1, 3])
        tensor = sharded.from_local_tensor(part, spec, 4, 6)
        assert len(tensor.local_shards()) == rank % 2
        assert torch.equal(tensor.all_gather(), WHOLE)
        with pytest.raises(ValueError, match=r"local_tensor is not a contiguous Tensor\."):
            sharded.from_local_tensor(torch.ones(6, 2).t(), spec, 4, 6)
        few = sharded.EnumerableShardingSpec([quarter(0).metadata])
        with pytest.raises(ValueError, match="do not cover the entire tensor"):
            sharded.from_local_tensor(part, few, 4, 6)

    fcoll.simulate_ranks(made, 4)


def test_a_tensor_of_one_rank_is_cut():
    def cut(rank):
        mine = WHOLE + 100 * rank
        for spec in (sharded.chunk(1, [3, 0, 1]), sharded.grid((2, 2), 4)):
            tensor = sharded.shard_tensor(mine.requires_grad_(), spec, src_rank=2)
            assert torch.equal(tensor.all_gather(), WHOLE + 200)
            assert all(s.tensor.is_leaf and s.tensor.requires_grad for s in tensor.local_shards())

    fcoll.simulate_ranks(cut, 4)


def test_ranks_that_cut_differently():
    def cut(rank):
        with pytest.raises(ValueError, match="does not match with src_rank"):
            sharded.shard_tensor(WHOLE, sharded.chunk(0, 4), src_rank=rank)
        with pytest.raises(ValueError, match="does not match with sharding_spec"):
            sharded.shard_tensor(WHOLE, sharded.chunk(0, [rank]))
        with pytest.raises(ValueError, match="not a contiguous Tensor"):
            sharded.shard_tensor(WHOLE.t(), sharded.chunk(0, 4))
        few = sharded.EnumerableShardingSpec([quarter(0).metadata])
        with pytest.raises(NotImplementedError, match="not implemented yet!"):
            sharded.shard_tensor(WHOLE, few)
        return dist.get_rank()

    assert fcoll.simulate_ranks(cut, 4) == [0, 1, 2, 3]


def test_a_base_has_no_group():
    made = sharded.ShardedTensorBase._init_from_local_shards_and_global_metadata(
        [quarter(rank) for rank in range(4)], metadata()
    )
    assert len(made.local_shards()) == 4 and made.shape == (4, 6)
