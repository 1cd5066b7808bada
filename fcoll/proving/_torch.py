"""Private names of torch that exact arithmetic needs.

Tested with torch 2.13.0, which has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fcoll._torch import FakeTensor as FakeTensor
from fcoll._torch import TorchAsyncCollectiveTensor as AsyncCollectiveTensor
from fcoll._torch import no_modes as no_modes
from fcoll.imports import private, say_what_is_missing
from fcoll.tracing import _torch as tracing
from fcoll.tracing._torch import replaced

TorchDispatchMode = private("torch.utils._python_dispatch", "TorchDispatchMode")
plain_functions = private("torch._C", "DisableTorchFunctionSubclass")
tree_map = private("torch.utils._pytree", "tree_map")
tree_leaves = private("torch.utils._pytree", "tree_leaves")
tree_flatten_with_path = private("torch.utils._pytree", "tree_flatten_with_path")
keystr = private("torch.utils._pytree", "keystr")


def plain(x: Tensor) -> Tensor:
    """The tensor without its class."""
    with plain_functions():
        return x.as_subclass(Tensor)


def decomposition(func: Any) -> Callable[..., Any] | None:
    """torch's own definition of an op by others."""
    table = private("torch._decomp", "decomposition_table")
    return table.get(func)


@cache
def name_of(func: Any) -> tuple[str, str, str]:
    """Namespace, name and overload."""
    namespace, _, name = func._schema.name.partition("::")
    return namespace, name, func._overloadname


@cache
def written_args(func: Any) -> list[tuple[int, str, bool]]:
    """The arguments that it writes: place, name, given by name only."""
    return [
        (i, arg.name, arg.kwarg_only)
        for i, arg in enumerate(func._schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    ]


@cache
def functional(func: Any) -> Any:
    """The op that gives a new tensor where this one writes its first argument: add for add_."""
    namespace, name, overload = name_of(func)
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    overload = overload.removesuffix("_out").removesuffix("out") or "default"
    return getattr(packet, overload, None) or getattr(packet, "default", None)


@contextmanager
def raw() -> Iterator[None]:
    """Inside, tensors are what their storage holds: no mode, no autograd."""
    with no_modes(), torch.no_grad():
        yield


@contextmanager
def as_on_devices() -> Iterator[None]:
    """What torch refuses on CPUs, or does for a process and not for a rank: SyncBatchNorm, whose
    kernels are of GPUs (norm_rules.py has their meaning), and the ops of ``loss_parallel()``, which
    are in force as long as any rank is in it. And ``logcumsumexp``, in plain words."""
    import torch.distributed.tensor.parallel.loss as loss

    inside = [0]
    enable, disable = loss._enable_custom_loss_ops, loss._disable_custom_loss_ops

    def enter() -> None:
        inside[0] += 1
        enable()

    def leave() -> None:
        inside[0] -= 1
        if not inside[0]:
            disable()

    names = {"_enable_custom_loss_ops": enter, "_disable_custom_loss_ops": leave}
    with (
        replaced(loss, names),
        replaced(torch.nn.SyncBatchNorm, {"forward": _sync_batch_norm}),
        replaced(torch, {"logcumsumexp": _logcumsumexp}),
        replaced(Tensor, {"logcumsumexp": _logcumsumexp}),
        replaced(DistributedDataParallel, {"_passing_sync_batchnorm_handle": lambda *_: None}),
    ):
        yield


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """By what it is: torch's gradient takes the least float for the logarithm of 0."""
    return x.exp().cumsum(dim).log()


def _sync_batch_norm(self: Any, x: Tensor) -> Tensor:
    """torch.nn.SyncBatchNorm.forward of 2.13, which asks for a GPU."""
    group = self.process_group or torch.distributed.group.WORLD
    n = torch.distributed.get_world_size(group)
    if not self.training or n == 1:
        return torch.nn.modules.batchnorm._BatchNorm.forward(self, x)
    self._check_input_dim(x)
    factor = 0.0 if self.momentum is None else self.momentum
    if self.track_running_stats:
        self.num_batches_tracked.add_(1)
        factor = 1.0 / int(self.num_batches_tracked) if self.momentum is None else factor
    running = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
    sync = torch.nn.modules._functions.SyncBatchNorm
    return sync.apply(x, self.weight, self.bias, *running, self.eps, factor, group, n)


@contextmanager
def engine_enters(mode: Callable[[], Any]) -> Iterator[None]:
    """Inside, a thread's backward passes run in the mode that it names (None: in none): torch takes
    a mode of functions out while it serves ``backward``."""
    engine = tracing._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        if (entered := mode()) is None:
            return engine(*args, **kwargs)
        with entered:
            return engine(*args, **kwargs)

    with replaced(tracing, {"_engine_run_backward": run}):
        yield


def in_backward() -> bool:
    """Is a node of the autograd graph being run?"""
    return tracing.running_node() is not None


def is_engine(frame: Any) -> bool:
    """Is it the frame below which autograd's engine runs nodes?"""
    return frame.f_code is tracing.ENGINE_CODE


def local_of(x: Tensor) -> Tensor:
    """The part of a DTensor that is here; any other tensor itself."""
    local = getattr(x, "_local_tensor", x)
    if isinstance(local, AsyncCollectiveTensor):
        local = local.trigger_wait()
    return local


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "_local_tensor") and hasattr(x, "placements")


def like_dtensor(local: Tensor, like: Any) -> Tensor:
    """A DTensor of this local part, placed as another."""
    from torch.distributed.tensor import DTensor

    how = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, **how)


_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def plain_name(path: str) -> str:
    """A module's or a parameter's path without what wrappers of modules add to it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def index_of_shard(x: Any) -> Tensor:
    """Which elements of the whole, flattened, a DTensor's local part has. No communication."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    whole = torch.arange(x.numel()).view(x.shape)
    # _StridedShard, of FSDP2 x TP, is no Shard
    kept = [Replicate() if p.is_partial() else p for p in x.placements]
    found = distribute_tensor(whole, x.device_mesh, kept, src_data_rank=None)
    return found._local_tensor


say_what_is_missing(__name__)
