"""torch's ``symm_mem`` ops for mixtures of experts and for tiles, on CPU tensors.

What makes them differ from ``all_to_all_single`` is that the splits are in tensors, and that the
receiver learns its own from the senders. ``input`` and ``out`` are buffers that may be larger than
what is in them, and need not be in symmetric memory here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fcoll.errors import BadSymmetricCall
from fcoll.groups import group_rank, group_size


def all_to_all_vdev(
    input: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor, group_name: str
) -> None:
    """``in_splits[r]`` rows go to rank r. The rows that arrive lie in ``out`` by rank, and their
    splits and offsets are written to the two rows of ``out_splits_offsets``."""
    splits = in_splits.view(-1, 1)
    rows, arrived = _exchanged(input, splits, _starts(splits), group_name)
    _place("all_to_all_vdev", rows, out, _starts(arrived), arrived)
    out_splits_offsets.copy_(torch.stack([arrived.flatten(), _starts(arrived).flatten()]))


def all_to_all_vdev_2d(
    input: Tensor,
    out: Tensor,
    in_splits: Tensor,
    out_splits_offsets: Tensor,
    group_name: str,
    major_align: int | None = None,
) -> None:
    """From rows by rank and expert to rows by expert and rank: ``in_splits`` is for each expert of
    each rank. An expert's rows begin at a multiple of ``major_align``, and none has no rows."""
    splits = in_splits.view(group_size(group_name), -1)
    rows, arrived = _exchanged(input, splits, _starts(splits), group_name)
    by_expert, align = arrived.t().contiguous(), major_align or 1
    each = by_expert.sum(1, keepdim=True)
    room = ((each + align - 1) // align * align).clamp(min=align)
    starts = _starts(room) + by_expert.cumsum(1) - by_expert
    _place("all_to_all_vdev_2d", rows, out, starts.t(), arrived)
    out_splits_offsets.copy_(torch.stack([by_expert.flatten(), starts.flatten()]))


def all_to_all_vdev_2d_offset(
    input: Tensor,
    out: Tensor,
    in_splits_offsets: Tensor,
    out_splits_offsets: Tensor,
    group_name: str,
) -> None:
    """The way back: from rows by expert and rank, at given offsets, to rows by rank and expert."""
    n = group_size(group_name)
    splits, starts = in_splits_offsets.view(2, -1, n).transpose(1, 2)
    rows, arrived = _exchanged(input, splits, starts, group_name)
    _place("all_to_all_vdev_2d_offset", rows, out, _starts(arrived), arrived)
    out_splits_offsets.copy_(torch.stack([arrived.flatten(), _starts(arrived).flatten()]))


def _starts(splits: Tensor) -> Tensor:
    """Where each part begins if they lie one after the other."""
    flat = splits.flatten()
    return (flat.cumsum(0) - flat).view(splits.shape)


def _exchanged(x: Tensor, splits: Tensor, starts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """Send the parts of row r of ``splits`` to rank r: what arrives, and the splits of that."""
    ones = [1] * group_size(group_name)
    if len(splits) != len(ones):
        message = f"there are splits for {len(splits)} ranks in a group of {len(ones)}"
        raise BadSymmetricCall(message=f"all_to_all_vdev: {message}")
    ends = starts + splits
    if int(ends.max()) > len(x):
        message = f"the splits end at row {int(ends.max())} of {len(x)}"
        raise BadSymmetricCall(message=f"all_to_all_vdev: {message}")
    arrived = _all_to_all(splits.contiguous(), ones, ones, group_name)
    parts = zip(starts.flatten().tolist(), ends.flatten().tolist(), strict=True)
    rows = torch.cat([x[start:end] for start, end in parts])
    sizes = arrived.sum(1).tolist(), splits.sum(1).tolist()
    return _all_to_all(rows, *sizes, group_name), arrived


def _all_to_all(x: Tensor, outs: Sequence[int], ins: Sequence[int], group_name: str) -> Tensor:
    out = torch.ops.fcoll.all_to_all_single(x, outs, ins, group_name)
    return torch.ops.fcoll.wait_tensor(out)


def _place(op: str, rows: Tensor, out: Tensor, starts: Tensor, splits: Tensor) -> None:
    """Write the parts that arrived to where they begin in ``out``."""
    end = int((starts + splits).max())
    if end > len(out):
        raise BadSymmetricCall(message=f"{op}: {end} rows do not fit into out of {len(out)}")
    sizes = splits.flatten().tolist()
    places = zip(rows.split(sizes), starts.flatten().tolist(), sizes, strict=True)
    for part, start, size in places:
        out[start : start + size] = part


# -- tiles ---


def tile_reduce(
    in_tile: Tensor, out_tile: Tensor, root: int, group_name: str, reduce_op: str = "sum"
) -> None:
    """The sum of all ranks' tiles, in the root's ``out_tile``; those of others stay as they are."""
    multi_root_tile_reduce([in_tile], out_tile, [root], group_name, reduce_op)


def multi_root_tile_reduce(
    in_tiles: Sequence[Tensor],
    out_tile: Tensor,
    roots: Sequence[int],
    group_name: str,
    reduce_op: str = "sum",
) -> None:
    """``tile_reduce`` of several tiles, each with a root of its own."""
    if len(in_tiles) != len(roots) or len(set(roots)) != len(roots):
        message = f"{len(in_tiles)} tiles need as many different roots, got {list(roots)}"
        raise BadSymmetricCall(message=f"multi_root_tile_reduce: {message}")
    me = group_rank(group_name)
    for tile, root in zip(in_tiles, roots, strict=True):
        total = torch.ops.fcoll.reduce(tile.contiguous(), reduce_op, root, group_name)
        total = torch.ops.fcoll.wait_tensor(total)
        if root == me:
            out_tile.copy_(total)


KERNELS = (
    all_to_all_vdev,
    all_to_all_vdev_2d,
    all_to_all_vdev_2d_offset,
    tile_reduce,
    multi_root_tile_reduce,
)
