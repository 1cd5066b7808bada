"""The private torch APIs that ``fcoll.local`` uses. No other file of the package names one.

Tested with torch 2.13.0, 2.14.1 and 2.15.0, which all have these names. Nothing imports DTensor:
``fcoll.local`` can be served in place of torch's module before DTensor binds names from it.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._C import DispatchKey
from torch.distributed.distributed_c10d import ProcessGroup, Work

from fcoll._torch import (
    FakeTensor,
    add_batch_dim,
    begin_vmap,
    end_vmap,
    modes_active,
    remove_batch_dim,
    resolve_process_group,
    storage_id,
)
from fcoll._torch import FakeWork as FakeWork
from fcoll._torch import TorchAsyncCollectiveTensor as AsyncCollectiveTensor
from fcoll._torch import below_autograd as below_autograd
from fcoll._torch import default_group as default_group
from fcoll._torch import is_faking as is_faking
from fcoll._torch import mesh_group_names as mesh_group_names
from fcoll._torch import no_modes as no_modes
from fcoll._torch import unboxed_group as unboxed_group
from fcoll.imports import private, say_what_is_missing

__all__ = [
    "AsyncCollectiveTensor",
    "ConstantIntNode",
    "FakeTensor",
    "ProcessGroup",
    "PythonCallbackWork",
    "ScriptObject",
    "Work",
    "check_p2p_op",
    "constant_bool",
    "correct_aliasing",
    "default_group",
    "disable_dynamo",
    "disabled_torch_function",
    "funcol",
    "resolve_group",
]

PythonCallbackWork = private("torch._C._distributed_c10d", "PythonCallbackWork")
FunctionalTensor = private("torch._subclasses.functional_tensor", "FunctionalTensor")
check_p2p_op = private("torch.distributed.distributed_c10d", "_check_op")
ConstantIntNode = private("torch.fx.experimental._constant_symnode", "ConstantIntNode")
correct_aliasing = private("torch.utils._python_dispatch", "return_and_correct_aliasing")

ScriptObject = torch._C.ScriptObject
disable_dynamo = private("torch", "_disable_dynamo", instead=lambda fn: fn)
# Results keep the type that dispatch gave them, and a call costs 3 us less.
disabled_torch_function = private("torch._C", "_disabled_torch_function_impl")
# LocalIntNode's comparisons return it: what SymBool wraps.
constant_bool = private("torch._C", "_get_constant_bool_symnode")

# all_gather_object has one plain tensor for all ranks, which it gathers into a list until 2.14
# and into one tensor in 2.15.
OBJECTS_IN_ONE_TENSOR = (
    "all_gather_single" in inspect.unwrap(dist.all_gather_object).__code__.co_names
)

# In a dispatch handler all keys above Python are switched off, vmap's too: these bring it back.
_VMAP_KEYS = (
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchVmapMode,
    DispatchKey.FuncTorchDynamicLayerFrontMode,
)


def vmapped(size: int, call: Callable[..., Any]) -> Any:
    """``call(batch, unbatch)`` under one level of vmap over ``size`` rows.

    ``batch(stack)`` is one row's tensor as vmap sees it; ``unbatch(result)`` is the stack again.
    """
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _VMAP_KEYS:
        exclude = exclude.remove(key)
    include = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        level = begin_vmap(size, "error")
        try:
            return call(
                lambda stack: add_batch_dim(stack, 0, level),
                lambda result: remove_batch_dim(result, level, size, 0),
            )
        finally:
            end_vmap()


def has_batching_rule(func: torch._ops.OpOverload) -> bool:
    """Can vmap run the op without a loop of its own (which warns)?"""
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    if not torch._C._dispatch_has_kernel(name):  # aten::size and others that ask a wrapper
        return False
    return kernel(name, "FuncTorchBatched") or kernel(name, "FuncTorchBatchedDecomposition")


def without_dispatch() -> Any:
    """In it, ops on a wrapper subclass act on the wrapper itself."""
    return torch._C._DisableTorchDispatch()


def throw_on_data_ptr(wrapper: Tensor) -> None:
    """A wrapper has no memory: reading its pointer is an error, not a null pointer."""
    torch._C._set_throw_on_mutable_data_ptr(wrapper)


def extra_keys(t: Tensor) -> Any:
    """The dispatch keys of lazy conjugation and negation, which a wrapper must carry as well."""
    keys = torch._C.DispatchKeySet.from_raw_repr(0)
    if t.is_conj():
        keys = keys.add(DispatchKey.Conjugate)
    if t.is_neg():
        keys = keys.add(DispatchKey.Negative)
    return keys


def without_lazy_bits(t: Tensor) -> Tensor:
    """The numbers as they lie in memory, where conjugation or negation is still to be done."""
    return with_lazy_bits(t, t)  # twice is not at all


def with_lazy_bits(t: Tensor, like: Tensor) -> Tensor:
    """Lazily conjugated or negated if ``like`` is."""
    t = torch._conj(t) if like.is_conj() else t
    return torch._neg_view(t) if like.is_neg() else t


def wrapper(cls: type, shape: Any, strides: Any, like: Tensor, **options: Any) -> Any:
    """A tensor of class ``cls`` without memory of its own."""
    if like.is_conj() or like.is_neg():
        options["_extra_dispatch_keys"] = extra_keys(like)
    made = Tensor._make_wrapper_subclass(
        cls,
        shape,
        strides=strides,
        dtype=like.dtype,
        device=like.device,
        layout=like.layout,
        **options,
    )
    throw_on_data_ptr(made)
    return made


def in_a_trace(t: Tensor) -> bool:
    """Is it a tensor that AOT functionalizes?"""
    return isinstance(t, FunctionalTensor)


def is_shared(t: Tensor) -> bool:
    """Is the memory of a tensor seen by other tensors as well?"""
    # the tensor itself and the storage object that is asked for
    return torch._C._storage_Use_Count(storage_id(t)) > 2


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Are they views of one piece of memory?"""
    return storage_id(a) == storage_id(b)


