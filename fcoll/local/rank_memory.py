"""Ops on the memory of ranks: views, resize_, set_."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch, rows
from fcoll.local.elementwise import NotStackable
from fcoll.local.scan import mapped

aten = torch.ops.aten


def view(call: Callable[[Tensor], Any], stack: Tensor) -> Any:
    """A view op on the stack: ``call`` is it on the first rank's row, and all others lie alike."""
    inside, bits = rows.width(stack), (stack.dtype, stack.is_conj(), stack.is_neg())

    def of_all(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        offset, shape, strides = t.storage_offset(), t.shape, t.stride()
        if bits != (t.dtype, t.is_conj(), t.is_neg()) or not _torch.same_storage(t, stack):
            raise NotStackable
        if offset + rows.extent(shape, strides) > inside:  # in the next rank's memory
            raise NotStackable
        return stack.as_strided((stack.shape[0], *shape), (stack.stride(0), *strides), offset)

    return mapped(of_all, call(stack[0]))


def check_storage(args: Any, kwargs: dict[str, Any], order: tuple[int, ...]) -> None:
    """set_ to a storage: one of memory is the same for all ranks, a LocalTensor's is of none."""
    if not _torch.has_memory(args[1]):
        raise NotImplementedError(
            "set_: the storage of a LocalTensor has no memory. Pass the tensor: x.set_(y), or "
            "x.set_(y.as_strided(size, stride, storage_offset))."
        )


def with_room(func: Any) -> Callable[..., Tensor]:
    """resize_ and resize_as_ of one rank's tensor, which is copied if its memory cannot grow."""

    def resized(t: Tensor, new: Any, **options: Any) -> Tensor:
        memory = t.untyped_storage()
        elements = memory.nbytes() // max(1, t.element_size())
        size = new.shape if isinstance(new, Tensor) else new
        if not memory.resizable() and t.storage_offset() + _torch.numel(size) > elements:
            copy = t.as_strided((elements,), (1,), 0).clone()
            t = copy.as_strided(t.shape, t.stride(), t.storage_offset())
        return func(t, new, **options)

    return resized


RESIZING = (aten.resize_, aten.resize_as_)
