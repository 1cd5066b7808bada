"""A plain tensor of one rank -> a sharded one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcoll.groups import GroupLike, resolve
from fcoll.sharded._torch import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
)
from fcoll.sharded.boxes import Box
from fcoll.sharded.errors import BadLayout, BadShards, CannotReshard, ShardsDiffer
from fcoll.sharded.exchange import exchanged
from fcoll.sharded.objects import all_gather_objects
from fcoll.sharded.placements import owners, process_group
from fcoll.sharded.plan import Held, Plan
from fcoll.sharded.specs import GridShardingSpec, box_of, layout_of
from fcoll.sharded.tensor import ShardedTensor
from fcoll.sharded.validate import properties_of


def shard_tensor(
    tensor: Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: GroupLike = None
) -> ShardedTensor:
    """Cut the tensor of rank ``src_rank`` of the group; the others' gives size and dtype.

    The ranks first compare spec and source. Shards are leaves that require a gradient if the
    tensor does.

    >>> x = torch.arange(2.0 * n) + 100 * rank
    >>> st = fcoll.sharded.shard_tensor(x, fcoll.sharded.chunk(0, n))
    >>> torch.equal(st.local_tensor(), torch.arange(2.0) + 2 * rank)
    True
    """
    g = resolve(process_group)
    mine = {
        "src_rank": src_rank,
        "sharding_spec": sharding_spec,
        "size": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "contiguous": tensor.is_contiguous(),
    }
    everyone = all_gather_objects(mine, g)
    if not tensor.is_contiguous():
        raise BadShards(why="input tensor is not a contiguous Tensor", hint="Use x.contiguous().")
    for rank, theirs in zip(g.ranks, everyone, strict=True):
        for name, value in mine.items():
            if value != theirs[name]:
                why = (
                    f"{name}={value} on rank: {g.ranks[g.rank]} does not match with "
                    f"{name}={theirs[name]} on rank: {rank}"
                )
                raise ShardsDiffer(why=why, hint="Pass the same on all ranks.")
    if type(sharding_spec).shard not in _KNOWN:  # a spec of the user's has a way of its own
        return sharding_spec.shard(tensor, src_rank, process_group)  # type: ignore[return-value]
    return scatter(tensor, sharding_spec, src_rank, process_group)


_KNOWN = (ChunkShardingSpec.shard, EnumerableShardingSpec.shard, GridShardingSpec.shard)


def scatter(tensor: Tensor, spec: ShardingSpec, src_rank: int, group: GroupLike) -> ShardedTensor:
    """``shard_tensor`` of ranks that agree."""
    pg = process_group(group)
    g, properties, size = resolve(pg), properties_of(tensor), tensor.size()
    try:
        layout = layout_of(spec, size, properties)
    except BadLayout as wrong:
        hint = "A spec that leaves a part of the tensor out is not implemented yet!"
        raise CannotReshard(why=f"shard_tensor: {wrong}", hint=hint) from wrong
    held = tuple(
        Held(rank, box_of(shard))
        for shard, (rank, _) in zip(layout, owners(pg, layout), strict=True)
    )
    plan = Plan((Held(g.ranks[src_rank], Box.whole(size)),), held)
    whole = tensor.detach()
    tensors, _ = exchanged(plan, g, [whole] if g.rank == src_rank else [], whole)
    mine = [s for s, block in zip(layout, held, strict=True) if block.rank == dist.get_rank()]
    shards = [
        Shard(t.requires_grad_(tensor.requires_grad), shard)
        for t, shard in zip(tensors, mine, strict=True)
    ]
    metadata = ShardedTensorMetadata(layout, size, properties)
    made: Any = ShardedTensor._made(spec, metadata, shards, pg)
    return made
