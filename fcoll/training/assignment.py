"""Which gradients are sent together: parameters in, buckets out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fcoll.errors import BadBuckets
from fcoll.scheduling.buckets import Bucket
from fcoll.table.reduce import ALL_REDUCE
from fcoll.training import _torch
from fcoll.training.bucket_collectives import Collectives

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first message leaves early
BUCKET_BYTES = 25 << 20
SPARSE_BYTES = 0  # the cap of a bucket that one sparse gradient has for itself


@dataclass
class _Open:
    """A bucket that is being filled: the next of its dtype and device takes the next cap."""

    cap: int
    members: list[int] = field(default_factory=list)
    bytes: int = 0
    filled: int = 0  # how many of this dtype and device were full before


def compute_bucket_assignment_by_size(
    tensors: Sequence[Tensor],
    bucket_size: Sequence[int],
    expect_sparse_gradient: Sequence[bool] = (),
    tensor_indices: Sequence[int] = (),
    logger: object = None,
) -> tuple[list[list[int]], list[int]]:
    """The indices of the tensors of each bucket, and the cap in bytes that each bucket had.

    A bucket has tensors of one dtype and device and is full when it has its cap or more; caps are
    used one after the other, the last one again and again. A tensor whose gradient will be sparse
    is alone. ``tensor_indices`` are what the tensors are called in the result, in the order in
    which their gradients were ready; without them buckets are sorted by their first tensor.

    >>> from fcoll.training.assignment import compute_bucket_assignment_by_size
    >>> xs = [torch.empty(100), torch.empty(100), torch.empty(300), torch.empty(5).double()]
    >>> compute_bucket_assignment_by_size(xs, [400, 1200])
    ([[0], [1, 2], [3]], [400, 1200, 400])
    """
    _check(tensors, bucket_size, expect_sparse_gradient)
    open_: dict[tuple[torch.dtype, torch.device], _Open] = {}
    buckets: list[tuple[list[int], int, int]] = []  # members, cap, place of the last one
    for place, x in enumerate(tensors):
        index = tensor_indices[place] if tensor_indices else place
        if expect_sparse_gradient and expect_sparse_gradient[index]:
            buckets.append(([index], SPARSE_BYTES, place))
            continue
        bucket = open_.setdefault((x.dtype, x.device), _Open(bucket_size[0]))
        bucket.members.append(index)
        bucket.bytes += x.numel() * x.element_size()
        if bucket.bytes >= bucket.cap:
            buckets.append((bucket.members, bucket.cap, place))
            filled = bucket.filled + 1
            cap = bucket_size[min(filled, len(bucket_size) - 1)]
            open_[x.dtype, x.device] = _Open(cap, filled=filled)
    last = {index: place for place, index in enumerate(tensor_indices or range(len(tensors)))}
    rest = [b for b in open_.values() if b.members]
    buckets += [(b.members, b.cap, last[b.members[-1]]) for b in rest]
    # ready order: a bucket leaves when its last gradient is there
    buckets.sort(key=lambda b: b[2] if tensor_indices else min(b[0]))
    return [b[0] for b in buckets], [b[1] for b in buckets]


def _check(tensors: Sequence[Tensor], caps: Sequence[int], sparse: Sequence[bool]) -> None:
    if not tensors:
        raise BadBuckets(why="there are no tensors", hint="Pass the parameters.")
    if not caps:
        raise BadBuckets(why="there is no size", hint="Pass sizes in bytes, as in [1 << 20].")
    if sparse and len(sparse) != len(tensors):
        why = f"{len(sparse)} of {len(tensors)} tensors are said to be sparse or not"
        raise BadBuckets(why=why, hint="Say it of each, or of none.")
    if any(x.is_sparse for x in tensors):
        raise BadBuckets(why="No support for sparse tensors", hint="Only gradients may be sparse.")


def planned(
    params: Sequence[Tensor], indices: Sequence[Sequence[int]], names: Sequence[str], group: str
) -> tuple[Bucket, ...]:
    """The buckets as the scheduler and the reports speak of them."""
    return tuple(
        Bucket(
            name=f"bucket_{i}",
            op=ALL_REDUCE.name,
            group=group,
            dtype=str(params[members[0]].dtype).removeprefix("torch."),
            members=tuple(names[j] for j in members),
            waits=(),
            bytes=sum(params[j].numel() * params[j].element_size() for j in members),
        )
        for i, members in enumerate(indices)
    )


def in_ready_order(
    params: Sequence[Tensor], order: Sequence[int], caps: Sequence[int], sparse: Sequence[bool]
) -> list[list[int]]:
    """Buckets of parameters in the order in which their gradients became ready."""
    last_is_small = os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"
    order = order[::-1] if last_is_small else order
    indices, _ = compute_bucket_assignment_by_size([params[i] for i in order], caps, sparse, order)
    return indices[::-1] if last_is_small else indices


def agreed(
    indices: list[list[int]], number: int, group: Collectives, device: torch.device
) -> tuple[list[list[int]], int]:
    """Rank 0's buckets, and its number of the reducer."""
    flat = [i for members in indices for i in members]
    of = [b for b, members in enumerate(indices) for _ in members]
    mine = torch.tensor([[*flat, number], [*of, 0]], dtype=torch.int32)
    rank0s = group.broadcast_(mine.to(device))
    if _torch.has_no_data(rank0s):
        return indices, number
    (*flat, number), (*of, _) = rank0s.tolist()
    buckets: list[list[int]] = [[] for _ in range(1 + max(of))]
    for index, b in zip(flat, of, strict=True):
        buckets[b].append(index)
    return buckets, number
