"""Functions along a dim that each rank holds from end to end, and dims in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fcoll.sharded._torch import ShardMetadata
from fcoll.sharded.dispatch import built_in, name_of, unsupported
from fcoll.sharded.errors import CutDim, DimOutOfRange
from fcoll.sharded.results import cut_dims, probe_of, result_of


def dim_of(st: Any, dim: int) -> int:
    """A dim counted from the front."""
    n = len(st._metadata.size)
    if not -n <= dim < n:
        raise DimOutOfRange(low=-n, high=n - 1, dim=dim)
    return dim % n


def check_whole(func: Callable, st: Any, *dims: int) -> None:
    """Raise unless each shard reaches from end to end along these dims."""
    cut = cut_dims(st)
    for dim in dims:
        if dim in cut:
            size = tuple(st._metadata.size)
            free = [d for d in range(len(size)) if d not in dims]
            raise CutDim(
                func=name_of(func), dim=dim, size=size, cut=sorted(cut), other=(free or [0])[0]
            )


def _along(func: Callable, default: int | None = None) -> None:
    """A rule for a function that goes along its ``dim`` and keeps the size."""

    @built_in(func)
    def rule(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
        st, *rest = args
        dim = kwargs.get("dim", rest[0] if rest and default is None else default)
        if not isinstance(dim, int) or kwargs.get("out") is not None:
            raise unsupported(func, args, kwargs)
        check_whole(func, st, dim_of(st, dim))
        parts = [func(shard.tensor, *rest, **kwargs) for shard in st._local_shards]
        return result_of(st, parts, func(probe_of(st), *rest, **kwargs))


for _func in (torch.softmax, Tensor.softmax, F.softmax, F.softmin, torch.cumsum, Tensor.cumsum):
    _along(_func)
for _func in (torch.log_softmax, Tensor.log_softmax, F.log_softmax, torch.cumprod, Tensor.cumprod):
    _along(_func)
_along(F.normalize, default=1)


@built_in(F.layer_norm)
def layer_norm(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st, shape, *rest = args
    n = len(st._metadata.size)
    check_whole(F.layer_norm, st, *range(max(n - len(shape), 0), n))
    parts = [F.layer_norm(shard.tensor, shape, *rest, **kwargs) for shard in st._local_shards]
    return result_of(st, parts, F.layer_norm(probe_of(st), shape, *rest, **kwargs))


@built_in(torch.chunk, Tensor.chunk)
def chunk(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    """Sharded tensors of the parts along a dim that is whole."""
    st, chunks, dim = _three(args, kwargs, "chunks")
    size = st._metadata.size[dim_of(st, dim)]
    return _split(torch.chunk, st, dim, [len(part) for part in torch.empty(size).chunk(chunks)])


@built_in(torch.split, Tensor.split)
def split(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st, sizes, dim = _three(args, kwargs, "split_size_or_sections", "split_size")
    size = st._metadata.size[dim_of(st, dim)]
    return _split(torch.split, st, dim, [len(part) for part in torch.empty(size).split(sizes)])


def _three(args: tuple, kwargs: dict[str, Any], *names: str) -> tuple[Any, Any, int]:
    """The tensor, how it is cut, and the dim."""
    st, *rest = args
    how = next((kwargs[name] for name in names if name in kwargs), None)
    given = [*rest, *([] if how is None else [how])]
    return st, given[0], kwargs.get("dim", given[1] if len(given) > 1 else 0)


def _split(func: Callable, st: Any, dim: int, sizes: Sequence[int]) -> tuple[Any, ...]:
    dim = dim_of(st, dim)
    check_whole(func, st, dim)
    made, start = [], 0
    for size in sizes:
        layout = [_narrow(shard, dim, size) for shard in st._metadata.shards_metadata]
        parts = [
            shard.tensor.narrow(dim, start, size)
            if shard.tensor.numel()
            else shard.tensor.reshape(_narrow(shard.metadata, dim, size).shard_sizes)
            for shard in st._local_shards
        ]
        whole = [size if d == dim else n for d, n in enumerate(st._metadata.size)]
        made.append(result_of(st, parts, probe_of(st).clone(), layout, whole))
        start += size
    return tuple(made)


def _narrow(shard: ShardMetadata, dim: int, size: int) -> ShardMetadata:
    """A shard's metadata in a part of the tensor; one without elements stays so."""
    sizes = list(shard.shard_sizes)
    empty = not all(sizes)
    sizes[dim] = size
    return replace(shard, shard_sizes=[0] * len(sizes) if empty and all(sizes) else sizes)


def permuted(st: Any, order: Sequence[int]) -> Any:
    """The tensor with its dims in this order; each shard stays on its rank."""
    dims = [dim_of(st, d) for d in order]

    def reorder(shard: ShardMetadata) -> ShardMetadata:
        return replace(
            shard,
            shard_offsets=[shard.shard_offsets[d] for d in dims],
            shard_sizes=[shard.shard_sizes[d] for d in dims],
        )

    return result_of(
        st,
        [shard.tensor.permute(dims) for shard in st._local_shards],
        probe_of(st).permute(dims).reshape(-1),
        [reorder(shard) for shard in st._metadata.shards_metadata],
        [st._metadata.size[d] for d in dims],
    )


@built_in(torch.transpose, Tensor.transpose)
def transpose(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st, *rest = args
    one, other = (
        dim_of(st, d) for d in (*rest, *(kwargs.get(k) for k in ("dim0", "dim1") if k in kwargs))
    )
    order = list(range(len(st._metadata.size)))
    order[one], order[other] = other, one
    return permuted(st, order)


@built_in(torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__)
def t(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    if len(args[0]._metadata.size) != 2:
        raise unsupported(Tensor.t, args, kwargs)
    return permuted(args[0], (1, 0))


@built_in(torch.permute, Tensor.permute)
def permute(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st, *dims = args
    given = kwargs.get("dims") or dims
    return permuted(st, given[0] if isinstance(given[0], (list, tuple)) else given)
