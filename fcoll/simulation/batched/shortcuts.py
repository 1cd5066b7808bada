"""torch's functional collectives inside a simulation, straight to the rows' ``stacked`` rules.

Of a small collective's time, the dispatcher and torch's Python around its op were a third. What
somebody else wants to see (modes, the profiler, an inner transform, a compiler) goes torch's way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh

from fcoll._torch import unobserved
from fcoll.simulation.batched import _torch, kernels
from fcoll.simulation.batched import stage as stage_module
from fcoll.simulation.batched.stage import Stage, active
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective

Fn = Callable[..., Any]


def _here(x: Any) -> Stage | None:
    """The stage whose ranks make this call, if nobody else wants to see it."""
    if is_compiling() or type(x) is not Tensor or not active or not unobserved():
        return None
    stage = active[-1]
    return stage if _torch.level_or_none() == stage.level else None


def _name(stage: Stage, group: Any) -> str | None:
    """The name of a mesh's group, or of one; None for what torch must look at."""
    if type(group) is tuple and len(group) == 2 and type(group[1]) is int:
        mesh, dim = group
        if isinstance(mesh, DeviceMesh):
            names = _torch.mesh_group_names(mesh)
            group = names[dim] if -len(names) <= dim < len(names) else None
    elif isinstance(group, DeviceMesh) and group.ndim == 1:
        group = _torch.mesh_group_names(group)[0]
    if type(group) is str and stage.knows(group) and stage.partition(group).is_even:
        return group
    return None


def _run(stage: Stage, row: Collective, group: str, *args: Any) -> Any:
    level = stage.level
    assert level is not None
    return kernels.run(row, kernels.prepared(stage, row, group, args, {}), level, args, {})


def of_fcoll(row: Collective, args: tuple[Any, ...]) -> Any:
    """The short way of fcoll's own functions; NotImplemented if it must not be taken."""
    at = row.position.get("group_name", -1)
    if not 0 <= at < len(args) or (stage := _here(args[0])) is None or not stage.knows(args[at]):
        return NotImplemented
    return _run(stage, row, args[at], *args)


stage_module.short_of_fcolls.append(of_fcoll)


def _all_reduce(torchs: Fn) -> Fn:
    row = COLLECTIVES["all_reduce"]

    @functools.wraps(torchs)
    def all_reduce(self: Tensor, reduceOp: str, group: Any, tag: str = "") -> Any:
        if (stage := _here(self)) and (name := _name(stage, group)) and type(reduceOp) is str:
            return _run(stage, row, name, self, reduceOp.lower(), name)
        return torchs(self, reduceOp, group, tag)

    return all_reduce


def _broadcast(torchs: Fn) -> Fn:
    row = COLLECTIVES["broadcast"]

    @functools.wraps(torchs)
    def broadcast(self: Tensor, src: int, group: Any, tag: str = "") -> Any:
        if (stage := _here(self)) and (name := _name(stage, group)) and type(src) is int:
            return _run(stage, row, name, self, src, name)
        return torchs(self, src, group, tag)

    return broadcast


def _all_gather(torchs: Fn) -> Fn:
    row = COLLECTIVES["all_gather_into_tensor"]

    @functools.wraps(torchs)
    def all_gather_single(self: Tensor, gather_dim: int, group: Any, tag: str = "") -> Any:
        if gather_dim == 0 and (stage := _here(self)) and (name := _name(stage, group)):
            return _run(stage, row, name, self, stage.partition(name).n, name)
        return torchs(self, gather_dim, group, tag)

    return all_gather_single


def _reduce_scatter(torchs: Fn) -> Fn:
    row = COLLECTIVES["reduce_scatter_tensor"]

    @functools.wraps(torchs)
    def reduce_scatter_single(
        self: Tensor,
        reduceOp: str,
        scatter_dim: int,
        group: Any,
        tag: str = "",
    ) -> Any:
        if scatter_dim == 0 and (stage := _here(self)) and (name := _name(stage, group)):
            n = stage.partition(name).n
            if self.dim() and self.shape[0] % n == 0 and type(reduceOp) is str:
                return _run(stage, row, name, self, reduceOp.lower(), n, name)
        return torchs(self, reduceOp, scatter_dim, group, tag)

    return reduce_scatter_single


def _wait(torchs: Fn) -> Fn:
    @functools.wraps(torchs)
    def wait_tensor(tensor: Tensor) -> Any:
        return tensor if _here(tensor) else torchs(tensor)

    return wait_tensor


stage_module.short.update(
    all_reduce=_all_reduce,
    broadcast=_broadcast,
    all_gather_single=_all_gather,
    reduce_scatter_single=_reduce_scatter,
    wait_tensor=_wait,
)
