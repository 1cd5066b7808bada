"""All tensors that a program holds, replaced by fake ones while it is traced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fcoll.source import is_library
from fcoll.tracing import _torch
from fcoll.tracing.pipelines import is_of_pipeline

_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype)
_LIMIT = 200_000  # objects looked at, for programs that hold a large data set


@dataclass
class Found:
    """The modules, optimizers and tensors that a program can reach."""

    modules: dict[torch.nn.Module, str] = field(default_factory=dict)  # their paths
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    tensors: dict[int, tuple[Tensor, str]] = field(default_factory=dict)  # by id, and their names
    places: list[tuple[Any, Any, Tensor]] = field(default_factory=list)  # (who holds it, as what)
    pipelines: list[Any] = field(default_factory=list)  # schedules, stages and their parts


def reachable(*roots: Any) -> Found:
    """What the roots hold: through closures, attributes, containers and globals by name."""
    found = Found()
    seen: set[int] = set()
    todo: list[tuple[Any, Any, Any]] = [(None, None, root) for root in reversed(roots)]
    while todo and len(seen) < _LIMIT:
        holder, key, x = todo.pop()
        if isinstance(x, Tensor):
            _add_tensor(found, holder, key, x, str(key))
            continue
        if id(x) in seen or isinstance(x, _ATOMS):
            continue
        seen.add(id(x))
        if isinstance(x, torch.nn.Module):
            _add_module(found, x)
        elif isinstance(x, torch.optim.Optimizer):
            found.optimizers.append(x)
        elif is_of_pipeline(x):
            found.pipelines.append(x)
        todo.extend(_held_by(x))
    return found


def _add_tensor(found: Found, holder: Any, key: Any, x: Tensor, name: str) -> None:
    for shard in getattr(x, "_local_shards", ()):  # a sharded tensor is what its shards are
        _add_tensor(found, _Fields(shard), "tensor", shard.tensor, name)
    if "." in name or id(x) not in found.tensors:  # a path says more than a list's index
        found.tensors[id(x)] = (x, name)
    if holder is not None:
        found.places.append((holder, key, x))


def _add_module(found: Found, module: torch.nn.Module) -> None:
    """The module and all inside; a module found inside another keeps the path from the outer."""
    for path, child in module.named_modules():
        if child in found.modules:
            continue
        found.modules[child] = path
        for held in (child._parameters, child._buffers):
            for key, x in held.items():
                if x is not None:
                    _add_tensor(found, held, key, x, _parameter_path(path, key))


def _parameter_path(path: str, key: str) -> str:
    """A parametrized one by the name it has for the module: "wq.weight"."""
    return ".".join(filter(None, [path.replace("parametrizations.", ""), key])).removesuffix(
        ".original"
    )


def _held_by(x: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(holder, key, value) of what x holds; no holder where the value cannot be replaced."""
    if isinstance(x, functools.partial):
        yield from ((None, None, y) for y in (x.func, *x.args))
        yield x.keywords, "", x.keywords
    elif isinstance(x, MethodType):
        yield from ((None, None, y) for y in (x.__self__, x.__func__))
    elif isinstance(x, FunctionType):
        yield from _held_by_function(x)
    elif isinstance(x, dict):
        yield from ((x, k, v) for k, v in list(x.items()))
    elif isinstance(x, list):
        yield from ((x, i, v) for i, v in enumerate(x))
    elif isinstance(x, (tuple, set, frozenset)):
        yield from ((None, "", v) for v in x)
    elif isinstance(x, torch.nn.Module):
        yield from ((vars(x), k, v) for k, v in list(vars(x).items()) if k not in _OF_MODULE)
        yield from ((None, None, child) for child in x.children())
    elif isinstance(x, torch.optim.Optimizer):
        yield from ((None, None, y) for y in (x.param_groups, dict(x.state)))
    elif hasattr(x, "__dict__") and (is_of_pipeline(x) or not is_library(_file_of(type(x)))):
        yield from ((vars(x), k, v) for k, v in list(vars(x).items()))
        if callable(x):
            yield None, None, type(x).__call__


def _held_by_function(fn: FunctionType) -> Iterator[tuple[Any, Any, Any]]:
    if is_library(fn.__code__.co_filename):
        return
    yield None, None, getattr(fn, "__wrapped__", None)
    yield from ((None, None, x) for x in fn.__defaults__ or ())
    for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield _Cell(cell), variable, cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for variable in _names_in(fn.__code__):
        if variable in fn.__globals__:
            yield fn.__globals__, variable, fn.__globals__[variable]


