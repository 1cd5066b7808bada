"""Elementwise ops on stacks: one call for all ranks, aligned so that broadcasting is the ranks'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# A kernel's vector loop takes 32 floats (AVX-512) at a time, and the rest one by one.
_LANES = 64
_GRAIN = 32768  # elements that torch gives to one thread at least


class NotStackable(Exception):
    """This call must go rank by rank."""


def aligned(stack: Tensor, dims: int) -> Tensor:
    """[W, *shape] with the shape padded in front to ``dims`` dims, so that the ranks line up."""
    missing = dims - (stack.dim() - 1)
    if missing == 0:
        return stack
    return stack.reshape(stack.shape[0], *(1,) * missing, *stack.shape[1:])


def check_promotion(stacks: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """A rank's 0-dim tensor does not raise the result's dtype; with the ranks as a dim it would."""
    if any(s.dim() == 1 for s in stacks):
        tensors = (*stacks, *others)
        if any(t.dtype != tensors[0].dtype for t in tensors):
            raise NotStackable


def same_place(numel: int) -> bool:
    """Does every thread that takes a part of ``numel`` elements end on a full vector?"""
    threads = min(torch.get_num_threads(), -(-numel // _GRAIN)) or 1
    return numel % _LANES == 0 and -(-numel // threads) % _LANES == 0


def padded_width(n: int, ranks: int) -> int:
    """The least width of rows for n elements so that no element falls into a scalar tail."""
    unit = _LANES
    for _ in range(8):
        width = -(-n // unit) * unit
        if same_place(width * ranks):
            return width
        unit += _LANES
    raise NotStackable


def padded(
    call: Callable[..., Any], operands: list[Tensor], shape: Sequence[int]
) -> tuple[Tensor, ...]:
    """An inexact elementwise op on copies with padded rows: ranks with equal values get equal bits.

    ``call`` takes the operands. Returns the results, each [W, *shape] on padded memory.
    """
    ranks, n = operands[0].shape[0], 1
    for size in shape:
        n *= size
    width = padded_width(n, ranks)
    wide = []
    for x in operands:
        buffer = x.new_ones((ranks, width))
        buffer[:, :n].view(ranks, *shape).copy_(x)
        wide.append(buffer)
    results = call(*wide)
    many = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(r[:, :n].unflatten(1, shape) if shape else r[:, 0] for r in many)
