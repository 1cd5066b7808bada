"""The private torch APIs of gradient buckets. No other file of this folder names one.

Tested with torch 2.13.0, 2.14.1 and 2.15.0, which all have these names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll._torch import Future as Future
from fcoll._torch import at_end_of_backward as at_end_of_backward
from fcoll._torch import backward_pass as backward_pass
from fcoll._torch import completed as completed
from fcoll._torch import has_no_data as has_no_data
from fcoll._torch import is_fake_group as is_fake_group
from fcoll._torch import modes_active, resolve_process_group, storage_id, work_registry_size
from fcoll._torch import profiled as profiled
from fcoll.imports import say_what_is_missing
from fcoll.ranks.patches import Patches, patched


def group_name_of(pg: dist.ProcessGroup) -> str | None:
    """The name by which torch knows a group; None for one that was made by hand."""
    try:
        name = pg.group_name
        registered = resolve_process_group(name)
    except (RuntimeError, AttributeError):
        return None
    return name if registered == pg else None


def make_reducer(ddp: Any) -> None:
    """Give torch's DistributedDataParallel a reducer for the parameters that it has now."""
    params, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(params)
    ddp._ddp_init_helper(params, sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in what a module returned, as DistributedDataParallel finds them."""
    return list(torch.nn.parallel.distributed._find_tensors(output))


def replace(name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(torch's own)`` in the place of a name of torch.distributed."""
    Patches("fcoll.Reducer").wrap(dist, name, make)


def copy_into(to: list[Tensor], tensors: list[Tensor]) -> None:
    """``a.copy_(b)`` of each pair, in one call."""
    if to and has_no_data(to[0]):  # in a trace each is a node of its own
        for x, y in zip(to, tensors, strict=True):
            x.copy_(y)
        return
    torch._foreach_copy_(to, tensors)


def scale_(tensors: list[Tensor], factor: float) -> None:
    """``a.mul_(factor)`` of each, in one call."""
    if tensors and has_no_data(tensors[0]):
        for x in tensors:
            x.mul_(factor)
        return
    torch._foreach_mul_(tensors, factor)


def note_this_thread() -> None:
    """Have torch keep what is under way for this thread by itself. Before it has, a collective that
    starts in a hook belongs to the thread that made the hook's node, and the wait for it, after the
    backward pass, does not find it."""
    work_registry_size()


def shown_in_profiles(name: str) -> Any:
    """Inside, torch's profiler shows a span of this name, as torch's reducer has it show its."""
    return torch.profiler.record_function(name) if profiled() else nullcontext()


def nobody_watches() -> bool:
    """Is no mode active that wants to see every operation?"""
    return modes_active() == 0


def replaced_in_dist(names: dict[str, Any]) -> AbstractContextManager[None]:
    """Inside, torch.distributed has these instead of its own."""
    return patched("fcoll.Reducer", dist, names)


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Do they begin at the same place?"""
    if x is y or has_no_data(x) or has_no_data(y):
        return x is y or storage_id(x) == storage_id(y)
    return x.data_ptr() == y.data_ptr() != 0


class _Handle:
    """A fake group's work, whose future has the tensor that a real one's would have."""

    def __init__(self, work: Any, x: Tensor) -> None:
        self.work, self.x = work, x

    def wait(self, *args: Any) -> Any:
        return self.work.wait(*args)

    def get_future(self) -> Any:
        self.work.wait()
        future: Any = torch.futures.Future()
        future.set_result([self.x])
        return future


def futures_with_tensors() -> Any:
    """Inside, futures of dist.all_reduce have results on fake groups too: comm hooks read them."""
    theirs = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = theirs(tensor, *args, **kwargs)
        return None if work is None else _Handle(work, tensor)

    return replaced_in_dist({"all_reduce": all_reduce})


say_what_is_missing(__name__)
