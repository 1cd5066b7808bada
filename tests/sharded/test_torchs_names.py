"""torch's names, served by fcoll: programs as they are written for torch's ShardedTensor."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import launch
from torch.distributed._shard import api, sharded_tensor
from torch.distributed._shard.sharded_tensor import api as tensor_api
from torch.distributed._shard.sharded_tensor import utils
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
)
from torch.distributed._shard.sharding_spec import api as spec_api
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object

import fcoll
from fcoll import sharded

PLACES = ["rank:0/cpu", "rank:1/cpu", "rank:2/cpu", "rank:3/cpu"]


def test_names_are_replaced_wherever_torch_has_them_and_put_back():
    torchs = sharded_tensor.ShardedTensor
    assert torchs is not sharded.ShardedTensor
    with sharded.serve_torch():
        for module in (sharded_tensor, tensor_api, api, planner_helpers):
            assert module.ShardedTensor is sharded.ShardedTensor
        assert sharded_tensor.rand is sharded.rand
        assert spec_api.custom_sharding_spec_op is sharded.sharding_spec_op
    for module in (sharded_tensor, tensor_api, api, planner_helpers):
        assert module.ShardedTensor is torchs


def creation(rank):
    spec = ChunkShardingSpec(dim=0, placements=[*PLACES])
    st = sharded_tensor.empty(spec, 10, 20)
    assert st.local_shards()[0].tensor.size() == ((1, 20) if rank == 3 else (3, 20))
    for r, shard in enumerate(st.metadata().shards_metadata):
        assert shard.shard_offsets == [r * 3, 0] and str(shard.placement) == f"rank:{r}/cpu"
    st = sharded_tensor.full(spec, size=(10, 20), fill_value=1234, dtype=torch.int32)
    assert torch.equal(st.local_tensor(), torch.full_like(st.local_tensor(), 1234))
    few = sharded_tensor.empty(spec, 2, 20)  # less rows than ranks
    assert few.local_tensor().numel() == (20 if rank < 2 else 0)
    twice = ChunkShardingSpec(dim=0, placements=[*PLACES, *PLACES])
    assert [s.tensor.shape for s in sharded_tensor.ones(twice, 16, 2).local_shards()] == [
        (2, 2)
    ] * 2


def gathering(rank):
    places = ["rank:0/cpu", "rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:2/cpu"]
    st = sharded_tensor.ones(ChunkShardingSpec(0, places), 10, 20)
    full = torch.zeros(10, 20) if rank == 1 else None
    st.gather(1, full)
    assert full is None or torch.equal(full, torch.ones(10, 20))


def groups(rank):
    group = dist.new_group(ranks=[1, 2, 3])
    spec = EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [5, 5], "rank:1/cpu"),
            ShardMetadata([5, 0], [5, 5], "rank:3/cpu"),
        ]
    )
    st = sharded_tensor.ones(spec, 10, 5, process_group=group)
    assert len(st.local_shards()) == (rank in (1, 3))
    if rank:
        shard = sharded_tensor.Shard(
            torch.full((5, 5), float(rank)),
            ShardMetadata([5 * (rank - 1), 0], [5, 5], f"rank:{rank}/cpu"),
        )
        made = sharded_tensor.init_from_local_shards([shard], [15, 5], process_group=group)
        assert torch.equal(made.all_gather()[::5, 0], torch.tensor([1.0, 2.0, 3.0]))


def shuffled(dim, seed):
    places = [*PLACES]
    random.Random(seed).shuffle(places)
    return ChunkShardingSpec(dim, places)


def resharding(rank):
    for old, new in ((0, 0), (0, 1), (1, 0), (1, 1)):
        spec, other = shuffled(old, 5), shuffled(new, 6)
        for size in ([13, 21], [12, 24]):
            torch.manual_seed(0)
            whole = torch.rand(*size)
            st, compare = api._shard_tensor(whole, spec), api._shard_tensor(whole, other)
            st.reshard(other)
            compare._metadata.shards_metadata.sort(key=lambda shard: shard.placement.rank())
            assert st._metadata == compare._metadata
            assert torch.equal(st.local_tensor(), compare.local_tensor())
            assert st.local_shards()[0].metadata == compare.local_shards()[0].metadata


def by_torchs_own_method(rank):
    """The specs are torch's: their ``shard`` makes what torch's name says."""
    st = shuffled(0, 3).shard(torch.arange(10.0), process_group=dist.group.WORLD)
    assert isinstance(st, sharded.ShardedTensor)
    assert torch.equal(st.all_gather(), torch.arange(10.0))


def custom_ops(rank):
    @sharded_tensor.custom_sharded_op_impl(torch.asinh)
    def asinh(types, args, kwargs, process_group):
        return torch.asinh(args[0].local_shards()[0].tensor)

    @spec_api.custom_sharding_spec_op(ChunkShardingSpec, torch.acosh)
    def acosh(types, args, kwargs, process_group):
        return process_group

    st = sharded_tensor.rand(ChunkShardingSpec(0, [*PLACES]), 8, 2)
    assert torch.equal(torch.asinh(st), torch.asinh(st.local_tensor()))
    assert torch.acosh(st) is dist.group.WORLD


def invalid(rank):
    with pytest.raises(ValueError, match="Global rank 5 does not exist in input process group"):
        sharded_tensor.empty(ChunkShardingSpec(0, ["rank:5/cpu"]), 10, 20)
    place = ShardMetadata([10], [0], "rank:0/cpu").placement
    assert utils._parse_and_validate_remote_device(None, place) == (0, torch.device("cpu"))
    with pytest.raises(ValueError, match="remote device is None"):
        utils._parse_and_validate_remote_device(dist.group.WORLD, None)


@dataclass
class Own(ShardingSpec):
    """A spec of the program's own, with its own way to shard."""

    placements: list

    def build_metadata(self, tensor_sizes, tensor_properties):
        return ChunkShardingSpec(0, self.placements).build_metadata(tensor_sizes, tensor_properties)

    def shard(self, tensor, src_rank=0, process_group=None):
        raise NotImplementedError("Own.shard is not implemented")


