"""The carrier between processes of one host: memory that all ranks of a group have mapped.

A group qualifies if every rank can map every other's memory: proved, not guessed, at its first
collective on CPU tensors, by a random token that each rank puts into its memory and tells the
others (handshake.py). Where its ranks lie on several hosts, those of each do that among themselves
(hosts.py). If one cannot, for whatever reason, all use the process group.

The primitives are complete when they return, and take the common dtypes as they are.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch
from fcoll.errors import FcollError, GroupClosed
from fcoll.groups import Group
from fcoll.reductions import Reduction
from fcoll.transport import dumps, process_group
from fcoll.transport.handshake import Exchange, meeting
from fcoll.transport.islands import MOST as MAX_RANKS
from fcoll.transport.islands import VARIABLE, Islands, forced_part, islands_of
from fcoll.transport.native import build
from fcoll.transport.protocol import (
    Started,
    all_reduce_by_gather,
    reduce_scatter_by_exchange,
    running,
)

REASON = 300  # characters of a reason that peers are told

_self: Any = sys.modules[__name__]  # this module as a Carrier

# -- which groups have it ---


@dataclass(frozen=True)
class Status:
    """How a group's collectives on CPU tensors travel: ``handle`` names the shared memory. Ranks on
    several hosts have ``islands``, and ``inside`` names the memory of this rank's."""

    handle: int
    reason: str
    fast: bool = False  # have all ranks the extension module?
    islands: Islands | None = None
    inside: int = 0

    @property
    def shared(self) -> bool:
        return self.handle != 0

    def __str__(self) -> str:
        if self.islands is not None:
            return self.reason
        return ("shared memory: " if self.shared else "process group: ") + self.reason


# name -> (weak reference to the process group, Status): names are given again (see groups.py)
_known: dict[str, tuple[weakref.ref, Status]] = {}

# name -> (weak reference to the process group, why its ranks did not come together)
_closed: dict[str, tuple[weakref.ref, str]] = {}

_connects = threading.Lock()
_locks: dict[str, Any] = {}  # name -> held while its group is connected

# The groups that have it, by name: hints, since a name may stand for another group by now. C++
# looks before it serves a call, and who is sent back goes the long way.
served: set[str] = set()


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
    """How the group's collectives travel. Its ranks find that out together: all must ask.

    A group whose ranks did not come together is closed: a call that is made again could meet
    another call of the rank that came late.
    """
    known = known_status(g)
    if known is not None:
        return known
    with _connecting(g.name):
        return known_status(g) or _first_status(g)


def _first_status(g: Group) -> Status:
    pg = g.pg
    closed = _closed.get(g.name)
    if closed is not None and closed[0]() is pg:
        raise GroupClosed(message=f"the group was closed by an earlier error: {closed[1]}")
    try:
        made = _connect(g)
    except FcollError as error:
        _closed[g.name] = (weakref.ref(pg), str(error.args[0]))
        raise
    _known[g.name] = (weakref.ref(pg), made)
    (served.add if made.shared else served.discard)(g.name)
    if made.shared:
        weakref.finalize(pg, torch.ops.fcoll_native.close, made.handle)
    return made


@contextmanager
def _connecting(name: str) -> Iterator[None]:
    """One thread finds it out for a group; others that make its first call meanwhile wait."""
    with _connects:
        lock = _locks.setdefault(name, threading.RLock())
    with lock:
        yield


def _connect(g: Group) -> Status:
    """Find out with the other ranks how the group's bytes travel. What all know is not asked."""
    if g.simulated:
        return Status(0, "simulated")
    if not g.serves:
        return Status(0, "a fake group moves no bytes")
    if "cpu" not in g.serves:
        return Status(0, "the group has no backend for CPU tensors")
    if g.n == 1:
        return Status(0, too_many_or_few(g.n))
    if handle := handle_of_backend(g.pg):
        status = Status(handle, _described(g.n), True)
    else:
        part = forced_part(g.ranks[g.rank]) if os.environ.get(VARIABLE) else ""
        with meeting(g) as exchange:
            status = connect(g.rank, g.n, _torch.group_timeout_s(g.pg), exchange, part)
    if status.shared:
        torch.ops.fcoll_native.bind(g.name, status.handle)
    return status


def too_many_or_few(n: int) -> str:
    """Why a group of so many ranks has no shared memory; empty if it may have."""
    return "" if 1 < n <= MAX_RANKS else f"it has {n} ranks; shared memory serves 2 to {MAX_RANKS}"


def handle_of_backend(pg: dist.ProcessGroup) -> int:
    """The shared memory that a group's backend has already, if that is fcoll's (backend.py)."""
    return getattr(_torch.cpu_backend(pg), "handle", 0)


def known_handle(pg: dist.ProcessGroup) -> int:
    """The shared memory of a group that has it by now, or 0."""
    known = _known.get(pg.group_name)
    own = known is not None and known[0]() is pg
    return known[1].handle if known and own else handle_of_backend(pg)


def connect(
    rank: int, n: int, timeout_s: float, exchange: Exchange, part: str | None = None
) -> Status:
    """Map the memory of the ranks that ``exchange`` is between, if all of them can; or that of the
    ranks of each island, unless ``part`` is None."""
    if any(map(os.environ.get, dumps.VARIABLES)):
        dumps.attend()
    mine = _open(rank, n, timeout_s, part or "")
    try:
        cards = _cards(mine, exchange)
        why_not, places = _without(mine, cards), [card.place for card in cards]
        if not why_not and (n > MAX_RANKS or len(set(places)) > 1):
            islands = islands_of(places, [card.host for card in cards])
            if part is not None and not islands.alone:
                _close(mine)
                return _connect_islands(rank, islands, timeout_s, exchange)
            why_not = f"its ranks are on {len(set(places))} hosts"
        why_not, fast = (why_not, False) if why_not else _joined(mine, cards, exchange)
    except BaseException:
        _close(mine)
        raise
    if not why_not:
        return Status(mine.handle, _described(n), fast)
    _close(mine)
    return Status(0, why_not)


