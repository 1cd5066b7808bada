"""torch.distributed's in-place calls in a trace: what eager FSDP2, DDP and dist.* calls issue.

Each is recorded as an op of the table (``table/c10d.py`` says which); results are written to where
they go when the program waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fcoll.errors import UnknownCollective
from fcoll.table.c10d import OPS, SEND_NOTHING, Message, Op, alltoall_base_
from fcoll.table.collectives import COLLECTIVES
from fcoll.tracing import _torch


class StartedMessage:
    """A message that a c10d op started, to be completed before its tensors are used."""

    def __init__(self, message: Message, group: ProcessGroup) -> None:
        if message.from_anyone:
            raise UnknownCollective(op="a message from any rank")
        self.message = message
        self.row = COLLECTIVES[message.row]
        self.here = message.root in (None, group.rank())
        self.done = False
        self.outs = [x for outs in message.outs for x in outs]
        with torch.no_grad():
            results = self._start()
        self.results = [results] if isinstance(results, Tensor) else results

    def _start(self) -> Any:
        m = self.message
        if not self.row.mutates:
            return getattr(torch.ops.fcoll, m.row)(*m.args)
        out = {"out": self.outs[0]} if self.row.has_out else {}
        getattr(torch.ops._c10d_functional, m.row)(*m.args, **out)
        return self.outs

    def storages(self) -> set[int]:
        """The storages that are being written to: any use of them comes after the wait."""
        return {_torch.storage_id(x) for x in self.outs or self.results}

    def complete(self) -> None:
        """Wait for it, once."""
        if self.done:
            return
        self.done = True
        results = [torch.ops._c10d_functional.wait_tensor(x) for x in self.results]
        if self.here and self.outs and not self.row.mutates:
            for out, result in self.message.copies(results):
                out.copy_(result.view(out.shape))


class ExchangeWork:
    """The handle of an exchange whose splits are symbols, which no C++ group takes."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        self._wait()
        return True

    def is_completed(self) -> bool:
        return True


def _group(group: ProcessGroup) -> tuple[str, int]:
    return group.group_name, group.size()


def start_exchange(
    group: Any, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any
) -> StartedMessage:
    """An exchange whose splits are symbols."""
    group = _torch.unboxed_group(group)
    message = alltoall_base_(output, input, _group(group), output_splits, input_splits)
    return StartedMessage(message, group)


def op_of(func: Any) -> Op | None:
    """The op that is called; None if it sends nothing."""
    name = _torch.op_name(func).removeprefix("c10d::")
    if name not in OPS and name not in SEND_NOTHING:
        raise UnknownCollective(op=f"c10d::{name}")
    return OPS.get(name)


def start(op: Op, args: Any, kwargs: Any) -> tuple[StartedMessage, bool]:
    """Start the message of a c10d op; and is it to be completed at once?"""
    named = op.named(args, kwargs)
    group = _torch.unboxed_group(named["process_group"])
    with torch.no_grad():
        return StartedMessage(op.read(named, _group), group), not named.get("async_op", True)
