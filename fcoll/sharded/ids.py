"""The ids of a lookup: each once, and which of them lie in a block.

In a trace, which has no values, they are taken to be as many as they can be, all different, sorted
and spread evenly over the table: so a trace has sizes. A run of the traced graph checks it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fcoll.sharded import _torch
from fcoll.sharded.asking import traced
from fcoll.sharded.boxes import Box

EVEN = (
    "the graph was traced for ids that are sorted, all different and spread evenly over the table, "
    "and these are not: run the function itself"
)


def distinct(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each id once, sorted, and the place of each of ``ids`` among them; there are ``count`` rows.

    >>> distinct(torch.tensor([[3, 1], [3, 0]]), 4)
    (tensor([0, 1, 3]), tensor([[2, 1],
            [2, 0]]))
    """
    if not traced():
        return torch.unique(ids, return_inverse=True)
    needed = ids.reshape(-1)[: min(ids.numel(), count)].contiguous()
    _torch.check_in_graph((needed[1:] > needed[:-1]).all(), EVEN)
    places = torch.searchsorted(needed, ids.contiguous())
    return needed, places.clamp(max=max(needed.numel() - 1, 0))


def ranges(ids: Tensor, boxes: Sequence[Box], count: int) -> list[tuple[int, int]]:
    """Which of the sorted ids lie in the rows of each block: from where to where."""
    edges = [edge for box in boxes for edge in (box.offsets[0], box.ends[0])]
    found = torch.searchsorted(ids, torch.tensor(edges, device=ids.device, dtype=ids.dtype))
    if traced():
        even = [-(-edge * ids.numel() // count) if count else 0 for edge in edges]
        _torch.check_in_graph((found == torch.tensor(even, device=ids.device)).all(), EVEN)
        return list(zip(even[::2], even[1::2], strict=True))
    places = found.tolist()
    return list(zip(places[::2], places[1::2], strict=True))


def union(asked: Sequence[Tensor], count: int) -> Tensor:
    """The ids that any rank asks for, each once, sorted."""
    needed, _ = distinct(torch.cat(list(asked)), count)
    return needed


def place_of(row: int, needed: Tensor) -> int | None:
    """Where a row is among the ids; None if it was not looked up. In a trace the first."""
    if traced():
        return 0 if needed.numel() else None
    found = (needed == row).nonzero().flatten().tolist()
    return found[0] if found else None


def wrong_id(needed: Tensor, count: int) -> str:
    """What is wrong with the ids, of which none may be outside the table; a trace takes them to be
    right."""
    if needed.is_floating_point() or needed.dtype == torch.bool or needed.is_complex():
        return f"Expected ids to be of an integer dtype, got {needed.dtype}"
    if traced() or needed.numel() == 0:
        return ""
    low, high = needed[0].item(), needed[-1].item()
    if low >= 0 and high < count:
        return ""
    worst = low if low < 0 else high
    return f"Index out of range in Input {worst} {count}: the table has {count} rows"
