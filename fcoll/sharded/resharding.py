"""A sharded tensor cut another way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fcoll.sharded import _torch
from fcoll.sharded._torch import Shard, ShardedTensorMetadata, ShardingSpec, ShardMetadata
from fcoll.sharded.agreement import View, agreed, blocks_of, view_of
from fcoll.sharded.asking import traced
from fcoll.sharded.errors import BadLayout, CannotReshard
from fcoll.sharded.exchange import exchanged
from fcoll.sharded.layout import anchor_of, held, like, local_tensors, same_layout
from fcoll.sharded.placements import Owner, owners
from fcoll.sharded.plan import Held, Plan
from fcoll.sharded.specs import box_of, layout_of


@_torch.uncompiled
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
    metadata, shards, anchor = _resharded(st, _agreed_target(st, spec))
    agreed = not traced()
    return st._with(shards, spec=spec, metadata=metadata, anchor=anchor, agreed=agreed)


@_torch.uncompiled
def reshard_(st: Any, spec: ShardingSpec) -> Any:
    """The same in place."""
    layout = _agreed_target(st, spec)
    if same_layout(st._sharding_spec, spec):
        return st
    metadata, shards, anchor = _resharded(st, layout)
    if st.requires_grad and not torch.is_grad_enabled():
        for shard in shards:  # a parameter stays one
            shard.tensor.requires_grad_()
    st._local_shards, st._anchor, st._sharding_spec = shards, anchor, spec
    st._metadata = replace(st._metadata, shards_metadata=metadata.shards_metadata)
    st._agreed = not traced()
    return st


Placed = list[tuple[ShardMetadata, Owner]]


def _agreed_target(st: Any, spec: ShardingSpec) -> Placed:
    """The new shards and who will hold them, once all ranks have found the same."""

    def find() -> tuple[Placed, View]:
        placed = _target(st, spec)
        local_tensors(st, held(st))  # this rank has what the others count on
        return placed, view_of(st) | blocks_of("new shard", [shard for shard, _ in placed])

    return agreed("reshard", st.group, st.device, find)


def _target(st: Any, spec: ShardingSpec) -> Placed:
    old = st._metadata
    try:
        layout = layout_of(spec, old.size, old.tensor_properties)
    except BadLayout as wrong:
        hint = "(torch takes no such spec at all: Only ChunkShardingSpec supported for reshard.)"
        raise CannotReshard(why=f"reshard: {wrong}", hint=hint) from wrong
    # in rank order, as torch's reshard leaves them
    return sorted(zip(layout, owners(st._process_group, layout), strict=True), key=_rank)


def _resharded(st: Any, placed: Placed) -> tuple[ShardedTensorMetadata, list[Shard], Tensor | None]:
    group, old, blocks = st.group, st._metadata, held(st)
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