def own_specs(rank):
    spec = Own([*PLACES])
    assert sharded_tensor.ones(spec, 8, 2).local_tensor().shape == (2, 2)
    with pytest.raises(NotImplementedError, match=r"Own\.shard is not implemented"):
        api._shard_tensor(torch.ones(8, 2), spec)


def torchs_programs(rank):
    with sharded.serve_torch():
        programs = (creation, gathering, groups, resharding, by_torchs_own_method, custom_ops)
        for program in (*programs, invalid, own_specs):
            program(rank)


def test_programs_on_real_ranks(ranks4):
    ranks4.run(torchs_programs, timeout=120)


def test_programs_on_simulated_ranks():
    with sharded.serve_torch():
        for program in (creation, gathering, groups, resharding, by_torchs_own_method, invalid):
            fcoll.simulate_ranks(program, 4)
        fcoll.simulate_ranks(own_specs, 4)


class Nameless(dist.ProcessGroup):
    """A group of a test that only knows how many ranks there are."""

    def getBackendName(self):
        return "nameless"


def in_a_nameless_world(rank):
    """Metadata, plans and lookups of a checkpoint need no collective."""
    dist.destroy_process_group()
    dist.Backend.register_backend(
        "nameless", lambda store, r, n, timeout: Nameless(r, n), devices=["cpu"]
    )
    store = dist.HashStore()
    dist.init_process_group("nameless", rank=1, world_size=4, store=store)
    layout = sharded.ones(sharded.chunk(0, 4), 8, 2).metadata()
    mine = sharded.Shard(torch.ones(2, 2), layout.shards_metadata[1])
    st = sharded.init_from_local_shards_and_global_metadata([mine], layout)
    found = find_state_dict_object({"st": st}, MetadataIndex("st", [2, 0]))
    assert found is mine.tensor
    with pytest.raises(ValueError, match="no offset was provided"):
        find_state_dict_object({"st": st}, MetadataIndex("st"))
    with pytest.raises(ValueError, match="Could not find shard at"):
        find_state_dict_object({"st": st}, MetadataIndex("st", [0, 0]))


def test_a_world_without_a_name():
    assert launch(in_a_nameless_world, 1).errors == [None]
