"""Sharded tensors on another device or of another dtype: each rank moves its own shards."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fcoll.groups import GroupLike
from fcoll.sharded._torch import (
    ChunkShardingSpec,
    RemoteDevice,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
)
from fcoll.sharded.errors import BadMove
from fcoll.sharded.placements import process_group as as_process_group
from fcoll.sharded.specs import GridShardingSpec, inferred_spec


@dataclass
class Wanted:
    """What ``to`` was asked for."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    non_blocking: bool = False
    copy: bool = False
    memory_format: torch.memory_format = torch.preserve_format
    group: GroupLike = None

    @classmethod
    def of(cls, args: tuple, kwargs: dict[str, Any]) -> Wanted:
        """As Tensor.to takes it: a dtype, a device, both, or another tensor; then two flags."""
        rest = dict(kwargs)
        flags = []
        for value in args:
            if isinstance(value, Tensor):
                rest |= {"dtype": value.dtype, "device": value.device}
            elif isinstance(value, torch.dtype):
                rest["dtype"] = value
            elif isinstance(value, bool):
                flags.append(value)
            elif isinstance(value, (str, int, torch.device)):
                rest["device"] = value
            elif value is not None:
                why = f"ShardedTensor.to() have wrong arguments: {args}"
                raise BadMove(why=why, hint="Pass a dtype, a device, both, or a tensor.")
        rest |= dict(zip(("non_blocking", "copy"), flags, strict=False))
        if rest.get("device") is not None:
            rest["device"] = torch.device(rest["device"])
        rest["group"] = rest.pop("process_group", None)
        if unknown := set(rest) - set(cls.__dataclass_fields__):
            why = f"ShardedTensor.to() have wrong arguments: {sorted(unknown)}"
            raise BadMove(why=why, hint="It takes those of Tensor.to, and process_group.")
        return cls(**{k: v for k, v in rest.items() if v is not None})


def to(st: Any, wanted: Wanted) -> Any:
    """See ShardedTensor.to."""
    _check_format(wanted.memory_format)
    device, dtype = wanted.device or st.device, wanted.dtype or st.dtype
    if device.type == "cuda":
        device = _current_cuda(device)
    if not wanted.copy and dtype == st.dtype and device == st.device:
        return st
    return _moved(st, replace(wanted, device=device, dtype=dtype))


def cpu(st: Any, memory_format: torch.memory_format, group: GroupLike) -> Any:
    """See ShardedTensor.cpu."""
    _check_format(memory_format)
    if all(s.placement.device().type == "cpu" for s in st._metadata.shards_metadata):
        return st
    cpu = torch.device("cpu")
    return _moved(st, Wanted(cpu, st.dtype, memory_format=memory_format, group=group))


def cuda(st: Any, device: Any, wanted: Wanted) -> Any:
    """See ShardedTensor.cuda."""
    _check_format(wanted.memory_format)
    here = torch.cuda.current_device()
    if device is not None and torch.device(device).index not in (None, here):
        why = (
            'Only device without device id (e.g. "cpu" or "cuda") is expected for ShardedTensor! '
            f"{device} is not this rank's current one, cuda:{here}"
        )
        raise BadMove(why=why, hint="Call torch.cuda.set_device first, or reshard.")
    return _moved(st, replace(wanted, device=torch.device("cuda", here), dtype=st.dtype))


def _current_cuda(device: torch.device) -> torch.device:
    here = torch.cuda.current_device()
    if device.index not in (None, here):
        warnings.warn(
            "ShardedTensor.to only move tensor to its current device. If you want to put to "
            "different device, use `reshard` instead.",
            stacklevel=4,
        )
    return torch.device("cuda", here)


def _check_format(memory_format: torch.memory_format) -> None:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        why = "Only `torch.contiguous_format` or `torch.preserve_format` is supported!"
        raise BadMove(why=f"{why} It was {memory_format}", hint="Leave it out.")


def _moved(st: Any, wanted: Wanted) -> Any:
    """A new tensor of shards that were moved; those that are there already are not copied."""
    old, device = st._metadata, wanted.device
    assert device is not None and wanted.dtype is not None

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(
            device,
            wanted.dtype,
            non_blocking=wanted.non_blocking,
            copy=wanted.copy,
            memory_format=wanted.memory_format,
        )

    layout = [_placed(shard, device) for shard in old.shards_metadata]
    properties = replace(
        old.tensor_properties,
        dtype=wanted.dtype,
        requires_grad=old.tensor_properties.requires_grad and _keeps_gradient(st, wanted),
    )
    shards = [
        Shard(move(shard.tensor), _placed(shard.metadata, device)) for shard in st._local_shards
    ]
    pg = st._process_group if wanted.group is None else as_process_group(wanted.group)
    return type(st)._made(
        _spec_on(st._sharding_spec, layout, old.size, device),
        ShardedTensorMetadata(layout, old.size, properties),
        shards,
        pg,
        init_rrefs=st._init_rrefs,
        anchor=None if st._anchor is None else move(st._anchor),
    )


def _keeps_gradient(st: Any, wanted: Wanted) -> bool:
    """Do the moved shards require a gradient where the old ones did?"""
    assert wanted.dtype is not None
    if not (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
        return False
    moves = wanted.copy or wanted.dtype != st.dtype or wanted.device != st.device
    return torch.is_grad_enabled() or not moves


def _placed(shard: ShardMetadata, device: torch.device) -> ShardMetadata:
    return replace(shard, placement=_on(shard.placement, device))


def _on(placement: Any, device: torch.device) -> Any:
    """The same rank or worker, another device."""
    if placement is None:
        return None
    worker = placement.worker_name()
    return RemoteDevice(f"{worker or f'rank:{placement.rank()}'}/{device}")


def _spec_on(
    spec: ShardingSpec, layout: list[ShardMetadata], size: torch.Size, device: torch.device
) -> ShardingSpec:
    if isinstance(spec, ChunkShardingSpec):
        return ChunkShardingSpec(spec.dim, [_on(p, device) for p in spec.placements])
    if isinstance(spec, GridShardingSpec):
        return GridShardingSpec(spec.grid, [_on(p, device) for p in spec.placements])
    return inferred_spec(layout, size)
