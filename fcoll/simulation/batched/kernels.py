"""Collectives inside a simulation: their ops' kernels for vmap run the rows' ``stacked`` rules.

The kernels are for all of vmap, mapped tensors or not, because a collective of a value that is the
same on all ranks may give each rank another one. In a vmap that is not a simulation's they pass the
call on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fcoll._torch import (
    SingleLevelFunction,
    below_autograd,
    c10d_ops,
    single_level_functions,
    unobserved,
)
from fcoll.eager import dispatch
from fcoll.errors import NoStackedRule, fail
from fcoll.simulation.batched import _torch, in_place
from fcoll.simulation.batched.stage import Stage, active, stage_of
from fcoll.table import stacks
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.plans import prepared
from fcoll.table.row import Collective
from fcoll.table.stacks import Prepared

_lib = torch.library.Library("fcoll_simulation", "DEF")
_taught: set[str] = set()
_WAIT = COLLECTIVES["wait_tensor"]


def teach() -> None:
    """Give every row's ops their kernel; again after rows were added."""
    if COLLECTIVES.keys() <= _taught:
        return
    for row in COLLECTIVES.values():
        if row.name not in _taught:
            for target in (f"fcoll::{row.name}", *row.targets):
                namespace, name = target.split("::")
                _torch.on_vmap(namespace, name, _kernel(row, namespace, name))
    if not _taught:
        for name in c10d_ops():
            _torch.on_vmap("c10d", name, _in_place(name))
        # around results of torch's functional collectives, so that autograd waits for gradients
        # and, from torch 2.15 on, the wait for a list of them
        for wrap in ("_wrap_tensor_autograd", "wait_tensors"):
            _torch.on_vmap("_c10d_functional", wrap, _kernel(_WAIT, "_c10d_functional", wrap))
    _taught.update(COLLECTIVES)


def _kernel(row: Collective, namespace: str, name: str) -> Callable[..., Any]:
    packet: Any = getattr(getattr(torch.ops, namespace), name, None)

    def passed_on(args: Any, kwargs: Any) -> Any:
        with _torch.past_vmap_mode():
            return packet(*args, **kwargs)

    def wait(*args: Any, **kwargs: Any) -> Any:
        stage = stage_of(None)
        if stage is None or _torch.current_level() != _level_of(stage):
            return _torch.on_memory(packet, args[0])
        return args[0]

    at = row.position.get("group_name", -1)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        group = _name(kwargs["group_name"] if at >= len(args) else args[at]) if at >= 0 else None
        stage = stage_of(group)
        if stage is None or _torch.current_level() != (level := _level_of(stage)):
            return passed_on(args, kwargs)
        return run(row, plan(stage, row, group, args, kwargs), stage, level, args, kwargs)

    return wait if row.is_wait else kernel


def _name(group: Any) -> str:
    return group if isinstance(group, str) else group.group_name


def _level_of(stage: Stage) -> int | None:
    """The level of vmap that stands for the ranks: in a graph that is traced again by a compiler,
    the outermost of its size."""
    if stage.level is not None:
        return stage.level
    return next((level for level, size in _torch.vmap_sizes() if size == stage.size), None)


def plan(
    stage: Stage, row: Collective, group: str | None, args: Any, kwargs: dict[str, Any]
) -> Prepared:
    """Of a call that was checked, once for all that look alike: it takes 30 us."""
    x = args[0] if args else None
    if kwargs or not isinstance(x, Tensor) or not stage.knows(group):
        return _checked(stage, row, group, args, kwargs)
    key = row.name, args[1:], x.shape, x.dtype, x.device
    return stage.plans.of(key, lambda: _checked(stage, row, group, args, kwargs))


