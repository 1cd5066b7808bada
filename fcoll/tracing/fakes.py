"""All tensors that a program holds, replaced by fake ones while it is traced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fcoll.source import is_library
from fcoll.table.collectives import row_of
from fcoll.tracing import _torch
from fcoll.tracing.shape_rules import lacks_dtype

_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype)
_LIMIT = 200_000  # objects looked at, for programs that hold a large data set


@dataclass
class Reachable:
    """The modules, optimizers and tensors that a program can reach."""

    modules: dict[torch.nn.Module, str] = field(default_factory=dict)  # their paths
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    tensors: dict[int, tuple[Tensor, str]] = field(default_factory=dict)  # by id, and their names
    places: list[tuple[Any, Any, Tensor]] = field(default_factory=list)  # (who holds it, as what)
    pipelines: list[Any] = field(default_factory=list)  # schedules, stages and their parts


def reachable(*roots: Any) -> Reachable:
    """What the roots hold: through closures, attributes, containers and globals by name."""
    objects = Reachable()
    visited: set[int] = set()
    todo: list[tuple[Any, Any, Any]] = [(None, None, root) for root in reversed(roots)]
    while todo and len(visited) < _LIMIT:
        holder, key, x = todo.pop()
        if isinstance(x, Tensor):
            _add_tensor(objects, holder, key, x, str(key))
            continue
        if id(x) in visited or isinstance(x, _ATOMS):
            continue
        visited.add(id(x))
        if isinstance(x, torch.nn.Module):
            _add_module(objects, x)
        elif isinstance(x, torch.optim.Optimizer):
            inner = vars(x).get("optimizer")
            if isinstance(inner, torch.optim.Optimizer):  # accelerate's passes all on to it
                todo.append((None, None, inner))
                continue
            objects.optimizers.append(x)
        elif _is_of_pipeline(x):
            objects.pipelines.append(x)
        todo.extend(_held_by(x))
    return objects


def _is_of_pipeline(x: Any) -> bool:
    """Is it a schedule, a stage or a part of one?"""
    return type(x).__module__.startswith("torch.distributed.pipelining.") and not isinstance(
        x, (torch.nn.Module, Enum)
    )


def _add_tensor(objects: Reachable, holder: Any, key: Any, x: Tensor, name: str) -> None:
    for shard in getattr(x, "_local_shards", ()):  # a sharded tensor is what its shards are
        _add_tensor(objects, _Fields(shard), "tensor", shard.tensor, name)
    if "." in name or id(x) not in objects.tensors:  # a path says more than a list's index
        objects.tensors[id(x)] = (x, name)
    if holder is not None:
        objects.places.append((holder, key, x))


def _add_module(objects: Reachable, module: torch.nn.Module) -> None:
    """The module and all inside; a module found inside another keeps the path from the outer."""
    for path, child in module.named_modules():
        if child in objects.modules:
            continue
        objects.modules[child] = path
        for holder in (child._parameters, child._buffers):
            for key, x in holder.items():
                if x is not None:
                    _add_tensor(objects, holder, key, x, _parameter_path(path, key))


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
    elif hasattr(x, "__dict__") and (_is_of_pipeline(x) or not is_library(_file_of(type(x)))):
        yield from ((vars(x), k, v) for k, v in list(vars(x).items()))
        if callable(x):
            yield None, None, type(x).__call__


def _held_by_function(fn: FunctionType) -> Iterator[tuple[Any, Any, Any]]:
    yield None, None, getattr(fn, "__wrapped__", None)
    for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield _Cell(cell), variable, cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    if is_library(fn.__code__.co_filename):  # as torch.no_grad() makes of a step: no more is its
        return
    yield from ((None, None, x) for x in fn.__defaults__ or ())
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
    name = cls.__module__
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return ""
    if file := getattr(module, "__file__", None):
        return str(file)
    # Made by hand, such as from a program's text: no file and no spec. torch's C++ ones are inside.
    by_hand = getattr(module, "__spec__", None) is None and "." not in name
    return "" if by_hand else "<frozen >"


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
def faked(objects: Reachable, mode: Any) -> Iterator[dict[int, Tensor]]:
    """Inside, fake copies are where the tensors on the meta device were; the copies by id.

    Real tensors stay: the fake mode knows how to take them. Without a mode it is the real tensors
    that are replaced, by ones on the meta device. At the end all is as it was, the gradients of
    the tensors, the states and rates of the optimizers, what FSDP2 has gathered and where the
    stages of pipelines are too.
    """
    all_tensors = [x for x, _ in objects.tensors.values()]
    replaced = (x for x in all_tensors if x.is_meta == (mode is not None))
    copies = {id(x): fake_copy(x, mode) for x in replaced if not hasattr(x, "_local_shards")}
    grads = [(x, x.grad) for x, _ in objects.tensors.values() if x.is_leaf]
    states = [(o, {k: dict(v) for k, v in o.state.items()}) for o in objects.optimizers]
    parameters = [_Contents(module._parameters) for module in objects.modules]
    rates = [_Contents(group) for o in objects.optimizers for group in o.param_groups]
    in_shards = [x for x in all_tensors if hasattr(x, "_local_shards")]
    stateful = [*_torch.fsdp_objects(objects.modules), *objects.pipelines, *in_shards]
    attributes = [_Attributes(x) for x in stateful if hasattr(x, "__dict__")]
    try:
        for holder, key, x in objects.places:
            if id(x) in copies:
                holder[key] = copies[id(x)]
        yield copies
    finally:
        for holder, key, x in objects.places:
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
    """A snapshot of a list, dict or set."""

    def __init__(self, container: Any) -> None:
        self.container, self.before = container, container.copy()

    def restore(self) -> None:
        self.container.clear()
        (self.container.extend if isinstance(self.before, list) else self.container.update)(
            self.before
        )


class _Attributes:
    """A snapshot of an object's attributes, and of what is in those that are containers. Hooks
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


