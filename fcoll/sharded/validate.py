"""Do local shards make one tensor, on this rank and over all ranks?

Errors name the rank and the property. A rank whose shards are wrong tells the others, so that all
raise and nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.sharded._torch import (
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from fcoll.sharded.errors import BadShards, BadSize
from fcoll.sharded.placements import Owner

STRIDED = "Only torch.strided layout is currently supported"
CONTIGUOUS = "Only torch.contiguous_format memory_format is currently supported"


def flat_size(size: Sequence[Any]) -> torch.Size:
    """A size given as one sequence or as several numbers.

    >>> flat_size(([2, 3],)) == flat_size((2, 3))
    True
    """
    dims = list(size[0]) if len(size) == 1 and isinstance(size[0], (list, tuple)) else list(size)
    if not all(isinstance(dim, int) for dim in dims):
        raise BadSize(dims=dims)
    return torch.Size(dims)


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


def metadata_of(
    shards: Sequence[Shard], size: torch.Size, rank: int, owners: Sequence[Owner]
) -> ShardedTensorMetadata:
    """What one rank knows of the tensor by its local shards, which must agree."""
    first = shards[0].tensor
    for shard, (owner, device) in zip(shards, owners, strict=True):
        tensor = shard.tensor
        if tensor.layout != torch.strided:
            why = f"{STRIDED}, but found {tensor.layout} on rank:{rank}"
            raise _wrong(rank, why, "Convert it, as in x.to_dense().")
        if not tensor.is_contiguous():
            raise _wrong(rank, f"{CONTIGUOUS}! A shard on rank:{rank} is not", _CONTIGUOUS)
        if owner != rank:
            why = (
                "Local shard metadata's rank does not match with the rank in its process group! "
                f"Found current rank in the process group: {rank}, local ShardMetadata "
                f"placement's rank: {owner}"
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
    error = BadShards(why=why, hint=hint)
    error.rank = rank
    return error


def _same_on_rank(rank: int, name: str, one: Any, other: Any) -> None:
    if one != other:
        why = (
            f"Local shards' tensor {name} property need to be the same on rank:{rank}! Found one "
            f"local shard tensor {name}={one}, the other local shard tensor {name}={other}"
        )
        raise _wrong(rank, why, "Shards of a tensor are alike.")


def check_against(
    shards: Sequence[Shard], wanted: TensorProperties, owners: Sequence[Owner]
) -> None:
    """Local shards have the properties that the global metadata name."""
    for shard, (rank, device) in zip(shards, owners, strict=True):
        tensor, own = shard.tensor, shard.metadata
        _as_named(rank, "layout", wanted.layout, tensor.layout)
        if not tensor.is_contiguous():
            raise _wrong(rank, f"{CONTIGUOUS}! A shard on rank:{rank} is not", _CONTIGUOUS)
        _as_named(rank, "size", own.shard_sizes, list(tensor.size()), "local ShardMetadata")
        _as_named(rank, "pin_memory", wanted.pin_memory, tensor.is_pinned())
        _as_named(rank, "device", device, tensor.device, "local ShardMetadata")
        _as_named(rank, "dtype", wanted.dtype, tensor.dtype)
        _as_named(rank, "requires_grad", wanted.requires_grad, tensor.requires_grad)


def _as_named(rank: int, name: str, want: Any, got: Any, by: str = "tensor property") -> None:
    if want != got:
        why = (
            f"Local shards' tensor {name} property is incompatible with {by} on rank {rank}: "
            f"{by} {name}={want}, local shard tensor {name}={got}"
        )
        raise _wrong(rank, why, "Make the shards as the metadata say, or the other way round.")


def agreed(
    found: Sequence[ShardedTensorMetadata | None], ranks: Sequence[int]
) -> ShardedTensorMetadata:
    """The metadata of all ranks as one; None for ranks that have no shard."""
    of_rank = [(r, m) for r, m in zip(ranks, found, strict=True) if m is not None]
    if not of_rank:
        raise BadShards(
            why="ShardedTensor have no local shards on all ranks!",
            hint="At least one rank must pass a shard.",
        )
    first_rank, first = of_rank[0]
    for rank, other in of_rank[1:]:
        mine, theirs = first.tensor_properties, other.tensor_properties
        for name, one, two in (
            ("global_size", first.size, other.size),
            ("dtype", mine.dtype, theirs.dtype),
            ("requires_grad", mine.requires_grad, theirs.requires_grad),
            ("pin_memory", mine.pin_memory, theirs.pin_memory),
        ):
            if one != two:
                why = (
                    f"ShardedTensor {name} property does not match from different ranks! Found "
                    f"{name}={one} on rank:{first_rank}, and {name}={two} on rank:{rank}"
                )
                raise _wrong(rank, why, "Make it the same on all ranks.")
    shards = [shard for _, m in of_rank for shard in m.shards_metadata]
    return ShardedTensorMetadata(shards, first.size, first.tensor_properties)


def stacked(shards: Sequence[ShardMetadata], dim: int) -> tuple[list[ShardMetadata], torch.Size]:
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