def _connect_islands(rank: int, islands: Islands, timeout_s: float, exchange: Exchange) -> Status:
    """Each island maps its memory; all ranks hear whether all could."""
    home, place = islands.at(rank)
    mine = _open(place, len(islands.ranks[home]), timeout_s)
    try:
        cards = _cards(mine, exchange)
        why_not = _without(mine, cards)
        if not why_not:
            why_not, _ = _joined(mine, cards, exchange, islands.ranks[home])
    except BaseException:
        _close(mine)
        raise
    if not why_not:
        if mine.handle:
            torch.ops.fcoll_native.yield_cores(mine.handle)
        return Status(0, str(islands), islands=islands, inside=mine.handle)
    _close(mine)
    return Status(0, why_not)


def _described(n: int) -> str:
    return f"{n} ranks on {socket.gethostname()}"


@dataclass(frozen=True)
class Opened:
    """A rank's own memory, or why it has none, as it tells its peers."""

    why_not: str = ""
    place: str = ""  # ranks with another one cannot map this memory
    host: str = ""
    pid: int = 0
    handle: int = 0  # of this process
    fd: int = -1
    token: int = 0
    fast: bool = False  # has it the extension module?
    library: str = ""  # the build's key: what ranks tell each other in memory depends on it


def _open(rank: int, n: int, timeout_s: float, part: str = "") -> Opened:
    """This rank's memory, if it is for so many ranks. Whatever goes wrong is told to the peers,
    which wait for it."""
    try:
        if why_not := build.load():
            return Opened(why_not[:REASON])
        card = Opened(
            place=_place(part), host=socket.gethostname(), pid=os.getpid(),
            fast=build.has_fast_path(), library=build.library_key(),
        )  # fmt: skip
        if too_many_or_few(n):
            return card
        handle, fd, token = torch.ops.fcoll_native.open(rank, n, timeout_s)
        return replace(card, handle=handle, fd=fd, token=token)
    except Exception as error:
        return Opened(_said(error))


def fail(g: Group, why: str) -> None:
    """Close the group on all its ranks: those that wait for this one in a call raise at once."""
    status = known_status(g)
    if status is not None and (handle := status.handle or status.inside):
        torch.ops.fcoll_native.fail(handle, why)


def _close(mine: Opened) -> None:
    if mine.handle:
        torch.ops.fcoll_native.close(mine.handle)


def _cards(mine: Opened, exchange: Exchange) -> list[Opened]:
    return [Opened(**json.loads(text)) for text in exchange(json.dumps(asdict(mine)))]


def _without(mine: Opened, cards: Sequence[Opened]) -> str:
    """Why there can be no shared memory; empty if all ranks can try."""
    without = [f"rank {r}: {card.why_not}" for r, card in enumerate(cards) if card.why_not]
    if without:
        return mine.why_not or without[0]
    several = len({card.library for card in cards}) > 1
    return "its ranks run different builds of fcoll or torch" if several else ""


def _joined(
    mine: Opened, cards: Sequence[Opened], exchange: Exchange, ranks: Sequence[int] | None = None
) -> tuple[str, bool]:
    """Map the memory of these ranks or of all, if all ranks can: empty, or on all ranks why not;
    and have all ranks the extension module?"""
    try:
        peers = cards if ranks is None else [cards[r] for r in ranks]
        addresses = [(card.pid, card.fd, card.token) for card in peers]
        alone = len(peers) == 1
        join = torch.ops.fcoll_native.join
        why_not = "" if alone else join(mine.handle, *zip(*addresses, strict=True))
    except Exception as error:
        why_not = _said(error)
    failed = [(r, text) for r, text in enumerate(exchange(why_not)) if text]
    why_not = why_not or (f"rank {failed[0][0]}: {failed[0][1]}" if failed else "")
    return why_not, all(card.fast for card in cards)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:REASON]


def _place(part: str) -> str:
    """What differs between hosts, and between containers on one: the kernel's random boot id, and
    the namespace in which processes see one another."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/pid')} {part}"


# -- what the ranks compare ---


def _signature() -> Tensor:
    """What the messages of a primitive carry; nothing if it belongs to no call of the table."""
    if running.signed is None:
        return UNSIGNED
    return torch.ops.fcoll_native.sign(*running.signed())


UNSIGNED = torch.empty(0, dtype=torch.int64)

# -- the primitives ---

# What is reduced as it is.
REDUCED = process_group.NATIVE | {torch.int16, torch.bool, torch.complex64, torch.complex128}
_DONE: Started = (None, None)


def all_reduce_(buf: Tensor, row: Reduction, g: Group) -> Started:
    if buf.dtype not in REDUCED:
        return all_reduce_by_gather(_self, buf, row, g)
    torch.ops.fcoll_native.all_reduce_(buf, row.name, handle_of(g), _signature())
    return _DONE


def reduce_(buf: Tensor, dst: int, row: Reduction, g: Group) -> Started:
    return all_reduce_(buf, row, g)


def reduce_scatter(out: Tensor, chunks: Tensor, row: Reduction, g: Group) -> Started:
    if chunks.dtype not in REDUCED:
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
