"""A program's queries of ranks to torch, answered in a trace by Numbers (equivalent_ranks.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fcoll import groups as fcoll_groups
from fcoll._torch import at_trace_time
from fcoll.groups import by_name
from fcoll.ranks.patches import RANK_VARIABLES
from fcoll.source import is_library, is_pythons
from fcoll.tracing import _torch
from fcoll.tracing.equivalent_ranks import (
    MOST_MEMBERS,
    Alike,
    Number,
    nested,
    plain_number,
    this_ranks,
)


@contextmanager
def answering_for(alike: Alike) -> Iterator[None]:
    """Inside a fake world, queries of ranks are answered by ``alike``."""
    rank = dist.ProcessGroup.rank
    groups = {
        pg: _GroupRanks(places, axis, alike)
        for pg, places, axis in _torch.known_groups()
        if axis in alike.axes
    }

    def rank_in(pg: Any) -> Any:
        plain = rank(pg)
        axis = next((g.axis for other, g in groups.items() if other == pg), None)
        if axis is not None:
            return _answer(alike, plain, alike.index(axis))
        if pg.size() == alike.size:
            return _answer(alike, plain, alike.ranks)
        return _answer(alike, plain, None)

    @at_trace_time
    def rank_named(name: str) -> Any:
        if name != "world" and name not in alike.axes:
            alike.only_me()
            return by_name(name).rank
        return alike.number(alike.ranks if name == "world" else alike.index(name))

    with ExitStack() as stack:
        stack.enter_context(_torch.replaced(fcoll_groups, {"rank_asked": rank_named}))
        stack.enter_context(_torch.replaced(dist.ProcessGroup, {"rank": rank_in}))
        stack.enter_context(_torch.replaced(DeviceMesh, _of_meshes(alike)))
        stack.enter_context(_torch.group_ranks_replaced(groups))
        stack.enter_context(_torch.around_shares(alike.shares))
        stack.enter_context(_numbers_in_tensors(alike))
        stack.enter_context(_variables(alike))
        yield


@contextmanager
def _variables(alike: Alike) -> Iterator[None]:
    """Inside, a rank that is read from torchrun's variables is plain text, whose further use cannot
    be followed: what the program then does is known of this rank alone."""
    kind = type(os.environ)
    read = kind.__getitem__

    def item(variables: Any, name: str) -> str:
        if name in RANK_VARIABLES and not _reads_for_itself():
            alike.only_me()
        return read(variables, name)

    with _torch.replaced(kind, {"__getitem__": item}):
        yield


def _reads_for_itself() -> bool:
    """Is it torch or fcoll that reads a variable?"""
    frame = _asker()
    while frame is not None and is_pythons(frame.f_code.co_filename):  # os.getenv, dict.get
        frame = frame.f_back
    return frame is not None and is_library(frame.f_code.co_filename)


@contextmanager
def _numbers_in_tensors(alike: Alike) -> Iterator[None]:
    """Inside, a rank that becomes a seed or an element of a tensor decides nothing. From then on,
    a read of a tensor's known value makes the trace this rank's alone: it may depend on a rank."""

    def plainly(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            options = {name: nested(this_ranks, x) for name, x in kwargs.items()}
            return fn(*nested(this_ranks, args), **options)

        return call

    def reading(fn: Callable[..., Any]) -> Callable[..., Any]:
        def read(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if alike.in_tensors and _torch.has_value(x) and not _by_library():
                alike.only_me()
            return fn(x, *args, **kwargs)

        return read

    makers = {name: plainly(getattr(torch, name)) for name in ("manual_seed", "tensor")}
    makers |= {name: _sized(getattr(torch, name)) for name in _MADE_BY_SIZE}
    readers = {name: reading(getattr(torch.Tensor, name)) for name in _READS}
    readers |= {name: _sized(getattr(torch.Tensor, name)) for name in _SHAPED_BY_SIZE}
    with _torch.functions_replaced(makers), _torch.replaced(torch.Tensor, readers):
        yield


def _sized(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes sizes: torch takes none but ints, so a size computed from a rank
    decides."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(type(x) in _MAY_BE_RANKS for x in args) or kwargs:
            args = nested(plain_number, args)
            kwargs = {name: nested(plain_number, x) for name, x in kwargs.items()}
        return fn(*args, **kwargs)

    return call


_MAY_BE_RANKS = (Number, list, tuple)
_MADE_BY_SIZE = (
    *("empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "eye", "arange"),
    *("linspace", "empty_strided"),
)
_SHAPED_BY_SIZE = (
    *("view", "reshape", "expand", "repeat", "unflatten", "split", "narrow"),
    *("new_empty", "new_zeros", "new_ones", "new_full"),
)
_READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")


def _by_library() -> bool:
    """Is it torch or fcoll that reads?"""
    frame = _asker()
    return frame is not None and is_library(frame.f_code.co_filename)


def _answer(alike: Alike, plain: Any, values: Any) -> Any:
    """A Number; but libraries that cut tensors up get the plain one: what they decide by it is
    taken into account elsewhere (``shares``)."""
    if _is_known():
        return plain
    if values is None:
        alike.only_me()
        return plain
    return alike.number(values)


def _is_known() -> bool:
    """Is the caller a library whose use of ranks is known?"""
    frame = _asker()
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name):
            return False
        if not name.startswith(_torch.PASSES_ON):
            return name.startswith(_torch.KNOWN)
        frame = frame.f_back
    return False


def _asker() -> FrameType | None:
    """The frame that called into this file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _names(frame: FrameType, name: str) -> bool:
    return name in frame.f_code.co_names or name in frame.f_code.co_consts


