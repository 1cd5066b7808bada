"""Sharded tensors from shards that the ranks have already, checked to make one tensor: on this rank
and over all ranks.

Errors name the rank and the property. A rank whose shards are wrong tells the others, so that all
raise and nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.eager.small_messages import gather_objects
from fcoll.groups import Group, GroupLike, resolve
from fcoll.sharded import _torch
from fcoll.sharded._torch import (
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from fcoll.sharded.errors import BadShards, BadSize, SeveralShards, ShardsDiffer
from fcoll.sharded.layout_agreement import attempt
from fcoll.sharded.specs import (
    Owner,
    as_process_group,
    check_layout,
    inferred_spec,
    layout_of,
    owners,
    shards_here,
)
from fcoll.transport.handshake import first_difference

STRIDED = "Only torch.strided layout is currently supported"
CONTIGUOUS = "Only torch.contiguous_format memory_format is currently supported"


@_torch.uncompiled
def init_from_local_shards(
    cls: Any,
    local_shards: Sequence[Shard],
    *global_size: Any,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
) -> Any:
    """A sharded tensor of the shards that each rank has; some may have none, and pass [].

    The ranks compare size, dtype, requires_grad and pinning, and that the shards cover the tensor
    once; if not, all raise. A None in the size is recomputed: the shards are put one behind the
    other along that dim, in rank order, whatever their offsets say.

    >>> shard = fcoll.sharded.Shard.from_tensor_and_offsets(torch.ones(2, 3), [2 * rank, 0], rank)
    >>> fcoll.sharded.init_from_local_shards([shard], 2 * n, 3).shape == (2 * n, 3)
    True
    >>> fcoll.sharded.init_from_local_shards([shard], None, 3).shape == (2 * n, 3)
    True
    """
    pg = as_process_group(process_group)
    g, me = resolve(pg), dist.get_rank()
    dims = _dims(global_size)
    metadata = _of_all(_gathered(g, lambda: _of_rank(local_shards, dims, me, pg)), g.ranks)
    if None in dims:  # of several the first
        dim = dims.index(None) if dims.count(None) == 1 else 0
        placed, size = _stacked(metadata.shards_metadata, dim)
        metadata = replace(metadata, shards_metadata=placed, size=size)
        mine = zip(local_shards, shards_here(pg, placed), strict=True)
        local_shards = [Shard(shard.tensor, stacked) for shard, (stacked, _) in mine]
    check_layout(metadata.shards_metadata, metadata.size)
    spec = inferred_spec(metadata.shards_metadata, metadata.size)
    ordered = layout_of(spec, metadata.size)  # as a tensor that is made with this spec lists them
    metadata = replace(metadata, shards_metadata=ordered)
    return cls._assemble(spec, metadata, list(local_shards), pg, init_rrefs=init_rrefs, agreed=True)


def _of_rank(
    shards: Sequence[Shard], dims: Sequence[Any], rank: int, pg: Any
) -> ShardedTensorMetadata | None:
    size = flat_size([0 if n is None else n for n in dims])
    if not shards:
        return None
    return _metadata_of(shards, size, rank, owners(pg, [shard.metadata for shard in shards]))


def _gathered(g: Group, find: Any) -> list[Any]:
    """What each rank finds. If that fails on one, it raises its error and the others one that
    names it."""
    own, mistake = attempt(find)
    everyone = gather_objects((own, str(mistake) if mistake else None), g)
    if mistake is not None:
        raise mistake
    for rank, (_, text) in zip(g.ranks, everyone, strict=True):
        if text is not None:
            raise _wrong(rank, f"rank {rank} could not give its shards", text)
    return [metadata for metadata, _ in everyone]


@_torch.uncompiled
def init_from_local_shards_and_global_metadata(
    cls: Any,
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
    sharding_spec: ShardingSpec | None = None,
) -> Any:
    """From local shards, where every rank knows all metadata: nothing is sent, each rank checks its
    own shards, and that all together cover the tensor once."""
    pg, me = as_process_group(process_group), dist.get_rank()
    shards, metadata = local_shards, sharded_tensor_metadata
    all_shards, properties = metadata.shards_metadata, metadata.tensor_properties
    mine = len(shards_here(pg, all_shards))
    if len(shards) != mine:
        why = (
            f"Number of local shards ({len(shards)}) does not match number of local shards "
            f"metadata in sharded_tensor_metadata ({mine}) on rank ({me})"
        )
        raise ShardsDiffer(why=why, hint="Pass the shards that the metadata place on this rank.")
    check_properties(properties.layout, torch.contiguous_format)
    _check_against(shards, properties, owners(pg, [shard.metadata for shard in shards]))
    check_layout(all_shards, metadata.size)
    spec = sharding_spec or inferred_spec(all_shards, metadata.size)
    return cls._assemble(spec, metadata, list(shards), pg, init_rrefs=init_rrefs)


@_torch.uncompiled
def init_from_local_tensor(
    cls: Any,
    local_tensor: Tensor,
    sharding_spec: ShardingSpec,
    *global_size: Any,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
) -> Any:
    """From one tensor a rank, where the spec says which part of the whole it is.

    >>> x = torch.full((2, 3), float(rank))
    >>> st = fcoll.sharded.from_local_tensor(x, fcoll.sharded.chunk(0, n), 2 * n, 3)
    >>> st.local_tensor() is x
    True
    """
    pg, me = as_process_group(process_group), dist.get_rank()
    if not local_tensor.is_contiguous():
        why = f"local_tensor is not a contiguous Tensor. on rank:{me}"
        raise BadShards(why=why, hint="Pass x.contiguous().")
    size, properties = flat_size(global_size), properties_of(local_tensor)
    layout = layout_of(sharding_spec, size, properties)
    shards = [Shard(local_tensor, shard) for shard, _ in shards_here(pg, layout)]
    if len(shards) > 1:
        raise SeveralShards(count=len(shards), rank=me)
    metadata = ShardedTensorMetadata(layout, size, properties)
    return init_from_local_shards_and_global_metadata(
        cls, shards, metadata, pg, init_rrefs, sharding_spec
    )


# -- checks ---


def flat_size(size: Sequence[Any]) -> torch.Size:
    """A size given as one sequence or as several numbers.

    >>> flat_size(([2, 3],)) == flat_size((2, 3))
    True
    """
    dims = _dims(size)
    if not all(isinstance(dim, int) for dim in dims):
        raise BadSize(dims=dims)
    return torch.Size(dims)


def _dims(size: Sequence[Any]) -> list[Any]:
    return list(size[0]) if len(size) == 1 and isinstance(size[0], (list, tuple)) else list(size)


def properties_of(tensor: Tensor) -> TensorProperties:
    return TensorProperties(
        dtype=tensor.dtype,
        layout=tensor.layout,
        requires_grad=tensor.requires_grad,
        memory_format=torch.contiguous_format,
        pin_memory=tensor.is_pinned(),
    )


def check_properties(layout: torch.layout, memory_format: torch.memory_format) -> None:
    """Shards are strided and contiguous."""
    if layout != torch.strided:
        raise BadShards(why=f"{STRIDED}, not {layout}", hint="Convert it, as in x.to_dense().")
    if memory_format != torch.contiguous_format:
        raise BadShards(why=f"{CONTIGUOUS}, not {memory_format}", hint="Leave it out.")


def _metadata_of(
    shards: Sequence[Shard], size: torch.Size, rank: int, owners: Sequence[Owner]
) -> ShardedTensorMetadata:
    """What one rank knows of the tensor by its local shards, which must agree."""
    first = shards[0].tensor
    for shard, (placed_on, device) in zip(shards, owners, strict=True):
        tensor = shard.tensor
        if tensor.layout != torch.strided:
            why = f"{STRIDED}, but found {tensor.layout} on rank:{rank}"
            raise _wrong(rank, why, "Convert it, as in x.to_dense().")
        if not tensor.is_contiguous():
            raise _wrong(rank, f"{CONTIGUOUS}! A shard on rank:{rank} is not", _CONTIGUOUS)
        if placed_on != rank:
            why = (
                "Local shard metadata's rank does not match with the rank in its process group! "
                f"Found current rank in the process group: {rank}, local ShardMetadata "
                f"placement's rank: {placed_on}"
            )
            raise _wrong(rank, why, "Give each rank the shards that are placed on it.")
        if tensor.device != device:
            why = (
                "Local shard tensor device does not match with local Shard's placement! Found "
                f"local shard tensor device: {tensor.device}, local shard metadata placement "
                f"device: {device}, on rank:{rank}"
            )
            raise _wrong(rank, why, "Move the tensor, or place the shard there.")
        _same_on_rank(rank, "size", shard.metadata.shard_sizes, list(tensor.size()))
        _same_on_rank(rank, "pin_memory", tensor.is_pinned(), first.is_pinned())
        _same_on_rank(rank, "dtype", tensor.dtype, first.dtype)
        _same_on_rank(rank, "requires_grad", tensor.requires_grad, first.requires_grad)
    return ShardedTensorMetadata([s.metadata for s in shards], size, properties_of(first))


_CONTIGUOUS = "Pass x.contiguous()."


def _wrong(rank: int, why: str, hint: str) -> BadShards:
    return BadShards(why=why, hint=hint, rank=rank)


def _same_on_rank(rank: int, name: str, one: Any, other: Any) -> None:
    if one != other:
        why = (
            f"Local shards' tensor {name} property need to be the same on rank:{rank}! Found one "
            f"local shard tensor {name}={one}, the other local shard tensor {name}={other}"
        )
        raise _wrong(rank, why, "Shards of a tensor are alike.")


def _check_against(
    shards: Sequence[Shard], properties: TensorProperties, owners: Sequence[Owner]
) -> None:
    """Local shards have the properties that the global metadata name."""
    for shard, (rank, device) in zip(shards, owners, strict=True):
        tensor, own = shard.tensor, shard.metadata
        _as_named(rank, "layout", properties.layout, tensor.layout)
        if not tensor.is_contiguous():
            raise _wrong(rank, f"{CONTIGUOUS}! A shard on rank:{rank} is not", _CONTIGUOUS)
        _as_named(rank, "size", own.shard_sizes, list(tensor.size()), "local ShardMetadata")
        _as_named(rank, "pin_memory", properties.pin_memory, tensor.is_pinned())
        _as_named(rank, "device", device, tensor.device, "local ShardMetadata")
        _as_named(rank, "dtype", properties.dtype, tensor.dtype)
        _as_named(rank, "requires_grad", properties.requires_grad, tensor.requires_grad)


def _as_named(rank: int, name: str, want: Any, actual: Any, by: str = "tensor property") -> None:
    if want != actual:
        why = (
            f"Local shards' tensor {name} property is incompatible with {by} on rank {rank}: "
            f"{by} {name}={want}, local shard tensor {name}={actual}"
        )
        raise _wrong(rank, why, "Make the shards as the metadata say, or the other way round.")


def _of_all(
    by_rank: Sequence[ShardedTensorMetadata | None], ranks: Sequence[int]
) -> ShardedTensorMetadata:
    """The metadata of all ranks as one; None for ranks that have no shard."""
    of_rank = [(r, m) for r, m in zip(ranks, by_rank, strict=True) if m is not None]
    if not of_rank:
        raise BadShards(
            why="ShardedTensor have no local shards on all ranks!",
            hint="At least one rank must pass a shard.",
        )
    if difference := first_difference([_view(m) for _, m in of_rank]):
        name, values = difference
        (first_rank, _), (rank, _) = of_rank[0], of_rank[other := difference.other_than(0)]
        why = (
            f"ShardedTensor {name} property does not match from different ranks! Found "
            f"{name}={values[0]} on rank:{first_rank}, and {name}={values[other]} on rank:{rank}"
        )
        raise _wrong(rank, why, "Make it the same on all ranks.")
    first = of_rank[0][1]
    shards = [shard for _, m in of_rank for shard in m.shards_metadata]
    return ShardedTensorMetadata(shards, first.size, first.tensor_properties)


def _view(metadata: ShardedTensorMetadata) -> dict[str, Any]:
    """What ranks must agree on of a tensor that they have shards of."""
    properties = metadata.tensor_properties
    return {
        "global_size": metadata.size,
        "dtype": properties.dtype,
        "requires_grad": properties.requires_grad,
        "pin_memory": properties.pin_memory,
    }


def _stacked(shards: Sequence[ShardMetadata], dim: int) -> tuple[list[ShardMetadata], torch.Size]:
    """The shards one behind the other along a dim, in the order given; and the size of all."""
    placed, start = [], 0
    first = shards[0].shard_sizes
    for shard in shards:
        sizes = list(shard.shard_sizes)
        if sizes[:dim] + sizes[dim + 1 :] != first[:dim] + first[dim + 1 :]:
            why = f"shards of {first} and {sizes} cannot be put one behind the other along {dim}"
            raise BadShards(why=why, hint="All other dims must be equal.")
        offsets = [0] * len(sizes)
        offsets[dim] = start
        placed.append(ShardMetadata(offsets, sizes, shard.placement))
        start += sizes[dim]
    return placed, torch.Size([*first[:dim], start, *first[dim + 1 :]])
