"""Private names of torch, and of Python's warnings, that simulated ranks need.

Tested with torch 2.13.0, 2.14.1 and 2.15.0, which all have these names.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.c10d_logger as _logger
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d

from fcoll._torch import Future as Future
from fcoll._torch import (
    TorchAsyncCollectiveTensor,
    backward_pass,
    dispatch_modes,
    function_modes_active,
    modes_active,
    no_modes,
    work_registry_size,
)
from fcoll._torch import at_end_of_backward as after_backward
from fcoll._torch import completed as completed
from fcoll._torch import find_group as find_group
from fcoll._torch import has_no_data as has_no_data
from fcoll._torch import is_faking as is_faking
from fcoll.imports import private, say_what_is_missing

__all__ = ["after_backward"]

tree_map_only = private("torch.utils._pytree", "tree_map_only")

c10d_logger = _logger

# The C++ registries of groups and of outstanding work, by thread
isolate_threads = private("torch._C._distributed_c10d", "_set_thread_isolation_mode")
unregister_all_groups = private(c10d.__name__, "_unregister_all_process_groups")
set_global_rank = private("torch._C._distributed_c10d", "_set_global_rank")
register_in_world = private(c10d.__name__, "_register_pg_in_world")
BackendConfig = c10d.BackendConfig
DEFAULT_TIMEOUT = c10d.default_pg_timeout
PYTHON_WORLD = private(c10d.__name__, "_World")

#: The code of init_process_group itself, inside its decorators
INIT_CODE = inspect.unwrap(c10d.init_process_group).__code__


def _backends(backend: Any) -> set[str]:
    """Those of the devices in "cpu:gloo,cuda:nccl"."""
    return set(BackendConfig(dist.Backend(backend)).get_device_backend_map().values())


def is_fake(backend: Any) -> bool:
    return _backends(backend) == {dist.Backend.FAKE}


def registered_backends(backend: Any) -> list[str]:
    """Those that are no part of torch, which registers its own from 2.15 on."""
    plugins = {name: dist.Backend._plugins.get(name.upper()) for name in _backends(backend)}
    others = [name for name, plugin in plugins.items() if plugin and not _is_torchs(plugin)]
    return sorted(others)


def _is_torchs(plugin: Any) -> bool:
    return str(getattr(plugin.creator_fn, "__module__", "")).partition(".")[0] == "torch"


def forget_seen_warnings() -> None:
    """After the filters have been replaced: Python keeps what it made of the old ones."""
    warnings._filters_mutated()  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Does this thread run a backward?"""
    return backward_pass() != -1


def backward_is_over() -> bool:
    """Is it a callback at the end of a backward that runs in this thread: no node of it does?"""
    return in_backward() and torch._C._current_autograd_node() is None


def unseen() -> AbstractContextManager[Any]:
    """Whatever modes this thread is in, they do not see what is done inside."""
    return _NOBODY_LOOKS if modes_active() + function_modes_active() == 0 else _no_modes_at_all()


_NOBODY_LOOKS: AbstractContextManager[None] = nullcontext()


@contextmanager
def _no_modes_at_all() -> Iterator[None]:
    with no_modes(), torch._C.DisableTorchFunction():
        yield


def forget_work(tensors: Iterable[torch.Tensor]) -> None:
    """Take the work on these tensors out of the thread's C++ registry, which would keep it until
    the process ends. It must not block any more."""
    for x in tensors:
        if work_registry_size() == 0:
            return
        with torch.no_grad(), unseen():
            torch.ops._c10d_functional.wait_tensor(x.detach())


def waited_for(results: Any) -> Any:
    """What a rank returns, complete."""
    return tree_map_only(TorchAsyncCollectiveTensor, lambda x: x.wait(), results)


#: Modules that have torch.distributed's names as their own
_HOLDERS = (c10d, dist, device_mesh)


def holders(name: str) -> list[Any]:
    """The modules that have this function of torch.distributed under its own name."""
    original = getattr(c10d, name)
    return [module for module in _HOLDERS if getattr(module, name, None) is original]


def caller_is(code: Any, depth: int) -> bool:
    return sys._getframe(depth + 1).f_code is code


def is_imported(frame: FrameType | None) -> bool:
    """Is it a module's own code, or that of a class in it, that runs because it is imported?"""
    while frame is not None and not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
    return False


def traced_twin(name: str, rank: int, size: int) -> dist.ProcessGroup:
    """A group of this name, which is not registered, whose calls are ops that a trace sees."""
    from torch._C._distributed_c10d import FakeProcessGroup

    twin = dist.ProcessGroup(dist.HashStore(), rank, size)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    twin._set_default_backend(custom)
    backend = FakeProcessGroup._create_internal(rank, size)
    twin._register_backend(torch.device("cpu"), custom, backend)
    twin._set_group_name(name)
    return twin


# Functions of torch's (Join) that start a collective for its peers' sake and wait for none
_NEVER_WAIT = ("_check_global_requires_backward_grad_sync", "notify_join_context")


def left_by_torch() -> bool:
    """Is it torch itself that will not wait for what is being issued?"""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_code.co_name in _NEVER_WAIT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_traced() -> bool:
    """Does a trace (fcoll/tracing) see the ops that this thread calls?"""
    return any(getattr(mode, "traces_calls", False) for mode in dispatch_modes())


say_what_is_missing(__name__)