class _GroupRanks(dict):
    """A group's ranks -> their places in it, as c10d keeps them."""

    def __init__(self, places: dict[int, int], axis: str, alike: Alike) -> None:
        super().__init__(places)
        self.axis, self.alike = axis, alike

    def __getitem__(self, rank: Any) -> Any:
        if _is_known():
            return super().__getitem__(rank)
        alike, values = self.alike, getattr(rank, "_values", rank)
        place = alike.place_of(self.axis, values)
        if not alike.ask(place >= 0):
            raise KeyError(rank)
        return alike.number(place)

    def __contains__(self, rank: Any) -> bool:
        if _is_known():
            return super().__contains__(rank)
        values = getattr(rank, "_values", rank)
        return self.alike.ask(self.alike.place_of(self.axis, values) >= 0)

    def keys(self) -> Any:
        if _is_known():
            return super().keys()
        if len(self) > MOST_MEMBERS:
            self.alike.only_me()
            return super().keys()
        members = [self.alike.member(self.axis, place) for place in range(len(self))]
        return [self.alike.number(values) for values in members]

    def items(self) -> Any:
        return (
            super().items() if _is_known() else list(zip(self.keys(), self.values(), strict=True))
        )

    def __iter__(self) -> Any:
        return super().__iter__() if _is_known() else iter(self.keys())


def _of_meshes(alike: Alike) -> dict[str, Any]:
    local, coordinate, ranks = DeviceMesh.get_local_rank, DeviceMesh.get_coordinate, DeviceMesh.mesh

    def index(mesh: Any, i: int) -> Any:
        """Every rank's place on the i-th axis of a mesh, if it is one of the world's axes."""
        names = mesh.mesh_dim_names or ()
        if i >= len(names) or names[i] not in alike.axes:
            return None
        own = mesh.get_group(i).group_name in (names[i], "world")  # not a mesh of the program's
        return alike.index(names[i]) if own else None

    def get_local_rank(mesh: Any, mesh_dim: Any = None) -> Any:
        plain, names = local(mesh, mesh_dim), mesh.mesh_dim_names or ()
        i = names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim or 0
        return _answer(alike, plain, index(mesh, i))

    def get_coordinate(mesh: Any) -> Any:
        plain = coordinate(mesh)
        frame = _asker()
        if plain is None or _is_known() or (frame and not _names(frame, "get_coordinate")):
            return plain  # C++ asks, to cut a DTensor up: no function names it
        return tuple(_answer(alike, x, index(mesh, i)) for i, x in enumerate(plain))

    def get_rank(mesh: Any) -> Any:
        return _answer(alike, dist.get_rank(), alike.ranks)

    def mesh_ranks(mesh: Any) -> Any:
        """Ranks with the same place on all other axes have the same ranks in the mesh."""
        frame = _asker()
        if mesh.size() < alike.size and frame and not is_library(frame.f_code.co_filename):
            for axis in sorted(set(alike.axes) - set(mesh.mesh_dim_names or ())):
                alike.ask(alike.index(axis))
        return ranks.fget(mesh)

    return {
        "get_local_rank": get_local_rank,
        "get_coordinate": get_coordinate,
        "get_rank": get_rank,
        "mesh": property(mesh_ranks),
    }
