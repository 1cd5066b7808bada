"""What rules and transfers use of a sharded tensor: its blocks, this rank's data, and result_of,
which makes the sharded result of an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.sharded import _torch
from fcoll.sharded._torch import (
    ChunkShardingSpec,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
)
from fcoll.sharded.errors import CannotReshard, CutDim, DimOutOfRange
from fcoll.sharded.specs import blocks_on, box_of, inferred_spec
from fcoll.sharded.transfer_plan import Box, HeldBlock

# -- blocks and data ---


def blocks_of(st: Any) -> tuple[HeldBlock, ...]:
    """All blocks and their ranks, in the order of the metadata."""
    return blocks_on(st._process_group, st._metadata.shards_metadata)


def local_tensors(st: Any, blocks: Sequence[HeldBlock] | None = None) -> list[Tensor]:
    """This rank's data, in the order of ``blocks_of``."""
    me = dist.get_rank()
    mine = [block.box for block in blocks or blocks_of(st) if block.rank == me]
    shards = list(st._local_shards)
    if len(shards) != len(mine):
        why = (
            f"rank {me} holds {len(shards)} shards of a tensor whose metadata place {len(mine)} on "
            f"it. Only single local shard supported for reshard. Number of shards: {len(shards)}"
        )
        raise CannotReshard(why=why, hint="Only single shards may be replaced, one by one.")
    tensors = []
    for box in mine:
        i = next((i for i, s in enumerate(shards) if box_of(s.metadata) == box), None)
        if i is None:
            why = f"rank {me} holds no shard at {box.offsets} of {box.sizes}, as the metadata say"
            raise CannotReshard(why=why, hint="Make it anew with init_from_local_shards.")
        tensors.append(shards.pop(i).tensor)
    return tensors


def empty_of(st: Any) -> Tensor:
    """A tensor without elements of its dtype, on the device of this rank's shards or, where it has
    none, the one that the group serves."""
    return torch.empty(0, dtype=st._metadata.tensor_properties.dtype, device=st.device)


def anchor_of(st: Any) -> Tensor | None:
    """What ties this rank to the backward pass of the others, where there will be one."""
    if not (st._metadata.tensor_properties.requires_grad and torch.is_grad_enabled()):
        return None
    return empty_of(st).requires_grad_() if st._anchor is None else st._anchor


def anchors_of(st: Any) -> list[Tensor]:
    """``anchor_of`` as a list of one tensor or none."""
    anchor = anchor_of(st)
    return [] if anchor is None else [anchor]


def same_layout(one: ShardingSpec, other: ShardingSpec) -> bool:
    return type(one) is type(other) and one == other


# -- dims ---


def cut_dims(st: Any) -> set[int]:
    """The dims along which no shard need reach from end to end."""
    spec, size = st._sharding_spec, st._metadata.size
    if isinstance(spec, ChunkShardingSpec):
        return {int(spec.dim) % len(size)}
    shards = [s.shard_sizes for s in st._metadata.shards_metadata if all(s.shard_sizes)]
    return {d for d in range(len(size)) if any(sizes[d] != size[d] for sizes in shards)}


def dim_of(st: Any, dim: int) -> int:
    """A dim counted from the front."""
    n = len(st._metadata.size)
    if not -n <= dim < n:
        raise DimOutOfRange(low=-n, high=n - 1, dim=dim)
    return dim % n


def check_whole(func: str, st: Any, *dims: int) -> None:
    """Raise unless each shard reaches from end to end along these dims."""
    cut, size = cut_dims(st), tuple(st._metadata.size)
    for dim in dims:
        if dim in cut:
            free = [d for d in range(len(size)) if d not in dims]
            raise CutDim(func=func, dim=dim, size=size, cut=sorted(cut), other=(free or [0])[0])


# -- new tensors ---


def probe_of(st: Any) -> Tensor:
    """A block of the tensor without elements, on its autograd graph.

    An op is run on it as on the shards: what comes out has the dtype of the result, tells whether
    it requires a gradient, and is its anchor; also on a rank that holds no shard.
    """
    anchor = anchor_of(st)
    flat = empty_of(st) if anchor is None else anchor
    return flat.reshape(0, *st._metadata.size[1:])


def on_each_shard(st: Any, func: Callable[[Tensor], Tensor], pin_memory: bool = False) -> Any:
    """``func`` of each shard, which keeps its size, as a sharded tensor."""
    return result_of(st, lambda s: func(s.tensor), func(probe_of(st)), pin_memory=pin_memory)


def result_of(
    st: Any,
    func: Callable[[Shard], Tensor],
    probe: Tensor,
    place: Callable[[Box], Box] | None = None,
    pin_memory: bool = False,
) -> Any:
    """A sharded tensor of what an op makes of st: ``func`` of each local shard, ``probe`` of its
    probe.

    ``place`` says where a block of st lies in the result, and of the whole's the size of that;
    without it nothing has moved. A shard without elements stays so.
    """
    old = st._metadata
    shards, size, spec = old.shards_metadata, old.size, st._sharding_spec
    if place is not None:
        shards = [_placed(shard, place, old.size) for shard in shards]
        size = torch.Size(place(Box.whole(old.size)).sizes)
        spec = inferred_spec(shards, size)
    properties = replace(
        old.tensor_properties,
        dtype=probe.dtype,
        requires_grad=probe.requires_grad,
        pin_memory=pin_memory,
    )
    anchor = probe.reshape(-1)[:0]
    local = []
    for shard in st._local_shards:
        new = shards[old.shards_metadata.index(shard.metadata)]
        empty = old.size.numel() and not shard.tensor.numel()
        tensor = anchor.reshape(new.shard_sizes) if empty else func(shard).contiguous()
        local.append(Shard(tensor, new))
    return st._with(
        local,
        spec=spec,
        metadata=ShardedTensorMetadata(list(shards), size, properties),
        anchor=anchor if probe.requires_grad else None,
        agreed=st._agreed and place is None,
    )


def _placed(shard: ShardMetadata, place: Callable[[Box], Box], size: torch.Size) -> ShardMetadata:
    """A shard's metadata in the result of an op on a tensor of this size."""
    box = box_of(shard)
    new = place(box)
    stays_empty = size.numel() and not box.volume and new.volume
    sizes = [0] * len(new.sizes) if stays_empty else list(new.sizes)
    return replace(shard, shard_offsets=list(new.offsets), shard_sizes=sizes)


def changed(st: Any, probe: Tensor) -> Any:
    """``st`` itself after an op in place; it may require a gradient since."""
    requires = probe.requires_grad or st._metadata.tensor_properties.requires_grad
    st._anchor = probe.reshape(-1)[:0] if probe.requires_grad else st._anchor
    set_requires_grad(st, requires)
    return st


def set_requires_grad(st: Any, requires: bool) -> None:
    """Say of the whole that it requires a gradient; its shards are left alone."""
    st._metadata.tensor_properties.requires_grad = requires
    with _torch.as_plain_tensors():
        st.requires_grad_(requires)
