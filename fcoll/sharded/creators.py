"""Sharded tensors of values that need no data: each rank fills its own shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from fcoll.groups import GroupLike
from fcoll.sharded import _torch
from fcoll.sharded._torch import (
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
)
from fcoll.sharded.tensor import ShardedTensor
from fcoll.sharded.validate import flat_size


class Options(TypedDict, total=False):
    """What creators take as torch's do: ``dtype`` (the default one), ``layout``, ``requires_grad``,
    ``pin_memory``, ``memory_format``, and the group whose ranks hold the shards (all ranks).
    ``init_rrefs``: keep ``remote_shards()`` at hand."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: GroupLike
    init_rrefs: bool


@_torch.uncompiled
def empty(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor with no values yet. Sizes are of the whole, as in torch.empty."""
    return ShardedTensor(sharding_spec, *size, **options)


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """``torch.zeros(*size)``, sharded.

    >>> st = fcoll.sharded.zeros(fcoll.sharded.chunk(0, n), n, 3)
    >>> torch.equal(st.all_gather(), torch.zeros(n, 3))
    True
    """
    return _filled(sharding_spec, size, options, lambda x: x.zero_())


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """``torch.ones(*size)``, sharded."""
    return _filled(sharding_spec, size, options, lambda x: x.fill_(1))


def full(
    sharding_spec: ShardingSpec, size: Sequence[int], fill_value: Any, **options: Unpack[Options]
) -> ShardedTensor:
    """``torch.full(size, fill_value)``, sharded; its dtype is the value's if none is given.

    >>> fcoll.sharded.full(fcoll.sharded.chunk(0, n), (n, 2), 7).dtype
    torch.int64
    """
    if options.get("dtype") is None:
        options["dtype"] = torch.full((), fill_value).dtype
    return _filled(sharding_spec, (tuple(size),), options, lambda x: x.fill_(fill_value))


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Uniform numbers from [0, 1); each rank draws those of its shards, by torch's generator."""
    return _filled(sharding_spec, size, options, lambda x: x.uniform_(0, 1))


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Normal numbers, drawn as in ``rand``."""
    return _filled(sharding_spec, size, options, lambda x: x.normal_(0, 1))


def arange(
    sharding_spec: ShardingSpec,
    *size: Any,
    start: float = 0,
    step: float = 1,
    **options: Unpack[Options],
) -> ShardedTensor:
    """``start + step * i`` for the i-th element, row by row: ``torch.arange(numel).view(size)``.

    >>> st = fcoll.sharded.arange(fcoll.sharded.chunk(1, n), 2, n)
    >>> torch.equal(st.all_gather(), torch.arange(2 * n).view(2, n))
    True
    """

    def value(*indices: Tensor) -> Tensor:
        position = torch.zeros((), dtype=torch.int64)
        for index, length in zip(indices, flat_size(size), strict=True):
            position = position.to(index.device) * length + index
        return position * step + start

    return from_function(sharding_spec, size, value, **options)


@_torch.uncompiled
def from_function(
    sharding_spec: ShardingSpec,
    size: Any,
    value: Callable[..., Tensor],
    **options: Unpack[Options],
) -> ShardedTensor:
    """A tensor whose values are a function of their indices, whatever the layout.

    ``value`` gets an index tensor for each dim, shaped to broadcast, and returns the values.

    >>> spec = fcoll.sharded.chunk(0, n)
    >>> st = fcoll.sharded.from_function(spec, (n, 3), lambda i, j: 10 * i + j)
    >>> st.local_tensor().tolist() == [[10 * rank, 10 * rank + 1, 10 * rank + 2]]
    True
    """
    whole = flat_size(size if isinstance(size, tuple) else (size,))
    if options.get("dtype") is None:  # also on ranks that hold no shard
        options["dtype"] = value(*_indices([0] * len(whole), [0] * len(whole), "cpu")).dtype
    made = empty(sharding_spec, whole, **options)
    with torch.no_grad():
        for shard in made.local_shards():
            place, tensor = shard.metadata, shard.tensor
            tensor.copy_(value(*_indices(place.shard_offsets, place.shard_sizes, tensor.device)))
    return made


def _indices(offsets: Sequence[int], sizes: Sequence[int], device: Any) -> list[Tensor]:
    """The indices along each dim, of which all together broadcast to the block."""
    found = []
    for d, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        shape = [1] * len(sizes)
        shape[d] = size
        found.append(torch.arange(offset, offset + size, device=device).view(shape))
    return found


@_torch.uncompiled
def _filled(
    spec: ShardingSpec, size: Any, options: Options, fill: Callable[[Tensor], Tensor]
) -> ShardedTensor:
    made = empty(spec, *size, **options)
    with torch.no_grad():
        for shard in made.local_shards():
            fill(shard.tensor)
    return made


@_torch.uncompiled
def init_from_local_shards(
    local_shards: Sequence[Shard],
    *global_size: Any,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
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
    return ShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )


@_torch.uncompiled
def init_from_local_shards_and_global_metadata(
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """The same where every rank knows the metadata of all: nothing is sent, each rank checks its
    own shards, and that all together cover the tensor once."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards, sharded_tensor_metadata, process_group, init_rrefs, sharding_spec
    )


@_torch.uncompiled
def from_local_tensor(
    local_tensor: Tensor,
    sharding_spec: ShardingSpec,
    *global_size: Any,
    process_group: GroupLike = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """The same where the spec says which part of the whole this rank's tensor is.

    >>> x = torch.full((2, 3), float(rank))
    >>> st = fcoll.sharded.from_local_tensor(x, fcoll.sharded.chunk(0, n), 2 * n, 3)
    >>> st.local_tensor() is x
    True
    """
    return ShardedTensor._init_from_local_tensor(
        local_tensor,
        sharding_spec,
        *global_size,
        process_group=process_group,
        init_rrefs=init_rrefs,
    )
