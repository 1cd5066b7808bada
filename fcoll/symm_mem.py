"""Which groups are served by shared memory, and the handshake that finds it out.

A group qualifies if every rank can map every other's memory: proved, not guessed, at its first
collective on CPU tensors, by a random token that each rank puts into its memory and tells the
others through the process group. If one cannot, all use the process group.
"""

from __future__ import annotations

import os
import socket
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from fcoll import _torch
from fcoll.groups import Group, GroupLike, resolve
from fcoll.native import build

MAX_RANKS = 64  # core.h


@dataclass(frozen=True)
class Status:
    """How a group's collectives on CPU tensors travel: ``handle`` names the shared memory."""

    handle: int
    reason: str

    @property
    def shared(self) -> bool:
        return self.handle != 0

    def __str__(self) -> str:
        return ("shared memory: " if self.shared else "process group: ") + self.reason


# name -> (weak reference to the process group, Status): names are given again (see groups.py)
_known: dict[str, tuple[weakref.ref, Status]] = {}


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


def handle_of(g: Group) -> int:
    """The shared memory of the group, or 0 if the process group serves it."""
    return status_of(g).handle


def known_status(g: Group) -> Status | None:
    """The status of a group if it has been found out already."""
    known = _known.get(g.name)
    return known[1] if known is not None and known[0]() is g.pg else None


def known_groups() -> list[tuple[str, int, bool]]:
    """Of the groups of which it is known: name, size, and whether they have shared memory."""
    alive = [(name, pg(), status) for name, (pg, status) in _known.items()]
    return sorted((name, pg.size(), status.shared) for name, pg, status in alive if pg)


def status_of(g: Group) -> Status:
    known = known_status(g)
    if known is not None:
        return known
    pg, made = g.pg, _connect(g)
    _known[g.name] = (weakref.ref(pg), made)
    if made.shared:
        weakref.finalize(pg, torch.ops.fcoll_native.close, made.handle)
    return made


def _connect(g: Group) -> Status:
    """Open this rank's memory, exchange tokens, map the peers', and agree on the outcome."""
    if not g.serves:
        return Status(0, "a fake group moves no bytes")
    if "cpu" not in g.serves:
        return Status(0, "the group has no backend for CPU tensors")
    if not 1 < g.n <= MAX_RANKS:
        return Status(0, f"it has {g.n} ranks; shared memory serves 2 to {MAX_RANKS}")
    why_not = build.load()
    handle, fd, token = 0, -1, 0
    if not why_not:
        timeout_s = _torch.group_timeout_s(g.pg)
        handle, fd, token = torch.ops.fcoll_native.open(g.rank, g.n, timeout_s)
    facts = [int(not why_not), _host(), os.getpid(), fd, token]
    ok, hosts, pids, fds, tokens = zip(*_exchange(g, facts), strict=True)
    if not all(ok):
        why_not = why_not or f"rank {ok.index(0)} has no compiled library"
    elif len(set(hosts)) > 1:
        why_not = f"its ranks are on {len(set(hosts))} hosts"
    else:
        why_not = torch.ops.fcoll_native.join(handle, pids, fds, tokens)
    failed = [r for r, (bad,) in enumerate(_exchange(g, [int(bool(why_not))])) if bad]
    if not failed:
        torch.ops.fcoll_native.bind(g.name, handle)
        return Status(handle, f"{g.n} ranks on {socket.gethostname()}")
    if handle:
        torch.ops.fcoll_native.close(handle)
    return Status(0, why_not or f"rank {failed[0]} could not map the memory of its peers")


def _host() -> int:
    """A number that differs between hosts: the kernel's random boot id."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    return int(boot_id.replace("-", "")[:15], 16)


def _exchange(g: Group, mine: list[int]) -> list[list[int]]:
    """Every rank's numbers, through the process group."""
    all_ranks = torch.empty(g.n * len(mine), dtype=torch.int64)
    g.pg._allgather_base(all_ranks, torch.tensor(mine, dtype=torch.int64)).wait()
    return all_ranks.view(g.n, -1).tolist()


class Acceleration:
    """In force until ``undo``; a context manager too."""

    def undo(self) -> None:
        if build.loaded():
            torch.ops.fcoll_native.accelerate(False)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def accelerate_c10d() -> Acceleration:
    """Serve torch's functional collectives (``_c10d_functional``) on CPU tensors by shared memory.

    So DTensor and whatever else calls them gets it, unmodified. All ranks must do it. Without a
    compiler nothing changes.

    >>> c10d, world = torch.ops._c10d_functional, dist.group.WORLD.group_name
    >>> with fcoll.accelerate_c10d():
    ...     c10d.wait_tensor(c10d.all_reduce(torch.ones(2), "sum", world)).tolist() == [n, n]
    True
    """
    if not build.load():
        torch.ops.fcoll_native.accelerate(True)
    return Acceleration()
