"""What a carrier of bytes can do.

A carrier starts the communication and returns a Work, or None if the bytes are there already. What
it cannot do on the data as it is, it does in a form that it can, and undoes that in a ``finish``
that runs when the result is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.groups import Group
from fcoll.reductions import Reduction, fold

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
