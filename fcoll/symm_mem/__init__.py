"""Shared memory for users: which groups have it, and torch's own collectives on it."""

from __future__ import annotations

import torch

from fcoll.groups import GroupLike, resolve
from fcoll.symm_mem import kernels
from fcoll.transport.acceleration import Acceleration
from fcoll.transport.native import build
from fcoll.transport.shared_memory import Status, status_of

__all__ = ["Acceleration", "Status", "accelerate_c10d", "empty_cache", "load", "status"]


def load() -> bool:
    """Load the C++ part now, compiling it if need be; False if process groups must serve.

    It also makes ``torch.distributed._symmetric_memory`` work on CPU tensors.
    """
    return not build.load()


def status(group: GroupLike = None) -> Status:
    """How this group's collectives on CPU tensors travel, and why.

    The first call for a group, like the first collective on it, must be made by all its ranks.

    >>> str(fcoll.symm_mem.status()).startswith(("shared memory: ", "process group: "))
    True
    """
    return status_of(resolve(group))


def empty_cache() -> None:
    """Give the memory of large results that nobody uses any more back to the system.

    Results of 4 MiB and more lie in blocks that are kept for the next ones when they are freed: up
    to 512 MiB (FCOLL_WARM_MIB), for 10 s.

    >>> fcoll.symm_mem.empty_cache()
    """
    if build.loaded():
        torch.ops.fcoll_native.empty_cache()


def accelerate_c10d() -> Acceleration:
    """Serve torch's functional collectives (``_c10d_functional``) on CPU tensors by shared memory.

    So DTensor and whatever else calls them gets it, unmodified. All ranks must do it. Without a
    compiler nothing changes.

    >>> c10d, world = torch.ops._c10d_functional, dist.group.WORLD.group_name
    >>> with fcoll.accelerate_c10d():
    ...     c10d.wait_tensor(c10d.all_reduce(torch.ones(2), "sum", world)).tolist() == [n, n]
    True
    """
    if build.load():
        return Acceleration(lambda: None)
    torch.ops.fcoll_native.accelerate(True)
    return Acceleration(lambda: torch.ops.fcoll_native.accelerate(False))


kernels.register()
