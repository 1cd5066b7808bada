"""Groups: anything that names one (GroupLike) is resolved to a canonical Group."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fcoll import _torch
from fcoll.errors import (
    GroupClosed,
    NotInGroup,
    NotInitialized,
    UnknownGroup,
    WrongDevice,
    from_lobby,
)
from fcoll.lobby import Lobby, NotMet, processes_of

#: Everything that names a group: a ProcessGroup, a 1-D DeviceMesh, a mesh and one of its
#: dimensions (by number or name), a group's name, its global ranks, or None for all ranks.
GroupLike: TypeAlias = (
    dist.ProcessGroup
    | DeviceMesh
    | tuple[DeviceMesh, int | str]
    | str
    | Sequence[int]
    | Sequence[Sequence[int]]
    | None
)


@dataclass(frozen=True)
class Group:
    """A process group as the rest of fcoll sees it.

    ``ranks`` are global ranks in the order of the group's own; ``axis`` is the name of the mesh
    dimension it spans, if it comes from a mesh; ``serves`` are the types of device its backends
    take, none named where they take all.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    axis: str | None
    label: str
    serves: tuple[str, ...]

    @property
    def n(self) -> int:
        return len(self.ranks)

    @property
    def pg(self) -> dist.ProcessGroup:
        return _torch.resolve_process_group(self.name)

    @property
    def simulated(self) -> bool:
        """Are its ranks threads of this process (fcoll/simulation)?"""
        return is_simulated(self.pg)


def is_simulated(pg: dist.ProcessGroup) -> bool:
    return getattr(pg, "simulated", False)


def on_simulated_rank() -> bool:
    """Is this the thread of a simulated rank?"""
    world = dist.group.WORLD if dist.is_available() else None
    return world is not None and is_simulated(world)


# name -> (weak reference to the group it was made from, Group). Weak, so that a destroyed group
# goes away, and compared, because torch gives the names of destroyed groups to new ones.
_cache: dict[str, tuple[weakref.ref, Group]] = {}
_times_made: Counter[tuple[int, ...]] = Counter()
# world -> ranks whose group could not be made -> why
_failures: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], str]] = weakref.WeakKeyDictionary()


# What a batched simulation (fcoll/simulation) adds: its groups by name, as its first rank sees
# them, and while it runs, what gives the name of anything that names a group there.
stacked_groups: dict[str, Group] = {}
resolvers: list[Callable[[Any], str | None]] = []


def by_name(name: str) -> Group:
    """The group that torch knows by this name."""
    if stacked_groups and name in stacked_groups:
        return stacked_groups[name]
    try:
        pg = _torch.resolve_process_group(name)
    except RuntimeError:
        if not dist.is_initialized():
            raise NotInitialized(name=name) from None
        raise UnknownGroup(group=repr(name), hint="") from None
    cached = _cache.get(name)
    if cached is not None and cached[0]() is pg:
        return cached[1]
    desc = pg.group_desc
    axis = desc.removeprefix("mesh_") if desc.startswith("mesh_") else None
    label = axis or (str(list(_torch.group_ranks(pg))) if desc in ("", "undefined") else desc)
    serves = _torch.device_types(pg)
    group = Group(name, _torch.group_ranks(pg), pg.rank(), axis, label, serves)
    _cache[name] = (weakref.ref(pg), group)
    return group


def resolve(group: GroupLike) -> Group:
    """The canonical Group of anything that names one.

    A list of ranks finds the group with just these ranks in this order, and makes it on first
    use; then all its members must reach that first use.
    """
    return by_name(group_name(group))


@_torch.at_trace_time
def group_name(group: GroupLike) -> str:
    """The name by which ops refer to the group."""
    if resolvers and (name := resolvers[-1](group)) is not None:
        return name
    if isinstance(group, str):
        return group
    if not dist.is_initialized():
        raise NotInitialized(group=group)
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise NotInGroup(rank=dist.get_rank(), ranks="that dist.new_group was called with")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            hint = f"It has {group.ndim} dimensions: name one, as in (mesh, {_axes(group)[0]!r}). "
            raise UnknownGroup(group=f"for {group}", hint=hint)
        return _torch.mesh_group_name(group, 0)
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return _mesh_axis_name(*group)
    if isinstance(group, (list, tuple)) and group:
        return _name_of_ranks(group)
    raise UnknownGroup(group=repr(group), hint="")


