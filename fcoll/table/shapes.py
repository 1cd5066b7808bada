"""The sizes of a result, from checked arguments, which may be symbolic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fcoll.groups import group_rank
from fcoll.table.row import Shape, Sizes


def same(input: Tensor, *_: object) -> Shape:
    return list(input.shape)


def same_each(inputs: Sequence[Tensor], *_: object) -> list[Shape]:
    return [list(x.shape) for x in inputs]


def nothing(*_: object) -> Shape:
    return [0]


def gathered(input: Tensor, n: int, dim: int = 0, sizes: Sizes = None) -> Shape:
    """n parts along dim; a 0-dim tensor gets a dim."""
    shape = list(input.shape) or [1]
    shape[dim] = shape[dim] * n if sizes is None else sum(sizes)
    return shape


def scattered(input: Tensor, n: int, group_name: str, dim: int = 0, sizes: Sizes = None) -> Shape:
    """This rank's part along dim."""
    shape = list(input.shape)
    shape[dim] = shape[dim] // n if sizes is None else sizes[group_rank(group_name)]
    return shape


def each(of_one: Callable[..., Shape]) -> Callable[..., list[Shape]]:
    """The shapes of a list's results: of_one(input, *args, dim) for each."""

    def shapes(inputs: Sequence[Tensor], *args: Any, dims: Sizes = None) -> list[Shape]:
        dims = dims if dims is not None else [0] * len(inputs)
        return [of_one(x, *args, dim=d) for x, d in zip(inputs, dims, strict=True)]

    return shapes
