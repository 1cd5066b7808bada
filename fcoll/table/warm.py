"""Memory for large results of stacked ranks, which stays mapped when a result is freed.

glibc gives blocks of 32 MiB and more back to the kernel at once, and every new one costs page
faults: an all-to-all of 64 ranks with 1 MiB each took 38 ms in fresh memory, 7 in used memory. The
C++ part has its own (native/warm_blocks.h), which is not there where it was not built.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fcoll import _torch

_SMALLEST = 32 << 20  # bytes: of smaller blocks glibc keeps those that it has
_HUGE_PAGE = 2 << 20
_KEPT_FOR_S = 10.0
_MOST = int(os.environ.get("FCOLL_WARM_MIB") or 512) << 20

_lock = threading.RLock()  # a block may come back in the middle of anything
_kept: list[tuple[float, mmap.mmap]] = []  # since when nobody uses it; the longest first


def contiguous(x: Tensor) -> Tensor:
    """``x.clone(memory_format=torch.contiguous_format)``."""
    large = not _torch.tracing() and x.numel() * x.element_size() >= _SMALLEST
    if large and x.is_cpu and _torch.plain(x):
        return empty(x.shape, x.dtype).copy_(x)
    return x.clone(memory_format=torch.contiguous_format)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.empty of a large CPU tensor, in a block that was used before if there is one."""
    count = torch.Size(shape).numel()
    block = _take(-(-count * dtype.itemsize // _HUGE_PAGE) * _HUGE_PAGE)
    lease = (ctypes.c_char * len(block)).from_buffer(block)  # alive while a tensor uses it
    weakref.finalize(lease, _give_back, block).atexit = False
    return torch.frombuffer(lease, dtype=dtype, count=count).view(shape)


def _take(size: int) -> mmap.mmap:
    """A block of just this size: a larger one would hold memory that no result needs."""
    with _lock:
        _drop()
        for i in reversed(range(len(_kept))):
            if len(_kept[i][1]) == size:
                return _kept.pop(i)[1]
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)  # a hint
    return block


def _give_back(block: mmap.mmap) -> None:
    with _lock:
        _kept.append((time.monotonic(), block))
        _drop()


def _drop() -> None:
    """What was not used for long, and the oldest of too many: unmapped with their last name."""
    oldest = time.monotonic() - _KEPT_FOR_S
    while _kept and (_kept[0][0] < oldest or kept_bytes() > _MOST):
        _kept.pop(0)


def release() -> None:
    """Unmap all that nobody uses."""
    with _lock:
        _kept.clear()


def kept_bytes() -> int:
    """Of blocks that nobody uses."""
    return sum(len(block) for _, block in _kept)
