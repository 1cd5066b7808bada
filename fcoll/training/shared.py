"""Buckets in memory that all ranks of a group have mapped: they are added up where they lie.

A rank writes its gradients there and says so; each rank then makes its share of the sum, and writes
it into every rank's bucket (``share_out`` in native/collectives.cpp). Nothing is copied on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fcoll.errors import from_native
from fcoll.groups import by_name
from fcoll.training import _torch
from fcoll.training.bucket import DenseBucket, GradientBucket
from fcoll.training.bucket_collectives import Collectives, Started
from fcoll.transport import shared_memory
from fcoll.transport.native import build

# Buckets begin on pages of their own: no cache line is in two.
PAGE = 4096


class BucketMemory:
    """Where a bucket is in the memory of all buckets."""

    def __init__(self, memory: Any, at: int) -> None:
        self.memory, self.at = memory, at

    def sum_(self, x: Tensor, group: Collectives, tag: int) -> Started | None:
        """Start to add the bucket up over the group; None if some rank could not map the others'
        memory, on all ranks."""
        recorded = group.recorded("all_reduce", x)
        try:
            result = build.fast.sum_in_place(self.memory, self.at, x, group.name, tag)
        except RuntimeError as error:
            raise from_native(error) from None
        return None if result is NotImplemented else Started(x, result, recorded=recorded)


def put_into_shared_memory(buckets: Sequence[GradientBucket], group: Collectives) -> None:
    """Give the buckets memory that all ranks can map, where the group is known to have it.

    All ranks know the same of a group. They map each other's memory when the first bucket is sent.
    """
    handle = _handle(group)
    dense = [b for b in buckets if isinstance(b, DenseBucket) and _fits(b)]
    if not handle or not dense:
        return
    starts = [0]
    for bucket in dense:
        bytes_ = bucket.message.numel() * bucket.message.element_size()
        starts.append(starts[-1] + -(-bytes_ // PAGE) * PAGE)
    memory = build.fast.SharedBuckets(handle, starts.pop())
    for bucket, at in zip(dense, starts, strict=True):
        message = memory.tensor(at, bucket.message.numel(), bucket.message)
        if message is not None:
            bucket.lay_into(message)
        bucket.shared = BucketMemory(
            memory, at
        )  # without memory of its own too: the others hear of it


def _handle(group: Collectives) -> int:
    """The handle of the group's shared memory; 0 if it has none, or a rank has no extension module,
    or that is not known yet."""
    if group.name is None:
        return 0
    status = shared_memory.known_status(by_name(group.name))
    return status.handle if status and status.fast else 0


def _fits(bucket: DenseBucket) -> bool:
    x = bucket.buffer
    plain = x.device.type == "cpu" and not _torch.has_no_data(x) and x.numel() > 0
    return plain and x.dtype in shared_memory.REDUCED
