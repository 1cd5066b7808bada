"""What a carrier of bytes can do, and what ties its work to a result.

A carrier starts the communication and returns a Work, or None if the bytes are there already. What
it cannot do on the data as it is, it does in a form that it can, and undoes that in a ``finish``
that runs when the result is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch
from fcoll.groups import Group
from fcoll.reductions import Reduction, fold
from fcoll.transport.native import build

_MAIN_THREAD = threading.main_thread().ident
Finish = Callable[[], object]
Started = tuple[dist.Work | None, Finish | None]


@dataclass(frozen=True)
class Transfer:
    """One message to or from a rank of the group, of a contiguous tensor."""

    sends: bool
    buf: Tensor
    peer: int
    tag: int


class Carrier(Protocol):
    """The primitives. Tensors are contiguous; ranks are counted within the group."""

    def all_reduce_(self, buf: Tensor, row: Reduction, g: Group) -> Started:
        """Reduce buf in place."""

    def reduce_(self, buf: Tensor, dst: int, row: Reduction, g: Group) -> Started:
        """Reduce buf in place on dst; on the other ranks it is scratch."""

    def reduce_scatter(self, out: Tensor, chunks: Tensor, row: Reduction, g: Group) -> Started:
        """Reduce the chunks [n, *out.shape] over the ranks, chunk r to rank r."""

    def all_gather(self, out: Tensor, x: Tensor, g: Group) -> dist.Work | None:
        """Gather x of every rank into out, in rank order."""

    def exchange(
        self,
        out: Tensor,
        x: Tensor,
        g: Group,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
    ) -> dist.Work | None:
        """Send split r of x's rows to rank r and receive its split for us; even without splits."""

    def broadcast_(self, buf: Tensor, src: int, g: Group) -> dist.Work | None:
        """Overwrite buf with that of src."""

    def barrier(self, g: Group) -> dist.Work | None:
        """Complete when all ranks have called it."""

    def transfer(self, transfers: Sequence[Transfer], g: Group) -> list[dist.Work]:
        """Messages between pairs of ranks, all at once."""


# -- what the ranks compare ---


class Running(threading.local):
    """The call that this thread carries out by primitives: ``signed()`` gives its signature."""

    signed: Callable[[], Any] | None = None


running = Running()


# -- reductions that a carrier has not: gather what would be reduced, and fold it here ---


def all_reduce_by_gather(carrier: Carrier, buf: Tensor, row: Reduction, g: Group) -> Started:
    parts = buf.new_empty((g.n, *buf.shape))
    return carrier.all_gather(parts, buf, g), lambda: buf.data.copy_(fold(row, parts))


def reduce_scatter_by_exchange(
    carrier: Carrier, out: Tensor, chunks: Tensor, row: Reduction, g: Group
) -> Started:
    parts = torch.empty_like(chunks)
    return carrier.exchange(parts, chunks, g), lambda: out.data.copy_(fold(row, parts))


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