def _checked(
    stage: Stage, row: Collective, group: str | None, args: Any, kwargs: dict[str, Any]
) -> Prepared:
    if row.stacked is None:
        why = f"the row {row.name!r} has no `stacked` rule"
        hint = "Give it one (fcoll/table has many), or use fcoll.simulate_ranks."
        fail(NoStackedRule, op=row.name, why=why, hint=hint)
    names = [a.name for a in row.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    named["group_name"] = stage.group_name(group)
    out = {"out": named["out"]} if row.has_out else {}
    row.check(*(x for name, x in named.items() if name not in out), **out)
    kept = {a.name: named[a.name] for a in row.arguments if not a.is_tensor and a.name in named}
    first = args[0] if args else None
    dtype = first.dtype if isinstance(first, Tensor) else torch.get_default_dtype()
    return prepared(row, kept, stage.partition(named["group_name"]), dtype)


def run(
    row: Collective, call: Prepared, stage: Stage, level: int, args: Any, kwargs: dict[str, Any]
) -> Any:
    W = stage.size
    with _torch.below():
        first: Any = args[0] if args else None
        xs: Any = None
        if isinstance(first, Tensor):
            xs = _torch.stacked(first, level, W)
        elif row.arguments[0].is_tensor:
            xs = [_torch.stacked(x, level, W) for x in first]
        outs = call(xs)
        if row.mutates:
            return _written(row, kwargs["out"] if row.has_out else first, outs, level)
        if row.on_lists:
            return [_rank_tensor(y, level) for y in outs]
        return _rank_tensor(outs, level)


# -- without the dispatcher, which would be a third of a small collective's time ---


def _on_stacked(row: Collective, args: tuple[Any, ...]) -> Any:
    """A call of fcoll's; NotImplemented if a mode, the profiler, another transform or a compiler is
    to see it."""
    at, x = row.position.get("group_name", -1), args[0]
    if not active or type(x) is not Tensor or is_compiling() or not unobserved():
        return NotImplemented
    stage = active[-1]
    if not 0 <= at < len(args) or not stage.knows(args[at]):
        return NotImplemented
    level = stage.level
    if level is None or level != _torch.level_or_none():
        return NotImplemented
    return run(row, plan(stage, row, args[at], args, {}), stage, level, args, {})


dispatch.on_stacked = _on_stacked


def _rank_tensor(y_W: Tensor, level: int) -> Tensor:
    """A rank's tensor of a stack. What is the same on all ranks and lies in memory once stays so:
    what follows is computed once for all."""
    if y_W.shape[0] > 1 and y_W.stride(0) == 0:
        return y_W[0]
    return _torch.add_rank_dim(y_W, 0, level)


def _written(row: Collective, into: Any, outs: Any, level: int) -> Any:
    """Write the results into the arguments of a form that writes."""
    targets = [into] if isinstance(into, Tensor) else into
    for x, y_W in zip(targets, [outs] if isinstance(outs, Tensor) else outs, strict=True):
        if _torch.is_stacked(x, level):
            _torch.stacked(x, level, y_W.shape[0]).copy_(y_W)
        elif y_W.stride(0) == 0 or y_W.shape[0] == 1:
            x.copy_(y_W[0])
        else:
            why = "its argument is one tensor for all ranks, which cannot hold each rank's result"
            fail(NoStackedRule, op=row.name, why=why, hint=f"Use {row.functional}.")
    return into


def _in_place(name: str) -> Callable[..., Any]:
    packet = getattr(torch.ops.c10d, name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        stage = stage_of(None)
        if stage is None or _torch.current_level() != stage.level:
            with _torch.past_vmap_mode():
                return packet(*args, **kwargs)
        return in_place.run(name, stage.group_name, args, kwargs)

    return kernel


# -- fcoll.identity, which is no row: its gradient is all_reduce ---


class _Identity(SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        with torch.enable_grad(), below_autograd():
            return torch.ops.fcoll_simulation.identity(x, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return dispatch.call("all_reduce", grad, "sum", ctx.group_name, "identity"), None


def _identity(x: Tensor, group_name: str) -> Tensor:
    """Of one level of torch.func.grad."""
    if torch.is_grad_enabled() and x.requires_grad:
        with single_level_functions():
            return _Identity.apply(x, group_name)
    with below_autograd():
        return torch.ops.fcoll_simulation.identity(x, group_name)


def _identity_of_ranks(x: Tensor, group_name: str) -> Tensor:
    stage, level = stage_of(group_name), _torch.current_level()
    if stage is None or level != _level_of(stage):
        with _torch.past_vmap_mode():
            return torch.ops.fcoll_simulation.identity(x, group_name)
    with _torch.below():
        x_W = _torch.stacked(x, level, stage.size)
        y_W = stacks.identity(x_W, {}, stage.partition(group_name))
        return _torch.add_rank_dim(y_W, 0, level)


_lib.define("identity(Tensor x, str group_name) -> Tensor")
_lib.impl("identity", lambda x, group_name: x.clone(), "CompositeExplicitAutograd")
_lib.impl("identity", _identity, "Autograd")
torch.library.register_vmap(
    "fcoll_simulation::identity",
    lambda info, dims, x, group_name: (
        torch.ops.fcoll_simulation.identity(x, group_name),
        dims[0],
    ),
    lib=_lib,
)
_torch.on_vmap("fcoll_simulation", "identity", _identity_of_ranks)


# -- what is another value on each rank ---


def _index_op(name: str, values: Callable[[Stage, str], Sequence[int]]) -> None:
    _lib.define(f"{name}(str group_name) -> Tensor")
    packet = getattr(torch.ops.fcoll_simulation, name)

    def kernel(group_name: str) -> Tensor:
        stage, level = stage_of(group_name), _torch.current_level()
        assert stage is not None
        if level != _level_of(stage):
            with _torch.past_vmap_mode():
                return packet(group_name)
        with _torch.below():
            found = torch.tensor(values(stage, group_name))
            return _torch.add_rank_dim(found, 0, level)

    torch.library.register_fake(
        f"fcoll_simulation::{name}",
        lambda group_name: torch.empty((), dtype=torch.int64),
        lib=_lib,
    )
    _torch.on_vmap("fcoll_simulation", name, kernel)


def _sizes(stage: Stage, name: str) -> list[int]:
    found = [0] * stage.size
    for g in stage.partition(name).groups:
        for r in g:
            found[r] = len(g)
    return found


_index_op("rank", lambda stage, name: stage.partition(name).rank_in_group)
_index_op("size", _sizes)