class _Cell:
    """A variable of a closure as something that values are put into."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value


class _Fields:
    """The attributes of an object as something that values are put into."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)


_OF_MODULE = set(vars(torch.nn.Module()))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _file_of(cls: type) -> str:
    """Where a class is written; nowhere, so not in a library, if in a notebook or such."""
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__ == "__main__":
        return ""
    return getattr(module, "__file__", None) or "<frozen >"


# -- fake copies ---


def fake_copy(x: Tensor, mode: Any) -> Tensor:
    """A tensor like x without memory. With a mode it is a fake one, on the CPU if x is on the meta
    device: a model that is only a shape is traced as it would run. Without, it is on meta."""
    if isinstance(x, _torch.FakeTensor):
        return x
    if _torch.is_traceable_wrapper_subclass(x):
        names, context = x.__tensor_flatten__()
        parts = {k: getattr(x, k) for k in names}  # of a DTensor also its mesh
        inner = {k: fake_copy(v, mode) if isinstance(v, Tensor) else v for k, v in parts.items()}
        with torch.no_grad():
            y = type(x).__tensor_unflatten__(inner, context, x.size(), x.stride())
    else:
        device = x.device if mode is not None and not x.is_meta else "cpu" if mode else "meta"
        with mode or nullcontext(), torch.no_grad():
            y = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    if isinstance(x, torch.nn.Parameter):
        y = torch.nn.Parameter(y, requires_grad=x.requires_grad)
    elif x.is_leaf:
        y = y.requires_grad_(x.requires_grad)
    return _torch.with_hooks_of(x, y)


@contextmanager
def faked(found: Found, mode: Any) -> Iterator[dict[int, Tensor]]:
    """Inside, fake copies are where the tensors on the meta device were; the copies by id.

    Real tensors stay: the fake mode knows how to take them. Without a mode it is the real tensors
    that are replaced, by ones on the meta device. At the end all is as it was, the gradients of
    the tensors, the states and rates of the optimizers, what FSDP2 has gathered and where the
    stages of pipelines are too.
    """
    all_tensors = [x for x, _ in found.tensors.values()]
    replaced = (x for x in all_tensors if x.is_meta == (mode is not None))
    copies = {id(x): fake_copy(x, mode) for x in replaced if not hasattr(x, "_local_shards")}
    grads = [(x, x.grad) for x, _ in found.tensors.values() if x.is_leaf]
    states = [(o, {k: dict(v) for k, v in o.state.items()}) for o in found.optimizers]
    parameters = [_Contents(module._parameters) for module in found.modules]
    rates = [_Contents(group) for o in found.optimizers for group in o.param_groups]
    in_shards = [x for x in all_tensors if hasattr(x, "_local_shards")]
    stateful = [*_torch.fsdp_objects(found.modules), *found.pipelines, *in_shards]
    attributes = [_Attributes(x) for x in stateful if hasattr(x, "__dict__")]
    try:
        for holder, key, x in found.places:
            if id(x) in copies:
                holder[key] = copies[id(x)]
        yield copies
    finally:
        for holder, key, x in found.places:
            if id(x) in copies:
                holder[key] = x
        for x, grad in grads:
            x.grad = grad
        for optimizer, state in states:
            optimizer.state.clear()
            optimizer.state.update(state)
        for contents in (*parameters, *rates):
            contents.restore()
        for of_one in attributes:
            of_one.restore()


class _Contents:
    """What is in a list, dict or set now."""

    def __init__(self, container: Any) -> None:
        self.container, self.before = container, container.copy()

    def restore(self) -> None:
        self.container.clear()
        (self.container.extend if isinstance(self.before, list) else self.container.update)(
            self.before
        )


class _Attributes:
    """What an object's attributes are now; and of those that are containers, what is in them. Hooks
    stay: they are on modules, too."""

    def __init__(self, x: Any) -> None:
        self.attributes = vars(x)
        self.before = {k: v for k, v in vars(x).items() if "hook" not in k}
        containers = (v for v in self.before.values() if isinstance(v, (list, dict, set)))
        self.contents = [_Contents(v) for v in containers]

    def restore(self) -> None:
        for name in [name for name in self.attributes if "hook" not in name]:
            del self.attributes[name]
        self.attributes.update(self.before)
        for contents in self.contents:
            contents.restore()