def has_memory(storage: Any) -> bool:
    """Has it memory, unlike that of a wrapper?"""
    try:
        storage.data_ptr()
    except RuntimeError:
        return False
    return True


def resolve_group(group: Any) -> ProcessGroup:
    """The process group that a functional op got: by name, boxed or itself."""
    if isinstance(group, (ProcessGroup, ScriptObject)):
        return unboxed_group(group)
    return resolve_process_group(group)


def boxed(work: Any) -> Any:
    return Work.boxed(work)


def manual_seed(seed: int) -> torch.Generator:
    """torch.manual_seed itself, whatever is patched over it."""
    from torch.random import _manual_seed_impl  # absent where torch.manual_seed is whole

    return _manual_seed_impl(seed)


def group_ranks(group: ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def funcol_group(group: Any, tag: str = "") -> ProcessGroup:
    """The process group of anything that torch's functional collectives take."""
    tag, ranks, size = funcol._expand_group(group, tag)
    return funcol.c10d._find_or_create_pg_by_ranks_and_tag(tag, ranks, size)


def patched_modules() -> dict[str, Any]:
    """The modules and classes in which a mode patches names, by a short name."""
    import torch.distributed.distributed_c10d as c10d
    from torch.distributed.device_mesh import DeviceMesh

    return {"torch": torch, "random": torch.random, "dist": dist, "c10d": c10d, "funcol": funcol,
            "mesh": DeviceMesh, "SymInt": torch.SymInt}  # fmt: skip


def mesh_fibers(mesh: Any) -> Tensor:
    """All sub-meshes of a mesh's kind: [sub-mesh, *mesh shape] of ranks."""
    # a clone: the rank map may be an inference tensor
    return mesh._layout.remap_to_tensor(mesh._rank_map.clone())


def outside_of_modes(t: Tensor) -> AbstractContextManager[Any]:
    """A plain tensor is read as it is, also where new tensors would be fake."""
    plain = type(t) is Tensor and modes_active() > 0
    return no_modes() if plain else nullcontext()


class below_the_mode:
    """In it, the one mode that is active and autograd do not see what is done to plain tensors."""

    def __enter__(self) -> None:
        self.mode, self.autograd = torch._C._pop_torch_dispatch_stack(None), below_autograd()
        self.autograd.__enter__()

    def __exit__(self, *error: object) -> None:
        self.autograd.__exit__(*error)
        torch._C._push_on_torch_dispatch_stack(self.mode)


def one_mode() -> bool:
    """Is there one mode that sees ops, and nobody else?"""
    return modes_active() == 1 and not torch._C._is_torch_function_mode_enabled()


def living_meshes() -> list[Any]:
    from torch.distributed.device_mesh import DeviceMesh

    # by type: isinstance asks objects, and some of torch's warn when asked
    return [o for o in gc.get_objects() if DeviceMesh in type(o).__mro__]


def mesh_dim_index(mesh: Any, dim: str) -> int:
    return mesh._mesh_dim_names.index(dim)


def submesh_of_rank(full_mesh: Tensor, rank: int) -> Tensor:
    """Of [sub-mesh, *mesh shape]: the sub-mesh that has the rank."""
    for mesh in full_mesh.reshape(-1, *full_mesh.shape[1:]):
        if bool((mesh == rank).any()):
            return mesh
    raise RuntimeError(f"rank {rank} is in no mesh of {full_mesh.tolist()}")


def device_handle(device_type: str) -> Any:
    """The module of a device type (torch.cuda)."""
    from torch.distributed.device_mesh import _get_device_handle

    return _get_device_handle(device_type)


def shard_index_and_size(spec: Any, coordinate: list[int]) -> tuple[int, int]:
    """Which shard of a DTensor a rank holds, counted in row-major order, and a shard's numel."""
    from torch.distributed.tensor import _random  # DTensor: loaded, since it calls

    by_dim, numbers = _random._calc_shard_info(coordinate, spec)
    index = _random._calc_shard_linear_idx(by_dim, numbers)
    return index, numel(_random._calc_first_shard_size(spec))


def numel(shape: Any) -> int:
    product = 1
    for size in shape:
        product *= int(size)
    return product


say_what_is_missing(__name__)
