"""The private torch APIs of sharded tensors. No other file of this folder names one.

Tested with torch 2.13.0, 2.14.1 and 2.15.0, which all have these names. The types
are plain data that torch's checkpoints are made of: ours are the same, so that a checkpoint written
by one is read by the other.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed._shard import sharded_tensor as _sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata as ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata as ShardedTensorMetadata,
)
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as Shard
from torch.distributed._shard.sharder import Sharder as Sharder
from torch.distributed._shard.sharding_plan import ShardingPlan as ShardingPlan
from torch.distributed._shard.sharding_plan import ShardingPlanner as ShardingPlanner
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as ChunkShardingSpec
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec as EnumerableShardingSpec
from torch.distributed._shard.sharding_spec import ShardingSpec as ShardingSpec
from torch.distributed.remote_device import _remote_device as RemoteDevice

from fcoll._torch import default_group as default_group
from fcoll.imports import private, say_what_is_missing
from fcoll.ranks.patches import Patches

__all__ = ["RemoteDevice"]

_compute_local_shape_and_global_offset = private(
    "torch.distributed.tensor._utils", "_compute_local_shape_and_global_offset"
)
F = TypeVar("F", bound=Callable)

#: What unpickles a tensor of a subclass: (func, its type, args, its state) -> the tensor.
rebuild_of_type = private("torch._tensor", "_rebuild_from_type_v2")

#: torch's own class, also while serve_torch gives its name to ours
TheirShardedTensor = _sharded_tensor.ShardedTensor

#: what nn.Module.to asks before it overwrites a parameter through .data
SHALLOW_COPY_CHECKS = (private("torch", "_has_compatible_shallow_copy_type"),)


def as_plain_tensors() -> AbstractContextManager[None]:
    """Inside, a tensor subclass' own __torch_function__ is not called."""
    return torch._C.DisableTorchFunctionSubclass()


#: The module of Dynamo that ``not_compiled`` is to be called for as soon as it is imported.
DECIDES_WHAT_IS_COMPILED = "torch._dynamo.trace_rules"


def not_compiled(modules: Sequence[str]) -> None:
    """Dynamo calls the functions of these modules as they are."""
    for name in modules:
        sys.modules[DECIDES_WHAT_IS_COMPILED].add(name)


def uncompiled(fn: F) -> F:
    """The function, and all that it calls, run as they are also where a compiled program calls it.

    It is torch.compiler.disable, which imports Dynamo, from when Dynamo is there.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if DECIDES_WHAT_IS_COMPILED not in sys.modules:
            return fn(*args, **kwargs)
        return _disabled(fn)(*args, **kwargs)

    return call  # type: ignore[return-value]


@functools.cache
def _disabled(fn: Any) -> Any:
    return torch.compiler.disable(fn)


def check_in_graph(condition: torch.Tensor, message: str) -> None:
    """Raise, where the traced graph is run, unless the condition holds there."""
    torch._assert_async(condition, message)  # type: ignore[call-overload]


def wrapper(cls: type, size: torch.Size, **properties: Any) -> Any:
    """A tensor of this class and size that has no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, size, **properties)  # type: ignore[attr-defined]


def is_member(pg: Any) -> bool:
    """Is this rank in the group? new_group gives the others a stand-in."""
    return not dist.distributed_c10d._rank_not_in_group(pg)


def block_of(size: Sequence[int], mesh: Any, coordinate: Any, placements: Any) -> tuple[Any, Any]:
    """The offsets and the lengths of what a rank of a DTensor's mesh holds."""
    lengths, offsets = _compute_local_shape_and_global_offset(
        size, mesh.shape, coordinate, placements
    )
    return offsets, lengths


def pickled_types() -> list[Any]:
    """The types of torch that a pickled sharded tensor consists of."""
    properties = sys.modules[TensorProperties.__module__]
    specs = ChunkShardingSpec, EnumerableShardingSpec
    metadata = Shard, ShardMetadata, ShardedTensorMetadata, TensorProperties, RemoteDevice
    return [*specs, *metadata, properties.MEM_FORMAT_ENCODING]


def file_prefix(name: str) -> Any:
    """How the files of a rank are called: what torch's FileSystemWriter takes of a plan."""
    from torch.distributed.checkpoint import filesystem  # takes a while

    return filesystem._StoragePrefix(name)


def data_files(metadata: Any) -> set[str]:
    """The files that a checkpoint's metadata names."""
    return {info.relative_path for info in metadata.storage_data.values()}


def rank_of_worker(name: str) -> int | None:
    """The rank of RPC's worker of this name; None if RPC runs and has no such worker."""
    if not rpc._is_current_rpc_agent_set():
        raise LookupError(name)
    workers = rpc._get_current_rpc_agent().get_worker_infos()
    return next((worker.id for worker in workers if worker.name == name), None)


def rpc_rank() -> int | None:
    """This process' rank among RPC's workers; None where RPC does not run."""
    return rpc.get_worker_info().id if rpc._is_current_rpc_agent_set() else None


def gathered_by_rpc(value: Any) -> dict[int, Any]:
    """The value of each of RPC's workers, by rank."""
    ranks = {worker.name: worker.id for worker in rpc._get_current_rpc_agent().get_worker_infos()}
    return {ranks[name]: theirs for name, theirs in rpc.api._all_gather(value).items()}


def rpc_reference(value: Any) -> Any:
    """RPC's reference to a value of this rank."""
    return rpc.RRef(value)


def replace_everywhere(ours: dict[tuple[str, str], Any]) -> Patches:
    """Put ours in the place of the names (module, name) of torch, also where other modules of
    torch have imported them."""
    by_id = {}
    for (path, name), new in ours.items():
        by_id[id(getattr(importlib.import_module(path), name))] = new
    patches = Patches("fcoll.sharded.serve_torch")
    for path, module in list(sys.modules.items()):
        if not path.startswith("torch.") or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                patches.replace(module, name, by_id[id(value)])
    return patches


say_what_is_missing(__name__)
