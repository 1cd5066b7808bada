"""A sharded tensor as the planner and the collectives see it: who holds what, and this rank's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.sharded._torch import ShardingSpec
from fcoll.sharded.errors import CannotReshard
from fcoll.sharded.placements import owners
from fcoll.sharded.plan import Held
from fcoll.sharded.specs import box_of


def held(st: Any) -> tuple[Held, ...]:
    """All blocks and their ranks, in the order of the metadata."""
    shards = st._metadata.shards_metadata
    found = zip(shards, owners(st._process_group, shards), strict=True)
    return tuple(Held(rank, box_of(shard)) for shard, (rank, _) in found)


def local_tensors(st: Any, blocks: tuple[Held, ...]) -> list[Tensor]:
    """This rank's data, in the order of ``held``."""
    me = dist.get_rank()
    mine = [block.box for block in blocks if block.rank == me]
    shards = list(st._local_shards)
    if len(shards) != len(mine):
        why = (
            f"rank {me} holds {len(shards)} shards of a tensor whose metadata place {len(mine)} on "
            f"it. Only single local shard supported for reshard. Number of shards: {len(shards)}"
        )
        raise CannotReshard(why=why, hint="Only single shards may be replaced, one by one.")
    found = []
    for box in mine:
        i = next((i for i, s in enumerate(shards) if box_of(s.metadata) == box), None)
        if i is None:
            why = f"rank {me} holds no shard at {box.offsets} of {box.sizes}, as the metadata say"
            raise CannotReshard(why=why, hint="Make it anew with init_from_local_shards.")
        found.append(shards.pop(i).tensor)
    return found


def anchor_of(st: Any) -> Tensor | None:
    """What ties this rank to the backward pass of the others, where there will be one."""
    if not (st._metadata.tensor_properties.requires_grad and torch.is_grad_enabled()):
        return None
    if st._anchor is not None:
        return st._anchor
    return like(st).requires_grad_()


def like(st: Any) -> Tensor:
    """An empty tensor of its dtype, on the device of this rank's shards or, where it has none, the
    one that the group serves."""
    return torch.empty(0, dtype=st._metadata.tensor_properties.dtype, device=st.device)


def same_layout(one: ShardingSpec, other: ShardingSpec) -> bool:
    return type(one) is type(other) and one == other
