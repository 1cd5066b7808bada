"""The private torch APIs of gradient buckets. No other file of this folder names one.

Tested with torch 2.13.0. Each name says what it is needed for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def at_end_of_backward(fn: Callable[[], None]) -> None:
    """Call fn when the backward pass that is running has computed all its gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)  # type: ignore[attr-defined]


def group_name_of(pg: dist.ProcessGroup) -> str | None:
    """The name by which torch knows a group; None for one that was made by hand."""
    try:
        name = pg.group_name
        known = dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, AttributeError):
        return None
    return name if known == pg else None


def replace(name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(torch's own)`` in the place of a name of torch.distributed."""
    setattr(dist, name, make(getattr(dist, name)))


def copy_into(to: list[Tensor], tensors: list[Tensor]) -> None:
    """``a.copy_(b)`` of each pair, in one call."""
    torch._foreach_copy_(to, tensors)


def scale_(tensors: list[Tensor], factor: float) -> None:
    """``a.mul_(factor)`` of each, in one call."""
    torch._foreach_mul_(tensors, factor)


Future = torch._C.Future  # what hooks return: torch.futures.Future is a subclass of it


def plain(x: Tensor) -> Tensor:
    """The tensor itself, complete, if it is a collective's result."""
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


def is_fake(x: Tensor) -> bool:
    """Has it no data?"""
    return x.is_meta or isinstance(x, torch._subclasses.FakeTensor)


def backward_pass() -> int:
    """A number of the backward pass that is running."""
    return torch._C._current_graph_task_id()
