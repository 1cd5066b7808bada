"""Results of ops on fake tensors, kept by what goes in.

torch has such a cache too, but to ask it takes as long as all else in a trace: of a Llama with 32
layers, 3.3 of 6.1 s. Only what is surely the same each time is kept: an op that writes nothing, of
fake tensors with plain sizes and of plain numbers, which gives new tensors, one view or what it was
given, as a wait does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fcoll.table.collectives import row_of
from fcoll.tracing import _torch

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_PLAIN_TYPES = {*_PLAIN, torch.memory_format}


@dataclass(frozen=True)
class _Like:
    """A result to be made: sizes, strides, dtype, device; of a view, where it is."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    view_of: int | None  # the position among the tensors that go in


@dataclass(frozen=True)
class _Kept:
    likes: tuple[_Like, ...]
    is_tuple: bool = False
    same_as: int | None = None  # the tensor that comes out as it went in


class Results:
    """``call(func, args, kwargs)`` is func(*args, **kwargs) on fake tensors of a mode."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self._kept: dict[Any, _Kept | None] = {}

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        key: list[Any] = [func, torch.get_default_dtype()]
        tensors: list[Tensor] = []
        if not (self._add(key, tensors, args) and self._add(key, tensors, kwargs)):
            return func(*args, **kwargs)
        frozen = tuple(key)
        try:
            kept = self._kept[frozen]
        except KeyError:
            out = func(*args, **kwargs)
            self._kept[frozen] = self._entry(func, tensors, out)
            return out
        if kept is None:
            return func(*args, **kwargs)
        if kept.same_as is not None:
            return tensors[kept.same_as]
        made = [self._made(like, tensors) for like in kept.likes]
        return tuple(made) if kept.is_tuple else made[0]

    def _add(self, key: list[Any], tensors: list[Tensor], x: Any) -> bool:
        """Add what x is to the key; is it known well enough?"""
        kind = type(x)
        if kind is _torch.FakeTensor:
            if x.constant is not None or x.fake_mode is not self.mode or not _is_plain(x):
                return False
            key.append(x.fake_device)
            key += (x.shape, x.stride(), x.storage_offset(), x.dtype)
            tensors.append(x)
            return True
        if kind in _PLAIN_TYPES:
            key.append(kind)  # 1, 1.0 and True are equal
            key.append(x)
            return True
        if kind is tuple or kind is list or kind is torch.Size:
            key.append(len(x))
            return all(self._add(key, tensors, y) for y in x)
        if kind is dict:
            key.append(len(x))
            return all(self._add(key, tensors, y) for item in x.items() for y in item)
        return False

    def _entry(self, func: Any, tensors: list[Tensor], out: Any) -> _Kept | None:
        if not _is_pure(func) or torch.is_inference_mode_enabled():
            return None
        is_tuple = type(out) is tuple
        outs = list(out) if is_tuple else [out]
        if not all(type(y) is _torch.FakeTensor and _is_plain(y) for y in outs):
            return None
        if any(y.constant is not None for y in outs):
            return None
        same = [i for i, x in enumerate(tensors) if any(y is x for y in outs)]
        if same:
            return None if is_tuple else _Kept((), same_as=same[0])
        given = [_torch.storage_id(x) for x in tensors]
        made = [_torch.storage_id(y) for y in outs]
        shared = [given.index(s) if s in given else None for s in made]
        if len({*made}) < len(made) or (is_tuple and any(s is not None for s in shared)):
            return None
        return _Kept(tuple(map(_like, outs, shared)), is_tuple)

    def _made(self, like: _Like, tensors: list[Tensor]) -> Tensor:
        storage = None if like.view_of is None else tensors[like.view_of].untyped_storage()
        return _torch.new_fake(self.mode, like, storage)


@functools.cache
def _is_pure(func: Any) -> bool:
    """Is its result, but for values, the same for the same arguments, and nothing else done?"""
    row = row_of(func)
    return _torch.is_pure(func) and (func.namespace == "aten" or row is not None)


def _is_plain(x: Any) -> bool:
    return (
        x.layout is torch.strided
        and not x.dtype.is_complex
        and not x.is_neg()
        and all(type(n) is int for n in x.shape)
    )


def _like(x: Any, view_of: int | None) -> _Like:
    size, stride = tuple(x.shape), tuple(x.stride())
    return _Like(size, stride, x.dtype, x.fake_device, x.storage_offset(), view_of)
