"""A sharded tensor cut another way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fcoll.sharded._torch import Shard, ShardedTensorMetadata, ShardingSpec
from fcoll.sharded.errors import BadLayout, CannotReshard
from fcoll.sharded.exchange import exchanged
from fcoll.sharded.layout import anchor_of, held, like, local_tensors, same_layout
from fcoll.sharded.placements import owners
from fcoll.sharded.plan import Held, Plan
from fcoll.sharded.specs import box_of, layout_of


def reshard(st: Any, spec: ShardingSpec) -> Any:
    """The same tensor cut by another spec, as a new one.

    Elements that stay on their rank are not sent; the others once, in one all_to_all_single.
    Differentiable: the gradient goes the way back.

    >>> st = fcoll.sharded.arange(fcoll.sharded.chunk(0, n), n, 2 * n)
    >>> columns = fcoll.sharded.reshard(st, fcoll.sharded.chunk(1, n))
    >>> columns.local_tensor().shape == (n, 2), st.local_tensor().shape == (1, 2 * n)
    (True, True)
    >>> torch.equal(columns.all_gather(), st.all_gather())
    True
    """
    metadata, shards, anchor = _resharded(st, spec)
    return st._with(shards, spec=spec, metadata=metadata, anchor=anchor)


def reshard_(st: Any, spec: ShardingSpec) -> Any:
    """The same in place."""
    if same_layout(st._sharding_spec, spec):
        return st
    metadata, shards, anchor = _resharded(st, spec)
    if st.requires_grad and not torch.is_grad_enabled():
        for shard in shards:  # a parameter stays one
            shard.tensor.requires_grad_()
    st._local_shards, st._anchor, st._sharding_spec = shards, anchor, spec
    st._metadata.shards_metadata = metadata.shards_metadata
    return st


def _resharded(
    st: Any, spec: ShardingSpec
) -> tuple[ShardedTensorMetadata, list[Shard], Tensor | None]:
    group, old = st.group, st._metadata
    try:
        layout = layout_of(spec, old.size, old.tensor_properties)
    except BadLayout as wrong:
        hint = "(torch takes no such spec at all: Only ChunkShardingSpec supported for reshard.)"
        raise CannotReshard(why=f"reshard: {wrong}", hint=hint) from wrong
    # in rank order, as torch's reshard leaves them
    placed = sorted(zip(layout, owners(st._process_group, layout), strict=True), key=_rank)
    blocks = held(st)
    plan = Plan(blocks, tuple(Held(rank, box_of(shard)) for shard, (rank, _) in placed))
    anchor = anchor_of(st)
    tensors, anchor = exchanged(plan, group, local_tensors(st, blocks), like(st), anchor)
    me = group.ranks[group.rank]
    mine = [shard for shard, (rank, _) in placed if rank == me]
    shards = [Shard(tensor, shard) for tensor, shard in zip(tensors, mine, strict=True)]
    properties = replace(old.tensor_properties, requires_grad=anchor is not None)
    metadata = ShardedTensorMetadata([shard for shard, _ in placed], old.size, properties)
    return metadata, shards, anchor


def _rank(placed: Any) -> int:
    return placed[1][0]
