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
from fcoll.eager import dispatch
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


stage_module.queries.changes += ((dispatch, "call_on_stacked", lambda original: of_fcoll),)


def _short(row_name: str, *takes: str) -> Callable[[Fn], Fn]:
    """What makes the short way of a function of torch's: of a row, whose arguments of these names
    it takes in this order, the group last."""
    row = COLLECTIVES[row_name]
    wanted = [a.name for a in row.arguments if a.name in (*takes, "group_size") and a.name != "dim"]
    at_op, at_dim = (takes.index(n) if n in takes else 0 for n in ("reduce_op", "dim"))

    def make(torchs: Fn) -> Fn:
        @functools.wraps(torchs)
        def call(*args: Any, **kwargs: Any) -> Any:
            stage = _here(args[0]) if len(args) == len(takes) and not kwargs else None
            name = _name(stage, args[-1]) if stage else None
            other_dim = at_dim and args[at_dim] != 0
            if name is None or other_dim or (at_op and type(args[at_op]) is not str):
                return torchs(*args, **kwargs)
            assert stage is not None
            given = dict(zip(takes, args, strict=True))
            given |= {"group_name": name, "group_size": stage.partition(name).n}
            if at_op:
                given["reduce_op"] = args[at_op].lower()
            return _run(stage, row, name, *[given[n] for n in wanted])

        return call

    return make


def _wait(torchs: Fn) -> Fn:
    @functools.wraps(torchs)
    def wait_tensor(tensor: Tensor) -> Any:
        return tensor if _here(tensor) else torchs(tensor)

    return wait_tensor


stage_module.short.update(
    all_reduce=_short("all_reduce", "input", "reduce_op", "group_name"),
    broadcast=_short("broadcast", "input", "src", "group_name"),
    all_gather_single=_short("all_gather_into_tensor", "input", "dim", "group_name"),
    reduce_scatter_single=_short(
        "reduce_scatter_tensor", "input", "reduce_op", "dim", "group_name"
    ),
    wait_tensor=_wait,
)
