"""What a call needs of carriers: which one serves its group, and to have its result wait for it.

Simulated ranks are served by threads, a group by its shared memory where it has it, by its hosts'
where it has several with some ranks each, else by c10d.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch
from fcoll.groups import Group, is_simulated
from fcoll.transport import process_group, shared_memory, threads
from fcoll.transport.hosts import Hosts
from fcoll.transport.native import build
from fcoll.transport.protocol import Carrier, Finish

_MAIN_THREAD = threading.main_thread().ident


# Of CPU tensors, by the process group itself: names are given again (see groups.py)
_carriers: weakref.WeakKeyDictionary[dist.ProcessGroup, Carrier] = weakref.WeakKeyDictionary()


def carrier_of(g: Group, device: torch.device) -> Carrier:
    """All ranks of a group get the same: they agreed on it at its first collective."""
    pg = g.pg
    if is_simulated(pg):
        return threads
    if device.type != "cpu":
        return process_group
    carrier = _carriers.get(pg)
    return carrier or _carriers.setdefault(pg, _agreed_carrier(g))


def _agreed_carrier(g: Group) -> Carrier:
    status, shared = shared_memory.status_of(g), shared_memory
    if status.islands is not None:
        hosts = Hosts(g, status.islands, status.inside)
        weakref.finalize(g.pg, hosts.end)
        return hosts
    carrier: Any = shared if status.shared else process_group
    return carrier


def carrier_of_pairs(g: Group) -> Carrier:
    """For messages between two ranks. The others do not call, so nothing is agreed on here."""
    return threads if g.simulated else process_group


# -- works ---


class Then(dist.Work):
    """Waits for its works, then runs ``finish``: once, whoever waits first.

    Once, because a second wait for a gloo send waits for a second send.
    """

    def __init__(self, works: Sequence[dist.Work], finish: Finish | None = None) -> None:
        super().__init__()
        self.works = works
        self.finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        works, self.works = self.works, ()
        failed = [error for work in works if (error := _failure(work, timeout))]
        if failed:
            raise failed[0]
        finish, self.finish = self.finish, None
        if finish:
            with torch.no_grad():
                finish()
        return True

    def registered_for(self, out: Tensor) -> None:
        for work in self.works:
            tell(work, out)


def tell(work: dist.Work, out: Tensor) -> None:
    """Tell a work of simulated ranks for which tensor it is registered."""
    if (told := getattr(work, "registered_for", None)) is not None:
        told(out)


def _failure(work: dist.Work, timeout: timedelta | None) -> Exception | None:
    """What the wait raises. Raised only when all are waited for: a peer may need the others."""
    try:
        if timeout:
            work.wait(timeout)
        else:
            work.wait()
    except Exception as error:
        return error
    return None


def issued(out: Tensor, work: dist.Work | None, finish: Finish | None = None) -> Tensor:
    """Tie the work to the tensor, for wait_tensor to find; without one the bytes are here."""
    if work is not None:
        if build.fast and threading.get_ident() != _MAIN_THREAD:
            build.fast.issued_in_thread()  # what torch tells of its works is of one thread
        _torch.register_work(out, Then([work], finish) if finish else work)
        tell(work, out)
    elif finish:
        finish()
    return out
