"""New sharded tensors of old ones: what an op made of the local shards, and the metadata of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fcoll.sharded import _torch
from fcoll.sharded._torch import (
    ChunkShardingSpec,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
)
from fcoll.sharded.layout import anchor_of, like
from fcoll.sharded.specs import inferred_spec


def probe_of(st: Any) -> Tensor:
    """A block of the tensor without elements, on its autograd graph.

    An op is run on it as on the shards: what comes out has the dtype of the result, tells whether
    it requires a gradient, and is its anchor; also on a rank that holds no shard.
    """
    anchor = anchor_of(st)
    flat = like(st) if anchor is None else anchor
    return flat.reshape(0, *st._metadata.size[1:])


def result_of(
    st: Any,
    tensors: Sequence[Tensor],
    probe: Tensor,
    layout: Sequence[ShardMetadata] | None = None,
    size: Sequence[int] | None = None,
    pin_memory: bool = False,
) -> Any:
    """A sharded tensor of what an op made of st's local shards, in their order, and of its probe.

    ``layout`` and ``size`` are st's if not given; the layout is in the order of st's metadata.
    """
    old = st._metadata
    shards = list(layout or old.shards_metadata)
    whole = old.size if size is None else torch.Size(size)
    properties = replace(
        old.tensor_properties,
        dtype=probe.dtype,
        requires_grad=probe.requires_grad,
        pin_memory=pin_memory,
    )
    places = [old.shards_metadata.index(shard.metadata) for shard in st._local_shards]
    local = [
        Shard(tensor.contiguous(), shards[place])
        for tensor, place in zip(tensors, places, strict=True)
    ]
    spec = st._sharding_spec if layout is None else inferred_spec(shards, whole)
    anchor = probe.reshape(-1)[:0] if probe.requires_grad else None
    metadata = ShardedTensorMetadata(shards, whole, properties)
    agreed = st._agreed and layout is None
    return st._with(local, spec=spec, metadata=metadata, anchor=anchor, agreed=agreed)


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


def cut_dims(st: Any) -> set[int]:
    """The dims along which no shard need reach from end to end."""
    spec, size = st._sharding_spec, st._metadata.size
    if isinstance(spec, ChunkShardingSpec):
        return {int(spec.dim) % len(size)}
    shards = [s.shard_sizes for s in st._metadata.shards_metadata if all(s.shard_sizes)]
    return {d for d in range(len(size)) if any(sizes[d] != size[d] for sizes in shards)}
