"""Private names of torch that batched ranks need. Tested with torch 2.13.0, 2.14.1 and
2.15.0, which all have these names."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.device_mesh import DeviceMesh

from fcoll._torch import add_batch_dim as add_rank_dim
from fcoll._torch import add_kernel, begin_vmap, end_vmap, remove_batch_dim
from fcoll._torch import mesh_group_names as mesh_group_names
from fcoll._torch import tracing_context as tracing_context
from fcoll.imports import private, private_names, say_what_is_missing
from fcoll.ranks.patches import Patches
from fcoll.source import is_library

TransformType, _unwrap_batched = private_names(
    "torch._C._functorch", "TransformType", "_unwrap_batched"
)
get_interpreter_stack, peek_interpreter_stack = private_names(
    "torch._C._functorch", "get_interpreter_stack", "peek_interpreter_stack"
)
pop_dynamic_layer_stack, push_dynamic_layer_stack = private_names(
    "torch._C._functorch", "pop_dynamic_layer_stack", "push_dynamic_layer_stack"
)
lazy_load_decompositions = functools.cache(
    private("torch._functorch.vmap", "lazy_load_decompositions")
)

# -- levels of vmap ---


def current_level() -> int:
    """The number of the innermost transform that is active, counted from 1."""
    return peek_interpreter_stack().level()


def level_or_none() -> int | None:
    """The same, or None if there is none."""
    top = peek_interpreter_stack()
    return None if top is None else top.level()


def depth() -> int:
    """How many transforms (vmap, grad) are active."""
    return len(get_interpreter_stack() or ())


def vmap_sizes() -> list[tuple[int, int]]:
    """(level, batch size) of the vmaps that are active, the outermost first."""
    stack: list[Any] = get_interpreter_stack() or []
    return [
        (i.level(), torch._C._functorch.CVmapInterpreterPtr(i).batchSize())
        for i in stack
        if i.key() == TransformType.Vmap
    ]


def _keys(*names: str) -> DispatchKeySet:
    found = DispatchKeySet(DispatchKey.FuncTorchVmapMode)
    for name in names:
        found = found | DispatchKeySet(getattr(DispatchKey, name))
    return found


_OF_VMAP = _keys("FuncTorchBatched")
# What vmap and the call of a Python kernel leave out on the way to it.
_LEFT_OUT = _keys(
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchBatched",
    "FuncTorchGradWrapper",
    "AutogradFunctionality",
    "AutogradOther",
    "AutogradNestedTensor",
    "ADInplaceOrView",
    "Functionalize",
    "Conjugate",
    "Negative",
    "ZeroTensor",
)


class below:
    """As the program around this vmap: autograd and outer transforms see what is done inside.

    A class: a generator would take twice its 3 us."""

    def __enter__(self) -> None:
        self.layer = pop_dynamic_layer_stack()
        include = torch._C._dispatch_tls_local_include_set() - _OF_VMAP
        exclude = torch._C._dispatch_tls_local_exclude_set() - _LEFT_OUT
        self.keys = torch._C._ForceDispatchKeyGuard(include, exclude)
        self.keys.__enter__()

    def __exit__(self, *error: object) -> None:
        self.keys.__exit__(*error)
        push_dynamic_layer_stack(self.layer)


def stacked(x: Tensor, level: int, world: int) -> Tensor:
    """The physical tensor [W, ...] of a rank's tensor; what is the same on all ranks, expanded."""
    value, dim = _unwrap_batched(x, level)
    if dim is None:
        return value.expand(world, *value.shape)
    return value.movedim(dim, 0) if dim else value


def is_stacked(x: Tensor, level: int) -> bool:
    """Has each rank a value of its own?"""
    return _unwrap_batched(x, level)[1] is not None


def on_memory(op: Any, given: Any) -> Any:
    """An op that takes tensors and returns them as they are, which vmap has no rule for: called on
    those that mapped ones lie in."""
    level, one = current_level(), isinstance(given, Tensor)
    with below():
        held = [_unwrap_batched(x, level) for x in ([given] if one else given)]
        made = [op(held[0][0])] if one else op([memory for memory, _ in held])
        outs = [
            y if dim is None else add_rank_dim(y, dim, level)
            for y, (_, dim) in zip(made, held, strict=True)
        ]
    return outs[0] if one else outs


def past_vmap_mode() -> Any:
    """Calls go on as if there were no kernel for all of vmap."""
    return torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.FuncTorchVmapMode))


def on_vmap(namespace: str, name: str, kernel: Callable[..., Any]) -> None:
    """Make a function the kernel of an op inside every vmap, whether its tensors are mapped or not;
    nothing if this version of torch has no such op."""
    add_kernel(namespace, name, "FuncTorchVmapMode", kernel)


def mapped(
    fn: Callable[..., list[Tensor]], xs: list[Tensor], dims: list[int], size: int, randomness: str
) -> list[Tensor]:
    """torch.func.vmap of a function of tensors alone, without its search through nested
    arguments: of a small step that takes a tenth of the time."""
    lazy_load_decompositions()
    level = begin_vmap(size, randomness)
    try:
        ranks = [add_rank_dim(x, d % x.dim(), level) for x, d in zip(xs, dims, strict=True)]
        return [remove_batch_dim(y, level, size, 0) for y in fn(*ranks)]
    finally:
        end_vmap()


# -- meshes ---


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The whole mesh that this one is a slice of."""
    return mesh._get_root_mesh()


# -- what asks for the rank, which is another on each ---


class RankQueries:
    """dist.get_rank, pg.rank and the mesh's coordinates, asked by a user's line, are per rank."""

    def __init__(
        self, rank_of: Callable[[Any], Any], saw_mesh: Callable[[DeviceMesh], None]
    ) -> None:
        def local_rank(self: DeviceMesh, mesh_dim: Any = None) -> Any:
            return rank_of(self if mesh_dim is None else (self, mesh_dim))

        def coordinate(self: DeviceMesh) -> Any:
            return [rank_of((self, i)) for i in range(self.ndim)]

        def seen(made: Callable[..., None]) -> Callable[..., None]:
            def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
                made(self, *args, **kwargs)
                saw_mesh(self)

            return init

        def for_users(ask: Callable[..., Any]) -> Callable[..., Any]:
            return lambda original: _for_users(ask, original)

        self.changes: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (dist, "get_rank", for_users(lambda group=None: rank_of(group))),
            (DeviceMesh, "get_rank", for_users(lambda self: rank_of(None))),
            (DeviceMesh, "get_local_rank", for_users(local_rank)),
            (DeviceMesh, "get_coordinate", for_users(coordinate)),
            (dist.ProcessGroup, "rank", for_users(rank_of)),
            (DeviceMesh, "__init__", seen),
        )
        # what was there when they were last made -> what it becomes
        self._kept: tuple[list[Any], list[tuple[Any, str, Any]]] = [], []

    def apply(self, patches: Patches) -> None:
        there = [vars(owner)[name] for owner, name, _ in self.changes]
        if there != self._kept[0]:  # else kept: to make them takes as long as a small collective
            made = [(owner, name, make(getattr(owner, name))) for owner, name, make in self.changes]
            self._kept = there, made
        patches.apply(self._kept[1])


def _for_users(ask: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own code, which makes groups and meshes, goes on as rank 0."""

    def method(*args: Any, **kwargs: Any) -> Any:
        if is_library(sys._getframe(1).f_code.co_filename):
            return original(*args, **kwargs)
        return ask(*args, **kwargs)

    return method


say_what_is_missing(__name__)