# -- results of ops on fake tensors, kept by what goes in ---
# torch has such a cache too, but to ask it takes as long as all else in a trace: of a Llama with
# 32 layers, 3.3 of 6.1 s. Only what is surely the same each time is kept: an op that writes
# nothing, of fake tensors with plain sizes and of plain numbers, which gives new tensors, one view
# or what it was given, as a wait does.

_NUMBERS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_NUMBER_TYPES = {*_NUMBERS, torch.memory_format}


@dataclass(frozen=True)
class _Like:
    """A result to be made: sizes, strides, dtype, device; of a view, where it is."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    view_of: int | None  # the position among the tensors that go in


@dataclass(frozen=True)
class _Kept:
    likes: tuple[_Like, ...]
    is_tuple: bool = False
    same_as: int | None = None  # the tensor that comes out as it went in


class Results:
    """``call(func, args, kwargs)`` is func(*args, **kwargs) on fake tensors of a mode."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self._entries: dict[Any, _Kept | None] = {}
        self._attributes: dict[torch.device, Any] = {}

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        key: list[Any] = [func, torch.get_default_dtype()]
        tensors: list[Tensor] = []
        if not (self._add(key, tensors, args) and self._add(key, tensors, kwargs)):
            return self._run(func, args, kwargs)
        frozen = tuple(key)
        try:
            entry = self._entries[frozen]
        except KeyError:
            out = self._run(func, args, kwargs)
            self._entries[frozen] = self._entry(func, tensors, out)
            return out
        if entry is None:
            return self._run(func, args, kwargs)
        if entry.same_as is not None:
            return tensors[entry.same_as]
        outs = [self._tensor_like(like, tensors) for like in entry.likes]
        return tuple(outs) if entry.is_tuple else outs[0]

    @staticmethod
    def _run(func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if (rule_error := lacks_dtype(func, args, kwargs, error)) is not None:
                raise rule_error from error
            raise

    def _add(self, key: list[Any], tensors: list[Tensor], x: Any) -> bool:
        """Add what x is to the key; is it known well enough?"""
        kind = type(x)
        if kind is _torch.FakeTensor:
            if x.constant is not None or x.fake_mode is not self.mode or not _is_plain(x):
                return False
            key.append(x.fake_device)
            key += (x.shape, x.stride(), x.storage_offset(), x.dtype)
            tensors.append(x)
            return True
        if kind in _NUMBER_TYPES:
            key.append(kind)  # 1, 1.0 and True are equal
            key.append(x)
            return True
        if kind is tuple or kind is list or kind is torch.Size:
            key.append(len(x))
            return all(self._add(key, tensors, y) for y in x)
        if kind is dict:
            key.append(len(x))
            return all(self._add(key, tensors, y) for item in x.items() for y in item)
        return False

    def _entry(self, func: Any, tensors: list[Tensor], out: Any) -> _Kept | None:
        if not _is_pure(func) or torch.is_inference_mode_enabled():
            return None
        is_tuple = type(out) is tuple
        outs = list(out) if is_tuple else [out]
        if not all(type(y) is _torch.FakeTensor and _is_plain(y) for y in outs):
            return None
        if any(y.constant is not None for y in outs):
            return None
        same = [i for i, x in enumerate(tensors) if any(y is x for y in outs)]
        if same:
            return None if is_tuple else _Kept((), same_as=same[0])
        inputs = [_torch.storage_id(x) for x in tensors]
        results = [_torch.storage_id(y) for y in outs]
        shared = [inputs.index(s) if s in inputs else None for s in results]
        if len({*results}) < len(results) or (is_tuple and any(s is not None for s in shared)):
            return None
        return _Kept(tuple(map(_like, outs, shared)), is_tuple)

    def _tensor_like(self, like: _Like, tensors: list[Tensor]) -> Tensor:
        storage = None if like.view_of is None else tensors[like.view_of].untyped_storage()
        return _torch.new_fake(self.mode, like, storage, self._attributes)


@functools.cache
def _is_pure(func: Any) -> bool:
    """Is its result, but for values, the same for the same arguments, and nothing else done?"""
    row = row_of(func)
    return _torch.is_pure(func) and (func.namespace == "aten" or row is not None)


def _is_plain(x: Any) -> bool:
    return (
        x.layout is torch.strided
        and not x.dtype.is_complex
        and not x.is_neg()
        and all(type(n) is int for n in x.shape)
    )


def _like(x: Any, view_of: int | None) -> _Like:
    size, stride = tuple(x.shape), tuple(x.stride())
    return _Like(size, stride, x.dtype, x.fake_device, x.storage_offset(), view_of)
