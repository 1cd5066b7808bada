"""A sharded tensor of data that the ranks have already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.groups import Group, GroupLike, resolve
from fcoll.sharded._torch import Shard, ShardedTensorMetadata, ShardingSpec, ShardMetadata
from fcoll.sharded.errors import BadShards, SeveralShards, ShardsDiffer
from fcoll.sharded.objects import all_gather_objects
from fcoll.sharded.placements import owner, owners, process_group
from fcoll.sharded.specs import check_layout, inferred_spec, layout_of
from fcoll.sharded.validate import (
    agreed,
    check_against,
    check_properties,
    flat_size,
    metadata_of,
    properties_of,
    stacked,
)


def from_local_shards(
    cls: Any, shards: Sequence[Shard], global_size: Any, group: GroupLike, init_rrefs: bool
) -> Any:
    """Ranks tell one another what they hold; all raise if that is no tensor."""
    pg = process_group(group)
    g, me = resolve(pg), dist.get_rank()
    dim = _unknown_dim(global_size)
    metadata = agreed(_told(g, lambda: _of_rank(shards, global_size, me, pg)), g.ranks)
    if dim is not None:
        placed, size = stacked(metadata.shards_metadata, dim)
        metadata = replace(metadata, shards_metadata=placed, size=size)
        mine = [shard for shard in placed if owner(pg, shard.placement)[0] == me]
        shards = [Shard(s.tensor, m) for s, m in zip(shards, mine, strict=True)]
    check_layout(metadata.shards_metadata, metadata.size)
    spec = inferred_spec(metadata.shards_metadata, metadata.size)
    ordered = layout_of(spec, metadata.size)  # as a tensor that is made with this spec lists them
    metadata = replace(metadata, shards_metadata=ordered)
    return cls._made(spec, metadata, list(shards), pg, init_rrefs=init_rrefs, agreed=True)


def _unknown_dim(global_size: Sequence[Any]) -> int | None:
    """The dim along which shards are put one behind the other: where the size has a None; the
    first if there are several."""
    dims = global_size[0] if len(global_size) == 1 else global_size
    unknown = (
        [d for d, n in enumerate(dims) if n is None] if isinstance(dims, (list, tuple)) else []
    )
    if len(global_size) == 1 and global_size[0] is None:
        unknown = [0]
    return unknown[0] if len(unknown) == 1 else 0 if unknown else None


def _of_rank(
    shards: Sequence[Shard], global_size: Any, rank: int, pg: Any
) -> ShardedTensorMetadata | None:
    dims = global_size[0] if len(global_size) == 1 else global_size
    if isinstance(dims, (list, tuple)):
        dims = [0 if n is None else n for n in dims]
    size = flat_size((0,) if dims is None else dims if isinstance(dims, list) else (dims,))
    if not shards:
        return None
    return metadata_of(shards, size, rank, owners(pg, [shard.metadata for shard in shards]))


def _told(g: Group, find: Any) -> list[Any]:
    """What each rank finds. If that fails on one, it raises its error and the others one that
    names it."""
    mistake = None
    found = None
    try:
        found = find()
    except Exception as error:
        mistake = error
    told = all_gather_objects((found, str(mistake) if mistake else None), g)
    if mistake is not None:
        raise mistake
    for rank, (_, text) in zip(g.ranks, told, strict=True):
        if text is not None:
            theirs = BadShards(why=f"rank {rank} could not give its shards", hint=text)
            theirs.rank = rank
            raise theirs
    return [metadata for metadata, _ in told]


def from_global_metadata(
    cls: Any,
    shards: Sequence[Shard],
    metadata: ShardedTensorMetadata,
    group: GroupLike,
    init_rrefs: bool,
    spec: ShardingSpec | None,
) -> Any:
    """Every rank knows all of it: nothing is sent."""
    pg, me = process_group(group), dist.get_rank()
    all_shards, properties = metadata.shards_metadata, metadata.tensor_properties
    mine = [rank for rank, _ in owners(pg, all_shards)].count(me)
    if len(shards) != mine:
        why = (
            f"Number of local shards ({len(shards)}) does not match number of local shards "
            f"metadata in sharded_tensor_metadata ({mine}) on rank ({me})"
        )
        raise ShardsDiffer(why=why, hint="Pass the shards that the metadata place on this rank.")
    check_properties(properties.layout, torch.contiguous_format)
    check_against(shards, properties, owners(pg, [shard.metadata for shard in shards]))
    check_layout(all_shards, metadata.size)
    spec = spec or inferred_spec(all_shards, metadata.size)
    return cls._made(spec, metadata, list(shards), pg, init_rrefs=init_rrefs)


def from_local_tensor(
    cls: Any,
    tensor: Tensor,
    spec: ShardingSpec,
    global_size: Any,
    group: GroupLike,
    init_rrefs: bool,
) -> Any:
    """Each rank has the data of its shard: nothing is sent."""
    if not tensor.is_contiguous():
        why = f"local_tensor is not a contiguous Tensor. on rank:{dist.get_rank()}"
        raise BadShards(why=why, hint="Pass x.contiguous().")
    size, properties = flat_size(global_size), properties_of(tensor)
    metadata = ShardedTensorMetadata(layout_of(spec, size, properties), size, properties)
    mine = _placed_here(metadata.shards_metadata, process_group(group))
    if len(mine) > 1:
        raise SeveralShards(count=len(mine), rank=dist.get_rank())
    shards = [Shard(tensor, shard) for shard in mine]
    return from_global_metadata(cls, shards, metadata, group, init_rrefs, spec)


def _placed_here(shards: Sequence[ShardMetadata], pg: Any) -> list[ShardMetadata]:
    me = dist.get_rank()
    found = zip(shards, owners(pg, shards), strict=True)
    return [shard for shard, (rank, _) in found if rank == me]
