"""What a plan should know of the runtime that carries it out, beside the prices of a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule

from fcoll.graph.issued import Issued
from fcoll.graph.steps import Step

Steps = tuple[Step, ...]
#: A collective and its bytes -> us, or None: the machine's model says it.
CollectivePrice = Callable[[Issued, float], float | None]


@dataclass(frozen=True)
class Runtime:
    """``us_of`` prices collectives, where groups of one program go different ways. ``amend`` gives
    the steps of a graph as they are there: a start that blocks is compute, memory that belongs to
    the transport is nobody's. All-reduces next to each other that have at most ``merge_bytes`` are
    sent as one by schedulers that do not price buckets."""

    us_of: CollectivePrice | None = None
    amend: Callable[[GraphModule, Steps, tuple[Issued, ...]], Steps] | None = None
    merge_bytes: int = 0
