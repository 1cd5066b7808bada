"""The carrier between processes of one host: memory that all ranks of a group have mapped.

A group qualifies if every rank can map every other's memory: proved, not guessed, at its first
collective on CPU tensors, by a random token that each rank puts into its memory and tells the
others through the process group. If one cannot, all use the process group.

The primitives are complete when they return, and take the common dtypes as they are.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch
from fcoll.groups import Group
from fcoll.reductions import Reduction
from fcoll.transport import process_group
from fcoll.transport.native import build
from fcoll.transport.protocol import (
    Started,
    all_reduce_by_gather,
    reduce_scatter_by_exchange,
)

MAX_RANKS = 64  # call.h

_self: Any = sys.modules[__name__]  # this module as a Carrier

# -- which groups have it ---


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

# The outcome by name, for those who must not lose time: hints, since a name may stand for another
# group by now. C++ looks before it serves a call, and who is sent back goes the long way.
served: set[str] = set()
refused: set[str] = set()


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
    """How the group's collectives travel. Its ranks find that out together: all must ask."""
    known = known_status(g)
    if known is not None:
        return known
    pg, made = g.pg, _connect(g)
    _known[g.name] = (weakref.ref(pg), made)
    (served if made.shared else refused).add(g.name)
    (refused if made.shared else served).discard(g.name)
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
    ok, hosts, pids, fds, tokens = zip(*_all_ranks(g, facts), strict=True)
    if not all(ok):
        why_not = why_not or f"rank {ok.index(0)} has no compiled library"
    elif len(set(hosts)) > 1:
        why_not = f"its ranks are on {len(set(hosts))} hosts"
    else:
        why_not = torch.ops.fcoll_native.join(handle, pids, fds, tokens)
    failed = [r for r, (bad,) in enumerate(_all_ranks(g, [int(bool(why_not))])) if bad]
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


def _all_ranks(g: Group, mine: list[int]) -> list[list[int]]:
    """Every rank's numbers, through the process group."""
    all_ranks = torch.empty(g.n * len(mine), dtype=torch.int64)
    work = process_group.all_gather(all_ranks, torch.tensor(mine, dtype=torch.int64), g)
    work.wait()  # type: ignore[union-attr]
    return all_ranks.view(g.n, -1).tolist()


# -- what the ranks compare ---


class Running(threading.local):
    """The call that this thread carries out by primitives: ``signed()`` gives its signature."""

    signed: Callable[[], Any] | None = None


running = Running()


def _signature() -> Tensor:
    """What the messages of a primitive carry; nothing if it belongs to no call of the table."""
    if running.signed is None:
        return _UNSIGNED
    return torch.ops.fcoll_native.sign(*running.signed())


_UNSIGNED = torch.empty(0, dtype=torch.int64)

# -- the primitives ---

# What is reduced as it is.
_REDUCED = process_group.NATIVE | {torch.int16, torch.bool, torch.complex64, torch.complex128}
_DONE: Started = (None, None)


def all_reduce_(buf: Tensor, row: Reduction, g: Group) -> Started:
    if buf.dtype not in _REDUCED:
        return all_reduce_by_gather(_self, buf, row, g)
    torch.ops.fcoll_native.all_reduce_(buf, row.name, handle_of(g), _signature())
    return _DONE


def reduce_(buf: Tensor, dst: int, row: Reduction, g: Group) -> Started:
    return all_reduce_(buf, row, g)


def reduce_scatter(out: Tensor, chunks: Tensor, row: Reduction, g: Group) -> Started:
    if chunks.dtype not in _REDUCED:
        return reduce_scatter_by_exchange(_self, out, chunks, row, g)
    torch.ops.fcoll_native.reduce_scatter_(out, chunks, row.name, handle_of(g), _signature())
    return _DONE


def all_gather(out: Tensor, x: Tensor, g: Group) -> dist.Work | None:
    torch.ops.fcoll_native.all_gather_(out, x, handle_of(g), _signature())
    return None


def exchange(
    out: Tensor,
    x: Tensor,
    g: Group,
    output_splits: Sequence[int] = (),
    input_splits: Sequence[int] = (),
) -> dist.Work | None:
    splits = output_splits, input_splits
    torch.ops.fcoll_native.exchange_(out, x, *splits, handle_of(g), _signature())
    return None


def broadcast_(buf: Tensor, src: int, g: Group) -> dist.Work | None:
    torch.ops.fcoll_native.broadcast_(buf, src, handle_of(g), _signature())
    return None


def barrier(g: Group) -> dist.Work | None:
    torch.ops.fcoll_native.barrier(handle_of(g))
    return None
