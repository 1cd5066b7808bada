"""The sizes of a result, from checked arguments, which may be symbolic."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fcoll.groups import group_rank
from fcoll.table.row import Shape, Sizes


def same(input: Tensor, *_: object) -> Shape:
    return list(input.shape)


def same_each(inputs: Sequence[Tensor], *_: object) -> list[Shape]:
    return [list(x.shape) for x in inputs]


def nothing(*_: object) -> Shape:
    return [0]


def gathered(input: Tensor, group_size: int, dim: int = 0, sizes: Sizes = None) -> Shape:
    """The ranks' parts along dim; a 0-dim tensor gets a dim."""
    shape = list(input.shape) or [1]
    shape[dim] = shape[dim] * group_size if sizes is None else sum(sizes)
    return shape


def scattered(
    input: Tensor, group_size: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> Shape:
    """This rank's part along dim."""
    shape = list(input.shape)
    shape[dim] = shape[dim] // group_size if sizes is None else sizes[group_rank(group_name)]
    return shape


def gathered_each(inputs: Sequence[Tensor], group_size: int, dims: Sizes = None) -> list[Shape]:
    return [gathered(x, group_size, d) for x, d in with_dims(inputs, dims)]


def scattered_each(
    inputs: Sequence[Tensor], group_size: int, group_name: str, dims: Sizes = None
) -> list[Shape]:
    return [scattered(x, group_size, group_name, d) for x, d in with_dims(inputs, dims)]


def with_dims(inputs: Sequence[Tensor], dims: Sizes) -> list[tuple[Tensor, int]]:
    """The tensors of a list, each with its dim: the first, if none are given."""
    return list(zip(inputs, dims if dims is not None else [0] * len(inputs), strict=True))
