"""Sharded tensors are created: from values that need no data, ranks' shards, one rank's tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from fcoll.eager.small_messages import gather_objects
from fcoll.groups import GroupLike, resolve
from fcoll.sharded import _torch
from fcoll.sharded._torch import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
)
from fcoll.sharded.block_exchange import exchange
from fcoll.sharded.errors import BadLayout, BadShards, CannotReshard, ShardsDiffer
from fcoll.sharded.local_shards import flat_size, properties_of
from fcoll.sharded.ops.rules import name_of, rule_of_each
from fcoll.sharded.sharded_tensor import ShardedTensor
from fcoll.sharded.specs import (
    GridShardingSpec,
    as_process_group,
    blocks_on,
    layout_of,
    shards_here,
)
from fcoll.sharded.transfer_plan import Box, HeldBlock, TransferPlan
from fcoll.transport.handshake import first_difference


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
    sharding_spec: ShardingSpec, size: Any, value: Callable[..., Tensor], **options: Unpack[Options]
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
    st = empty(sharding_spec, whole, **options)
    with torch.no_grad():
        for shard in st.local_shards():
            place, tensor = shard.metadata, shard.tensor
            tensor.copy_(value(*_indices(place.shard_offsets, place.shard_sizes, tensor.device)))
    return st


def _indices(offsets: Sequence[int], sizes: Sequence[int], device: Any) -> list[Tensor]:
    """The indices along each dim, of which all together broadcast to the block."""
    dims = range(len(sizes))
    return [
        torch.arange(a, a + n, device=device).view([n if d == dim else 1 for d in dims])
        for dim, (a, n) in enumerate(zip(offsets, sizes, strict=True))
    ]


@_torch.uncompiled
def _filled(
    spec: ShardingSpec, size: Any, options: Options, fill: Callable[[Tensor], Tensor]
) -> ShardedTensor:
    st = empty(spec, *size, **options)
    with torch.no_grad():
        for shard in st.local_shards():
            fill(shard.tensor)
    return st


def _like(func: Callable, input: Any, *args: Any, **options: Any) -> ShardedTensor:
    """torch.zeros_like and its like."""
    make = globals()[name_of(func).removesuffix("_like")]
    options = {"dtype": input.dtype, "process_group": input._process_group} | options
    return make(input.sharding_spec(), input.size(), *args, **options)  # type: ignore[no-any-return]


rule_of_each([torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like], _like)
rule_of_each([torch.rand_like, torch.randn_like], _like)

# -- of what each rank has: see local_shards.py ---

init_from_local_shards = ShardedTensor._init_from_local_shards
init_from_local_shards_and_global_metadata = (
    ShardedTensor._init_from_local_shards_and_global_metadata
)
from_local_tensor = ShardedTensor._init_from_local_tensor

# -- of one rank's tensor ---


def shard_tensor(
    tensor: Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: GroupLike = None
) -> ShardedTensor:
    """Cut the tensor of rank ``src_rank`` of the group; the others' gives size and dtype.

    The ranks first compare spec and source. Shards are leaves that require a gradient if the
    tensor does.

    >>> x = torch.arange(2.0 * n) + 100 * rank
    >>> st = fcoll.sharded.shard_tensor(x, fcoll.sharded.chunk(0, n))
    >>> torch.equal(st.local_tensor(), torch.arange(2.0) + 2 * rank)
    True
    """
    g = resolve(process_group)
    view = {
        "src_rank": src_rank,
        "sharding_spec": sharding_spec,
        "size": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "contiguous": tensor.is_contiguous(),
    }
    views = gather_objects(view, g)
    if not tensor.is_contiguous():
        raise BadShards(why="input tensor is not a contiguous Tensor", hint="Use x.contiguous().")
    if difference := first_difference(views):
        name, values = difference
        other = difference.other_than(g.rank)
        why = (
            f"{name}={values[g.rank]} on rank: {g.ranks[g.rank]} does not match with "
            f"{name}={values[other]} on rank: {g.ranks[other]}"
        )
        raise ShardsDiffer(why=why, hint="Pass the same on all ranks.")
    if type(sharding_spec).shard not in _KNOWN:  # a spec of the user's has a way of its own
        return sharding_spec.shard(tensor, src_rank, process_group)  # type: ignore[return-value]
    return scatter(tensor, sharding_spec, src_rank, process_group)


_KNOWN = (ChunkShardingSpec.shard, EnumerableShardingSpec.shard, GridShardingSpec.shard)


def scatter(tensor: Tensor, spec: ShardingSpec, src_rank: int, group: GroupLike) -> ShardedTensor:
    """``shard_tensor`` of ranks that agree."""
    pg = as_process_group(group)
    g, properties, size = resolve(pg), properties_of(tensor), tensor.size()
    try:
        layout = layout_of(spec, size, properties)
    except BadLayout as wrong:
        hint = "A spec that leaves a part of the tensor out is not implemented yet!"
        raise CannotReshard(why=f"shard_tensor: {wrong}", hint=hint) from wrong
    whole, source = tensor.detach(), HeldBlock(g.ranks[src_rank], Box.whole(size))
    plan = TransferPlan((source,), blocks_on(pg, layout))
    tensors, _ = exchange(plan, g, [whole] if g.rank == src_rank else [], whole)
    shards = [
        Shard(x.requires_grad_(tensor.requires_grad), shard)
        for x, (shard, _) in zip(tensors, shards_here(pg, layout), strict=True)
    ]
    metadata = ShardedTensorMetadata(layout, size, properties)
    return ShardedTensor._assemble(spec, metadata, shards, pg)  # type: ignore[no-any-return]