@_torch.at_trace_time
def group_size(name: str) -> int:
    return by_name(name).n


@_torch.at_trace_time
def group_rank(name: str) -> int:
    return by_name(name).rank


@_torch.at_trace_time
def rank_asked(name: str) -> Any:
    """The rank that a program gets; replaced where one run stands for several ranks."""
    return by_name(name).rank


def rank_here(name: str) -> Any:
    """This rank's place in the group: an int, in a batched simulation a tensor of each rank's."""
    return torch.ops.fcoll_simulation.rank(name) if is_stacked_group(name) else rank_asked(name)


def size_here(name: str) -> Any:
    """The size of this rank's group, in a batched simulation a tensor too."""
    return torch.ops.fcoll_simulation.size(name) if is_stacked_group(name) else group_size(name)


@_torch.at_trace_time
def is_stacked_group(name: str) -> bool:
    return name in stacked_groups


@_torch.at_trace_time
def group_label(name: str) -> str:
    return by_name(name).label


@_torch.at_trace_time
def check_device(op: str, device: str, name: str) -> None:
    """Raise unless the group's backend serves tensors on this type of device."""
    serves = by_name(name).serves
    if serves and device not in serves and device != "meta":
        raise WrongDevice(op=op, device=device, serves=" and ".join(serves))


def _axes(mesh: DeviceMesh) -> tuple[str, ...] | range:
    return mesh.mesh_dim_names or range(mesh.ndim)


def _mesh_axis_name(mesh: DeviceMesh, axis: int | str) -> str:
    axes = list(_axes(mesh))
    if axis in axes:
        return _torch.mesh_group_name(mesh, axes.index(axis))
    if isinstance(axis, int) and -mesh.ndim <= axis < mesh.ndim:
        return _torch.mesh_group_name(mesh, axis % mesh.ndim)
    raise UnknownGroup(
        group=f"for dimension {axis!r} of {mesh}", hint=f"Its dimensions are {axes}. "
    )


def _name_of_ranks(ranks: Sequence) -> str:
    me = dist.get_rank()
    if isinstance(ranks[0], (list, tuple)):  # several groups at once: mine is the one I am in
        mine = [r for r in ranks if me in r]
        ranks = mine[0] if mine else [r for rs in ranks for r in rs]
    members = tuple(ranks)
    world = dist.get_world_size()
    if not all(isinstance(r, int) and 0 <= r < world for r in members):
        raise UnknownGroup(group=list(members), hint=f"Ranks are 0 to {world - 1}. ")
    if len(set(members)) != len(members):
        raise UnknownGroup(group=list(members), hint="A rank is there twice. ")
    if me not in members:
        raise NotInGroup(rank=me, ranks=list(members))
    for pg in _torch.all_groups():
        if _torch.group_ranks(pg) == members:
            return pg.group_name
    return _make(members).group_name


def _make(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group of these ranks, once all of them ask for it.

    If they did not come together once, they never do in this world: a call that is made again
    could meet another call of the rank that came late.
    """
    world = dist.group.WORLD
    failed = _failures.setdefault(world, {})
    if ranks in failed:
        message = f"the group {list(ranks)} was closed by an earlier error: {failed[ranks]}"
        raise GroupClosed(message=message)
    if is_simulated(world):
        return _torch.new_group(ranks, f"fcoll{list(ranks)}")
    # a new name each time: after a destroyed group of that name, gloo would find the old addresses
    name = f"fcoll{list(ranks)}#{_times_made[ranks] + 1}"
    store = _torch.group_store(world)
    if store is not None and _torch.device_types(world):  # else it is a fake one
        processes, me = processes_of(world), ranks.index(dist.get_rank())
        lobby = Lobby(
            store,
            me,
            len(ranks),
            _torch.group_timeout_s(world),
            prefix=f"fcoll_new/{name}",
            names=[f"rank {r}" for r in ranks],
            processes={i: processes[r] for i, r in enumerate(ranks) if r in processes},
        )
        try:
            lobby.exchange("")
        except NotMet as why:
            lobby.give_up(why)
            failed[ranks] = str(why)
            raise from_lobby(why) from None
    _times_made[ranks] += 1
    return _torch.new_group(ranks, name)
