"""Lists of tensors, as optimizers have them: one rule on all elements instead of one a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ELEMENTWISE = frozenset(
    ("add", "sub", "mul", "div", "neg", "sqrt", "reciprocal", "lerp", "addcmul", "addcdiv")
)


def joined(args: Sequence[Any], kwargs: Any) -> list[Any] | None:
    """Lists of floats as one flat tensor each, and numbers; None if there is anything else."""
    shapes = [x.shape for x in args[0]]
    flat: list[Any] = []
    for arg in args:
        if isinstance(arg, (list, tuple)) and all(map(_is_wide, arg)):
            if [x.shape for x in arg] != shapes:
                return None
            flat.append(torch.cat([x.reshape(-1) for x in arg]))
        elif isinstance(arg, (int, float)):
            flat.append(arg)
        else:
            return None
    return None if kwargs else flat


def parted(x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The flat tensor in parts of these shapes, each with elements of its own."""
    parts = x.split([y.numel() for y in like])
    return [part.clone().view(y.shape) for part, y in zip(parts, like, strict=True)]


def at_once(change: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """An elementwise change of each, made of all elements together."""
    if not tensors:
        return []
    return parted(change(torch.cat([x.reshape(-1) for x in tensors])), tensors)


def _is_wide(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64
