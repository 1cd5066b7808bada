"""torch.distributed's backend "fcoll" for CPU tensors: how a group of it is made.

Its ranks meet in the group's store, as those of any group do at their first collective
(fcoll/groups.py), and map one another's memory. The collectives are in native/backend.cpp; a gloo
backend of the same ranks takes what is not served there, and everything if one rank cannot map the
others' memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fcoll_backend
from fcoll.groups import lobby_in, meeting_in
from fcoll.lobby import Process, processes_of
from fcoll.transport import shared_memory
from fcoll.transport._torch import serve_calls_for_gloo
from fcoll.transport.acceleration import Acceleration
from fcoll.transport.native import build

log = logging.getLogger("fcoll")

serve_calls_for_gloo()

# Of a default group that is being made, by its shared memory: processes_of() has no place for them
# before there is that group.
_met: dict[int, dict[int, Process]] = {}


def as_gloo() -> Acceleration:
    """Have every group that asks for gloo on CPU tensors be one of the backend "fcoll".

    ``init_process_group("gloo")``, ``new_group(backend="gloo")``, ``"cpu:gloo,cuda:nccl"`` and what
    libraries make of them: ``get_backend()`` says "gloo" as before. On all ranks, before the groups
    are made; those that are there keep what they have. FCOLL_AS=gloo does it without a line of
    Python.

    >>> with fcoll.as_gloo():
    ...     group = dist.new_group(backend="gloo")
    >>> x = torch.ones(2)
    >>> _ = dist.all_reduce(x, group=group)  # on shared memory
    >>> x.tolist() == [n, n], dist.get_backend(group)
    (True, 'gloo')
    """
    return Acceleration(fcoll_backend.stand_for("gloo", "fcoll.as_gloo()"))


def make(facts: Any, options: Any = None) -> Any:
    """The backend of a group, as torch.distributed asks for it; ``options`` are not needed."""
    n, ranks = facts.group_size, list(facts.global_ranks_in_group)
    timeout_s = facts.timeout.total_seconds()
    named = facts.group_id, fcoll_backend.for_gloo.get()
    return make_for(facts.store, facts.group_rank, ranks or range(n), timeout_s, *named)


def make_for(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    timeout_s: float,
    name: str,
    for_gloo: bool,
) -> Any:
    """The backend of these ranks, by their global numbers; all of them call it. ``for_gloo``: it
    was asked for as gloo's, and profiles have gloo's names of its calls."""
    status, gloo = _connect(store, rank, ranks, timeout_s)
    gloo.options.global_ranks_in_group = list(ranks)
    gloo.options.group_name = name
    if status.shared and status.fast:
        build.fast.split_backends_by(make_for)
        facts = timeout_s, name, list(ranks), for_gloo
        return build.fast.make_backend(rank, len(ranks), gloo, status.handle, *facts)
    _close(status)
    why_not = "a rank lacks the extension for its Python" if status.shared else status.reason
    if len(ranks) > 1:
        _say(why_not)
    return gloo


def _connect(
    store: dist.Store, rank: int, ranks: Sequence[int], timeout_s: float
) -> tuple[shared_memory.Status, dist.ProcessGroupGloo]:
    """Whether the ranks can map one another's memory, which they find out together; and their gloo
    backend."""
    n, timeout = len(ranks), timedelta(seconds=timeout_s)
    if why_not := shared_memory.too_many_or_few(n):
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, n, timeout)
        return shared_memory.Status(0, why_not), gloo
    # split_group gives sibling groups one name, and so one store
    prefix = "fcoll_backend/" + "_".join(map(str, ranks))
    lobby = lobby_in(store, rank, ranks, timeout_s, prefix, known_processes())
    with meeting_in(lobby, lobby.give_up) as exchange:
        status = shared_memory.connect(rank, n, timeout_s, exchange)
        try:
            # not the addresses of an earlier group of that name: a world may be made again in its
            # store
            addresses = dist.PrefixStore(f"gloo/{lobby.meeting}", store)
            gloo = dist.ProcessGroupGloo(addresses, rank, n, timeout)
            # A rank that is connected to all and ends its group at once would have the others fail
            # that still connect to one another.
            exchange("connected")
        except BaseException:
            _close(status)
            raise
    processes = {ranks[r]: process for r, process in lobby.processes.items()}
    if dist.group.WORLD is not None:
        known_processes().update(processes)
    elif status.shared:
        _met[status.handle] = processes
    return status, gloo


def known_processes() -> dict[int, Process]:
    """Those of the ranks that are known in this world, by global rank."""
    world = dist.group.WORLD
    if world is None:
        return {}
    known = processes_of(world)
    known.update(_met.pop(shared_memory.handle_of_backend(world), {}))
    return known


def _close(status: shared_memory.Status) -> None:
    if status.shared:
        torch.ops.fcoll_native.close(status.handle)


@functools.cache
def _say(why_not: str) -> None:
    """Once in a process."""
    log.warning('the backend "fcoll" hands all collectives to gloo: %s', why_not)
