"""How tensors are cut, padded and joined for the wire.

Results are always contiguous. What is filled in at the wait is written through ``.data``: a result
that autograd has saved must not look modified since.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fcoll.table.row import Sizes


def flat(x: Tensor) -> Tensor:
    return x.contiguous().view(-1)  # reshape would keep the strides of an expanded tensor


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    out = x.new_zeros(resized(x.shape, dim, size))  # not pad: it has no float8_e8m0fnu
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def contiguous_parts(shape: Sequence[int], dim: int) -> bool:
    """Are parts along dim laid out one after the other in a tensor of this shape?"""
    return math.prod(shape[:dim]) == 1


def chunks(x: Tensor, dim: int, n: int, sizes: Sizes) -> Tensor:
    """x cut along dim for n ranks, as one contiguous tensor [n, ...]; uneven parts padded."""
    if sizes is not None:
        size = max(sizes)
        return torch.stack([padded(part, dim, size) for part in x.split(list(sizes), dim)])
    if contiguous_parts(x.shape, dim):
        shape = list(x.shape)
        shape[dim] //= n
        return x.contiguous().view(n, *shape)
    return torch.stack(x.chunk(n, dim))


def concat(out: Tensor, parts: Sequence[Tensor] | Tensor, dim: int, sizes: Sequence[int]) -> None:
    """Fill out with the parts along dim; what they are padded with is left out."""
    for section, part in zip(out.data.split(list(sizes), dim), parts, strict=True):
        section.copy_(part.narrow(dim, 0, section.shape[dim]))
