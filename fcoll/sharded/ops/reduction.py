"""sum, mean, max and their like.

Over dims that no spec cuts: each rank reduces its shards, and the result is sharded as before. Over
all dims, or one that is cut: a plain tensor, the same on every rank. Differentiable; as for every
collective of fcoll, the gradient is that of the sum of all ranks' losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fcoll import functions
from fcoll.sharded.layout_agreement import check_agreement
from fcoll.sharded.ops.rules import name_of, rule
from fcoll.sharded.shards import check_whole, cut_dims, dim_of, probe_of, result_of
from fcoll.sharded.specs import box_of
from fcoll.sharded.transfer_plan import Box


@dataclass(frozen=True)
class Combiner:
    """``local(tensor, dims, keepdim)`` of a shard, and of the stacked results of several;
    ``start`` is what changes nothing, for a dtype."""

    local: Callable
    start: Callable[[torch.dtype], Any]


def _product(x: Tensor, dims: Sequence[int], keepdim: bool, **options: Any) -> Tensor:
    for d in sorted(dims, reverse=True):
        x = x.prod(d, keepdim=keepdim, **options)
    return x


def _limits(dtype: torch.dtype) -> tuple[Any, Any]:
    """The lowest and the highest value that there is."""
    if dtype == torch.bool:
        return False, True
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


SUM = Combiner(torch.sum, lambda _: 0)
PROD = Combiner(_product, lambda _: 1)
MAX = Combiner(torch.amax, lambda dtype: _limits(dtype)[0])
MIN = Combiner(torch.amin, lambda dtype: _limits(dtype)[1])
ANY = Combiner(torch.any, lambda _: False)
ALL = Combiner(torch.all, lambda _: True)


def reduced(st: Any, how: Combiner, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """The reduction over a dim, several (a tuple), or all (None)."""
    n = len(st._metadata.size)
    over = range(n) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    dims = sorted({dim_of(st, d) for d in over})
    _refuse_empty(st, how, [] if dim is None else dims)
    if dims and len(dims) < n and not cut_dims(st) & set(dims):
        return _on_each_shard(st, how, dims, keepdim, options)
    return _over_ranks(st, how, dims, keepdim, options)


def _on_each_shard(st: Any, how: Combiner, dims: list[int], keepdim: bool, options: Any) -> Any:
    if len(dims) == len(st._metadata.size) and not keepdim:
        st = _with_elements(st)
    return result_of(
        st,
        lambda s: how.local(s.tensor, dims, keepdim, **options),
        how.local(_wide(probe_of(st), st._metadata.size), dims, keepdim, **options),
        lambda box: _without(box, dims, keepdim),
    )


def _refuse_empty(st: Any, how: Combiner, dims: list[int]) -> None:
    """As torch refuses a maximum of no elements."""
    if st._metadata.size.numel() == 0:
        how.local(torch.empty(st._metadata.size), dims, True)


def _with_elements(st: Any) -> Any:
    """Without the shards that have no elements: of a number there is one shard."""
    layout = [shard for shard in st._metadata.shards_metadata if all(shard.shard_sizes)]
    local = [shard for shard in st._local_shards if shard.tensor.numel()]
    metadata = replace(st._metadata, shards_metadata=layout)
    return st._with(local, metadata=metadata, anchor=st._anchor)


def _wide(probe: Tensor, size: Sequence[int]) -> Tensor:
    """The probe with one element along each dim, so that a maximum over it is defined."""
    return probe.new_zeros([1] * len(size)) + probe.sum().to(probe.dtype)


def _without(box: Box, dims: Sequence[int], keepdim: bool) -> Box:
    """Where a block lies when these dims are reduced.

    >>> _without(Box((0, 8), (4, 5)), [1], False), _without(Box((0, 8), (4, 5)), [1], True)
    (Box(offsets=(0,), sizes=(4,)), Box(offsets=(0, 0), sizes=(4, 1)))
    """
    places = zip(box.offsets, box.sizes, strict=True)
    stay = [(0, 1) if d in dims else p for d, p in enumerate(places) if keepdim or d not in dims]
    return Box(tuple(at for at, _ in stay), tuple(n for _, n in stay))


def _over_ranks(st: Any, how: Combiner, dims: list[int], keepdim: bool, options: Any) -> Tensor:
    whole = Box.whole(st._metadata.size)
    check_agreement("a reduction over ranks", st)
    probe = how.local(_wide(probe_of(st), whole.sizes), dims, True, **options)
    small = _without(whole, dims, True)
    part = probe.new_full(small.sizes, how.start(probe.dtype))
    for shard in st._local_shards:
        if shard.tensor.numel():
            place = _without(box_of(shard.metadata), dims, True).within(small)
            mine = how.local(shard.tensor, dims, True, **options)
            part[place] = how.local(torch.stack([part[place], mine]), [0], False)
    if probe.requires_grad:
        part = part + probe.reshape(-1)[:0].sum()  # ties a rank without shards to the others
    group = st.group.name
    if how is SUM:
        total = functions.wait_tensor(functions.all_reduce(part, "sum", group))
    else:  # gathered, because a gradient goes to one of the ranks only
        parts = functions.wait_tensor(functions.all_gather_into_tensor(part[None], group))
        total = how.local(parts, [0], False)
    return total if keepdim else total.reshape(_without(whole, dims, False).sizes)


def _reduce(
    how: Combiner, input: Any, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    if options.pop("out", None) is not None:
        return NotImplemented
    return reduced(input, how, dim, keepdim, **options)


_BY_NAME = {"sum": SUM, "prod": PROD, "any": ANY, "all": ALL, "amax": MAX, "amin": MIN}
for _name, _how in _BY_NAME.items():
    rule(getattr(torch, _name), getattr(Tensor, _name))(partial(_reduce, _how))


@rule(torch.mean, Tensor.mean)
def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    torch.mean(probe_of(input)[:0], dtype=dtype)  # refuses what has no mean
    options = {} if dtype is None else {"dtype": dtype}
    total = reduced(input, SUM, dim, keepdim, **options)
    return total / (input.numel() / max(total.numel(), 1))


def _extreme(
    func: Callable,
    how: Combiner,
    pairwise: Callable,
    input: Any,
    dim: Any = None,
    keepdim: bool = False,
    *,
    other: Any = None,
) -> Any:
    """max and min: of all, of two tensors, or along a dim with the indices."""
    other = dim if isinstance(dim, Tensor) else other
    if isinstance(other, Tensor):
        return pairwise(input, other)
    if dim is None and not keepdim:
        if input._metadata.size.numel() == 0:
            func(torch.empty(0))  # raises
        return reduced(input, how)
    if not isinstance(dim, int):
        return NotImplemented
    dim = dim_of(input, dim)
    values, indices = (replace(how, local=lambda x, d, k, i=i: func(x, d[0], k)[i]) for i in (0, 1))
    _refuse_empty(input, values, [dim])
    check_whole(name_of(func), input, dim)
    both = [_on_each_shard(input, one, [dim], keepdim, {}) for one in (values, indices)]
    return getattr(torch.return_types, name_of(func))(both)


for _place in (torch, Tensor):
    rule(_place.max)(partial(_extreme, _place.max, MAX, torch.maximum))
    rule(_place.min)(partial(_extreme, _place.min, MIN, torch.minimum))


@rule(torch.norm, Tensor.norm)
def norm(
    input: Any,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """The p-norm of all elements, or along dims."""
    p = 2 if p in ("fro", None) else p
    if not isinstance(p, (int, float)) or p <= 0 or out is not None:
        return NotImplemented
    magnitudes = input.abs() if dtype is None else input.to(dtype).abs()
    if p == math.inf:
        return reduced(magnitudes, MAX, dim, keepdim)
    return reduced(magnitudes**p, SUM, dim, keepdim) ** (1 / p)


@rule(torch.linalg.vector_norm)
def vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    return norm(x, ord, dim, keepdim, dtype=dtype)
