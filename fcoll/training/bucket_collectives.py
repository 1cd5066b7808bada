"""The collectives that a reducer issues: fcoll's on groups that it knows, else the group's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import functions
from fcoll.eager.dispatch import start
from fcoll.groups import by_name
from fcoll.training import _torch
from fcoll.transport import shared_memory
from fcoll.transport.carriers import carrier_of
from fcoll.transport.native import build

# Shared memory publishes messages up to here and reads its peers' when they are waited for; larger
# ones are complete when the call returns, and in place they need no memory for the result.
PUBLISHED = 1 << 20


class Started:
    """A reduction under way. ``wait`` gives its result, which is in the tensor it was called on."""

    def __init__(
        self,
        x: Tensor,
        result: Tensor | None = None,
        work: dist.Work | None = None,
        recorded: Any = None,  # in torch's profile
    ) -> None:
        self.x, self.result, self.work, self.recorded = x, result, work, recorded

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        elif self.result is not None:
            result = functions.wait_tensor(self.result)
            if not _torch.same_memory(result, self.x):
                self.x.copy_(result)
        if self.recorded is not None:
            self.recorded.end()
            self.recorded = None
        self.result = self.work = None
        return self.x


class Collectives:
    """On one process group; ``name`` is None for a group that torch does not know by name."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self.pg = pg
        self.name = _torch.group_name_of(pg)
        self.n, self.rank = pg.size(), pg.rank()
        self.fake = _torch.is_fake_group(pg)  # it has no other ranks

    def sum_(self, x: Tensor, at_once: bool = False) -> Started:
        """Start to add x up over the group, in place; ``at_once`` if the wait follows."""
        if x.is_sparse or self.name is None:
            wire = torch.view_as_real(x) if x.is_complex() and not x.is_sparse else x
            return Started(x, work=self.pg.allreduce([wire]))
        on_shared_memory = self._on_shared_memory(x)
        recorded = self.recorded("all_reduce", x) if on_shared_memory else None
        small = 0 < x.numel() * x.element_size() <= PUBLISHED
        if on_shared_memory and small and not at_once:
            return Started(x, functions.all_reduce(x, "sum", self.name), recorded=recorded)
        return Started(x, start("all_reduce_", x, "sum", self.name), recorded=recorded)

    def _on_shared_memory(self, x: Tensor) -> bool:
        if _torch.has_no_data(x):  # a trace on a real group: no rank is to meet another
            return False
        return carrier_of(by_name(self.name or ""), x.device) is shared_memory

    def recorded(self, op: str, x: Tensor) -> Any:
        """A span in torch's profile, if it is on, named by the group's backend as torch's are."""
        if _torch.profiled() and build.has_fast_path():
            return build.fast.Recorded(f"{self.pg.name()}:{op}", x)
        return None

    def sum_by_group_(self, x: Tensor) -> Started:
        """Like sum_, by the process group: ranks that have joined call that one directly."""
        return Started(x, work=self.pg.allreduce([x]))

    def broadcast_(self, x: Tensor, src: int = 0) -> Tensor:
        """Copy x from a rank of the group to all."""
        if self.name is None:
            self.pg.broadcast([x], src).wait()
            return x
        recorded = self.recorded("broadcast", x) if self._on_shared_memory(x) else None
        return Started(x, start("broadcast_", x, src, self.name), recorded=recorded).wait()
