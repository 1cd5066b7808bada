"""Sharded tensors in torch.distributed.checkpoint: which blocks to write and to read.

A checkpoint is a list of blocks with their offsets. It is read by whatever names blocks of the same
tensor: another layout, other ranks, a DTensor, torch's own ShardedTensor.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fcoll.sharded._torch import Shard
from fcoll.sharded.errors import BadShards

if TYPE_CHECKING:  # importing it takes a while, and most programs write no checkpoint
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def checkpoint_writer(folder: str | PathLike[str], **options: Any) -> FileSystemWriter:
    """A storage writer for ``dcp.save`` into a folder that has a checkpoint: until the new one is
    complete the folder has the old one, whatever fails.

    ``options`` are those of torch's FileSystemWriter. ``dcp.load`` reads it with torch's reader.

        dcp.save(state, storage_writer=fcoll.sharded.checkpoint_writer(folder))
    """
    from fcoll.sharded.io.checkpoint_writer import CheckpointWriter

    return CheckpointWriter(folder, **options)


def write_items(st: Any, name: str, value: object = None) -> list[WriteItem]:
    """What this rank writes of the tensor, which is the state dict's value of this name."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    props = st._metadata.tensor_properties
    properties = TensorProperties(
        props.dtype, props.layout, props.requires_grad, props.memory_format, props.pin_memory
    )
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, st._metadata.size),
        )
        for chunk in chunks(st)
    ]


def chunks(st: Any) -> list[ChunkStorageMetadata]:
    """The blocks that this rank holds."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(
            torch.Size(shard.metadata.shard_offsets), torch.Size(shard.metadata.shard_sizes)
        )
        for shard in _written(st)
    ]


def shard_at(st: Any, index: MetadataIndex) -> Tensor:
    """The data of the block at the index' offsets."""
    if index.offset is None:
        why = f"Cannot lookup {index.fqn} since its a ShardedTensor and no offset was provided"
        raise BadShards(why=why, hint="Name the offsets of a shard of this rank.")
    for shard in _written(st):
        if tuple(shard.metadata.shard_offsets) == tuple(index.offset):
            return shard.tensor
    why = f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}'"
    raise BadShards(why=why, hint="Plan and load with the same tensor.")


def _written(st: Any) -> list[Shard]:
    """The shards with elements: an empty one may have the offsets of another, and holds nothing.
    Of a tensor without any, those that begin inside it: the last of many chunks may not."""
    size = st._metadata.size
    if size.numel() == 0:
        return [
            shard
            for shard in st._local_shards
            if all(at <= n for at, n in zip(shard.metadata.shard_offsets, size, strict=True))
        ]
    return [shard for shard in st._local_shards if shard.tensor.numel()]
