"""Stacks of ranks: memory of shape [W, ...] whose rows are the ranks' tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from fcoll.local import _torch

if TYPE_CHECKING:
    from fcoll.local.local_tensor import LocalTensor

# Above it, one call a rank costs less than the copy into a stack would.
STACK_BYTES = 1 << 16


class Rows(dict[int, Tensor]):
    """Rank -> its tensor, as ``LocalTensor._local_tensors`` hands it out.

    Writing into a tensor writes into the LocalTensor. So does putting another tensor in its place.
    """

    owner: weakref.ref[LocalTensor] | None = None

    def __setitem__(self, rank: int, tensor: Tensor) -> None:
        super().__setitem__(rank, tensor)
        if self.owner is not None and (owner := self.owner()) is not None:
            owner._keep_apart(dict(self))


def unbound(stack: Tensor) -> tuple[Tensor, ...]:
    """The rows as tensors of their own on the same memory."""
    with _torch.below_autograd():
        return stack.unbind(0)


def width(stack: Tensor) -> int:
    """How many elements of the stack's memory are one rank's: row r begins at r times as many."""
    n, step = stack.shape[0], stack.stride(0)
    elements = stack.untyped_storage().nbytes() // stack.element_size()
    return elements if n == 1 else max(0, min(step, elements - (n - 1) * step))


def own_rows(stack: Tensor) -> tuple[Tensor, ...]:
    """The rows as tensors on the same memory, of which each has only its rank's.

    So storage offsets count from the beginning of the rank's memory, and views end with it.
    """
    shape, strides, offset = stack.shape[1:], stack.stride()[1:], stack.storage_offset()
    fake = type(stack) is not Tensor or stack.device.type == "meta"
    if fake or stack.shape[0] == 1 or width(stack) < max(1, offset + extent(shape, strides)):
        return unbound(stack)
    with _torch.below_autograd(), torch.inference_mode(stack.is_inference()):
        memory = _torch.without_lazy_bits(stack)
        memory = memory.as_strided((stack.shape[0], width(stack)), (stack.stride(0), 1), 0)
        alone = (from_dlpack(to_dlpack(row)) for row in memory.unbind(0))
        return tuple(
            _torch.with_lazy_bits(row.as_strided(shape, strides, offset), stack) for row in alone
        )


def is_even(tensors: Sequence[Tensor]) -> bool:
    """Have all the same shape, strides and device, so that they can be rows of one stack?"""
    first = tensors[0]
    shape, strides, device = first.shape, first.stride(), first.device
    return first.layout is torch.strided and all(
        t.shape == shape and t.stride() == strides and t.device == device for t in tensors
    )


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory a tensor of these strides spans."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def is_packed(t: Tensor) -> bool:
    """Is it contiguous, with the strides of a new tensor in dims of size 1 as well?"""
    if not t.is_contiguous() or 1 not in t.shape:
        return t.is_contiguous()
    step, packed = 1, []
    for n in reversed(t.shape):
        packed.append(step)
        step *= max(n, 1)
    return t.stride() == tuple(reversed(packed))


def empty_stack(like: Tensor, n: int) -> Tensor:
    """Memory for n rows with the strides of ``like``; dense in the same order if it has gaps."""
    if is_packed(like):
        return like.new_empty((n, *like.shape))  # of a fake tensor, a fake one
    has_gaps = like.numel() != extent(like.shape, like.stride())
    strides = torch.empty_like(like).stride() if has_gaps else like.stride()
    return like.new_empty_strided((n, *like.shape), (like.numel(), *strides))


def stack_of(tensors: Sequence[Tensor]) -> Tensor:
    """A new stack with copies of the tensors."""
    first = tensors[0]
    if is_packed(first) or first.is_conj() or first.is_neg():
        return torch.stack(list(tensors))
    stack = empty_stack(first, len(tensors))
    for row, tensor in zip(unbound(stack), tensors, strict=True):
        row.copy_(tensor)
    return stack


def replicated(t: Tensor, n: int) -> Tensor:
    """A stack of n copies of one tensor: memory of its own for each rank, so that writes to one
    rank do not show on another."""
    if torch.is_inference_mode_enabled() and not t.is_inference():
        with torch.inference_mode(False):  # not of the place where it is first written to
            return empty_stack(t, n).copy_(t.expand(n, *t.shape))
    return empty_stack(t, n).copy_(t.expand(n, *t.shape))


def expanded(t: Tensor, n: int) -> Tensor:
    """A stack of n times the same tensor, one row in memory if copies of it would be as dense."""
    if t.is_contiguous() or t.numel() == extent(t.shape, t.stride()):
        return t.expand(n, *t.shape)
    return replicated(t, n)


def rows_overlap(stack: Tensor) -> bool:
    """Do rows share memory, as in an expanded stack?"""
    return stack.shape[0] > 1 and stack.numel() > 0 and stack.stride(0) == 0


def reorders(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    """Would ops on a stack, ``step`` between its rows, order dims as ops on one row do not?

    They order dims by strides, and that of a dim of size 1 may be anything.
    """
    beyond = (n == 1 and s > step for n, s in zip(shape, strides, strict=True))
    return step > 0 and 1 in shape and any(beyond)


def all_rows_equal(stack: Tensor) -> bool:
    return stack.shape[0] == 1 or torch.equal(stack[1:], stack[:1].expand_as(stack[1:]))
