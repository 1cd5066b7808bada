"""Private names of torch that batched ranks need. Tested with torch 2.13.0."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._C._functorch import (
    CInterpreter,
    TransformType,
    _add_batch_dim,
    _unwrap_batched,
    get_interpreter_stack,
)
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.distributed.device_mesh import DeviceMesh

from fcoll.source import is_library
from fcoll.tracing._torch import fake_group, fresh_world, mesh_of_groups

# -- levels of vmap ---

current_level = retrieve_current_functorch_interpreter
add_rank_dim = _add_batch_dim


def depth() -> int:
    """How many transforms (vmap, grad) are active."""
    return len(get_interpreter_stack() or ())


def vmap_sizes() -> list[tuple[int, int]]:
    """(level, batch size) of the vmaps that are active, the outermost first."""
    stack: list[CInterpreter] = get_interpreter_stack() or []
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


@contextmanager
def below(level: Any) -> Iterator[None]:
    """As the program around this vmap: autograd and outer transforms see what is done inside."""
    with level.lower():
        include = torch._C._dispatch_tls_local_include_set() - _OF_VMAP
        exclude = torch._C._dispatch_tls_local_exclude_set() - _LEFT_OUT
        with torch._C._ForceDispatchKeyGuard(include, exclude):
            yield


def stacked(x: Tensor, level: int, world: int) -> Tensor:
    """The physical tensor [W, ...] of a rank's tensor; what is the same on all ranks, expanded."""
    value, dim = _unwrap_batched(x, level)
    return value.expand(world, *value.shape) if dim is None else value.movedim(dim, 0)


def is_stacked(x: Tensor, level: int) -> bool:
    """Has each rank a value of its own?"""
    return _unwrap_batched(x, level)[1] is not None


def past_vmap_mode() -> Any:
    """Calls go on as if there were no kernel for all of vmap."""
    return torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.FuncTorchVmapMode))


_libraries: dict[str, torch.library.Library] = {}


def on_vmap(namespace: str, name: str, kernel: Callable[..., Any]) -> None:
    """Make a function the kernel of an op inside every vmap, whether its tensors are mapped or not;
    nothing if this version of torch has no such op."""
    if not hasattr(getattr(torch.ops, namespace), name):
        return
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    _libraries[namespace].impl(name, kernel, "FuncTorchVmapMode")


def c10d_ops() -> list[str]:
    """The names of the ops behind torch.distributed's own functions."""
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("c10d::")}
    return sorted(name.removeprefix("c10d::") for name in names)


def tracing_context() -> Any:
    """What Dynamo is tracing, None if it is not."""
    guards = sys.modules.get("torch._guards")
    return guards.TracingContext.try_get() if guards is not None else None


# -- the world that a simulated program sees ---

_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg")


class World:
    """torch.distributed as rank 0 of a mesh of fake groups; made once, entered many times."""

    def __init__(self, names: dict[str, str], axes: dict[str, int], device: str) -> None:
        self.group_names, self.axes, self.device = names, axes, device
        self.mesh: DeviceMesh | None = None
        self.state: dict[str, Any] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        with fresh_world():
            if self.mesh is None:
                self.mesh = self._made()
                self.state = {t: getattr(c10d, t) for t in (*_TABLES, "_pg_to_tag")}
                self.default, self.count = c10d._world.default_pg, c10d._group_count
                self.names = dict(c10d._pg_names)
            else:
                vars(c10d).update(self.state, _group_count=self.count)
                c10d._update_default_pg(self.default)
                for pg, name in self.names.items():
                    c10d._register_process_group(name, pg)
            yield

    def _made(self) -> DeviceMesh:
        shape = tuple(self.axes.values())
        ranks = torch.arange(_product(shape), device="cpu").view(shape)
        everyone = fake_group(range(ranks.numel()), 0, self.group_names["world"], "default_pg")
        groups = []
        for i, axis in enumerate(self.axes):
            mine = ranks[tuple(slice(None) if j == i else 0 for j in range(len(shape)))].tolist()
            whole = len(mine) == ranks.numel()
            groups.append(
                everyone if whole else fake_group(mine, 0, self.group_names[axis], f"mesh_{axis}")
            )
        return mesh_of_groups(ranks, tuple(self.axes), groups, self.device)


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for n in sizes:
        total *= n
    return total


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The whole mesh that this one is a slice of."""
    return mesh._get_root_mesh()


def mesh_group_names(mesh: DeviceMesh) -> list[str]:
    return list(getattr(mesh, "_dim_group_names", ()))


# -- what asks for the rank, which is another on each ---


@contextmanager
def patched(
    rank_of: Callable[[Any], Any], saw_mesh: Callable[[DeviceMesh], None]
) -> Iterator[None]:
    """dist.get_rank, pg.rank and the mesh's coordinates, asked by a user's line, are per rank."""
    made = DeviceMesh.__init__

    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        saw_mesh(self)

    def local_rank(self: DeviceMesh, mesh_dim: Any = None) -> Any:
        if mesh_dim is None:
            return rank_of(self)
        return rank_of((self, mesh_dim))

    def coordinate(self: DeviceMesh) -> Any:
        return [rank_of((self, i)) for i in range(self.ndim)]

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (dist, "get_rank", lambda group=None: rank_of(group)),
        (DeviceMesh, "get_rank", lambda self: rank_of(None)),
        (DeviceMesh, "get_local_rank", local_rank),
        (DeviceMesh, "get_coordinate", coordinate),
        (dist.ProcessGroup, "rank", lambda self: rank_of(self)),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    for owner, name, ask in changes:
        setattr(owner, name, _for_users(ask, getattr(owner, name)))
    DeviceMesh.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMesh.__init__ = made  # type: ignore[method-assign]
        for owner, name, old in before:
            setattr(owner, name, old)


def _for_users(ask: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own code, which makes groups and meshes, goes on as rank 0."""

    def method(*args: Any, **kwargs: Any) -> Any:
        if is_library(sys._getframe(1).f_code.co_filename):
            return original(*args, **kwargs)
        return ask(*args, **kwargs)

    return method
