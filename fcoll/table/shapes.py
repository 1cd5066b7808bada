"""The sizes of a result, from checked arguments, which may be symbolic."""

from __future__ import annotations

from torch import Tensor

from fcoll.groups import group_rank
from fcoll.table.row import Shape, Sizes


def same(input: Tensor, *_: object) -> Shape:
    return list(input.shape)


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
