"""Functions along a dim that each rank holds from end to end, and dims in another order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fcoll.sharded.ops.rules import name_of, rule, rule_of_each
from fcoll.sharded.shards import check_whole, dim_of, on_each_shard, probe_of, result_of
from fcoll.sharded.transfer_plan import Box


def _along(
    func: Callable, input: Any, dim: Any = None, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """A function that goes along its ``dim`` and keeps the size."""
    if not isinstance(dim, int) or options.pop("out", None) is not None:
        return NotImplemented
    check_whole(name_of(func), input, dim_of(input, dim))
    options |= {} if dtype is None else {"dtype": dtype}
    return on_each_shard(input, lambda x: func(x, dim=dim, **options))


rule_of_each([torch.softmax, Tensor.softmax, F.softmax, F.softmin, F.normalize], _along)
rule_of_each([torch.log_softmax, Tensor.log_softmax, F.log_softmax], _along)
rule_of_each([torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod], _along)


@rule(F.layer_norm)
def layer_norm(input: Any, normalized_shape: Sequence[int], **options: Any) -> Any:
    n = len(input._metadata.size)
    check_whole("layer_norm", input, *range(max(n - len(normalized_shape), 0), n))
    return on_each_shard(input, lambda x: F.layer_norm(x, normalized_shape, **options))


@rule(torch.chunk, Tensor.chunk)
def chunk(input: Any, chunks: int, dim: int = 0) -> Any:
    """Sharded tensors of the parts along a dim that is whole."""
    size = input._metadata.size[dim_of(input, dim)]
    return _split("chunk", input, dim, [len(part) for part in torch.empty(size).chunk(chunks)])


@rule(torch.split, Tensor.split)
def split(input: Any, split_size: Any, dim: int = 0) -> Any:
    size = input._metadata.size[dim_of(input, dim)]
    return _split("split", input, dim, [len(part) for part in torch.empty(size).split(split_size)])


def _split(func: str, st: Any, dim: int, sizes: Sequence[int]) -> tuple[Any, ...]:
    dim = dim_of(st, dim)
    check_whole(func, st, dim)
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(_narrow(st, dim, a, n) for a, n in zip(starts, sizes, strict=False))


def _narrow(st: Any, dim: int, start: int, size: int) -> Any:
    """A part of the tensor along a dim that each shard holds from end to end."""

    def place(box: Box) -> Box:
        return Box(box.offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))

    return result_of(st, lambda s: s.tensor.narrow(dim, start, size), probe_of(st).clone(), place)


def permuted(st: Any, order: Sequence[int]) -> Any:
    """The tensor with its dims in this order; each shard stays on its rank."""
    dims = [dim_of(st, d) for d in order]

    def place(box: Box) -> Box:
        return Box(tuple(box.offsets[d] for d in dims), tuple(box.sizes[d] for d in dims))

    return result_of(st, lambda s: s.tensor.permute(dims), probe_of(st).permute(dims), place)


@rule(torch.transpose, Tensor.transpose)
def transpose(input: Any, dim0: int, dim1: int) -> Any:
    one, other = dim_of(input, dim0), dim_of(input, dim1)
    order = list(range(len(input._metadata.size)))
    order[one], order[other] = other, one
    return permuted(input, order)


@rule(torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__)
def t(input: Any) -> Any:
    return permuted(input, (1, 0)) if len(input._metadata.size) == 2 else NotImplemented


@rule(torch.permute, Tensor.permute)
def permute(input: Any, *order: Any, dims: Any = None) -> Any:
    order = dims or order
    return permuted(input, order[0] if isinstance(order[0], (list, tuple)) else order)
