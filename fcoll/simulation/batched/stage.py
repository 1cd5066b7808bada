"""Where a batched simulation takes place: its ranks, its mesh, and what names of groups mean."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fcoll import groups
from fcoll._torch import World, fake_mesh, group_ranks, mesh_group_name
from fcoll.errors import BadMesh, NotOnSimulatedRanks, UnknownGroup
from fcoll.groups import Group
from fcoll.ranks.patches import Patches
from fcoll.simulation.batched import _torch
from fcoll.simulation.baton import this_rank
from fcoll.table.partition import Partition
from fcoll.table.plans import Plans

_count = itertools.count()

# torch.distributed has one world a process: threads simulate one after another.
_one_thread = threading.RLock()

#: The stages that run now, the innermost last.
active: list[Stage] = []
# name of a group -> its stage; names are of one stage only, so that graphs can hold them
_by_name: weakref.WeakValueDictionary[str, Stage] = weakref.WeakValueDictionary()
stages: weakref.WeakValueDictionary[str, Stage] = weakref.WeakValueDictionary()


class Stage:
    """N ranks on a mesh. ``partition(name)`` has the groups of all ranks that a name stands for."""

    def __init__(self, axes: Mapping[str, int], device: str = "cpu") -> None:
        self.axes = dict(axes)
        _check_axes(self.axes)
        self.size = math.prod(self.axes.values())
        self.level: int | None = None
        self.name = f"simulated{next(_count)}"
        stages[self.name] = self
        self._partitions: dict[str, Partition] = {}
        self.plans = Plans()  # of calls (kernels)
        self._meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
        self._world, self._device = World(), device
        self._mesh: DeviceMesh | None = None
        shape = tuple(self.axes.values())
        self._keep("world", Partition.whole(self.size))
        for i, axis in enumerate(self.axes):
            if axis != "world":
                self._keep(axis, Partition.along(shape, i))
        weakref.finalize(self, _forget, self._partitions)

    # -- running ---

    @property
    def mesh(self) -> DeviceMesh:
        """The DeviceMesh of the simulation, as rank 0 has it; made at first use."""
        if self._mesh is None:  # asked before the lock, which a compiler does not know
            _check_thread()
            with _one_thread:
                self._make_mesh()
        assert self._mesh is not None
        return self._mesh

    def _make_mesh(self) -> None:
        if self._mesh is None:
            names = {label: self._name(label) for label in ("world", *self.axes)}
            about = self.axes, 0, self._device, names, "default_pg"
            self._mesh = self._world.fill(lambda: fake_mesh(*about))

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args) in this world of torch.distributed. At the end all is as it was."""
        _check_thread()
        with _one_thread:
            self._make_mesh()
            leave = self._world.enter()
            try:
                return self._run(fn, args)
            finally:
                leave()

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        patches = Patches("fcoll.simulate")
        level, self.level = self.level, _torch.depth() + 1
        active.append(self)
        groups.resolvers.append(self.group_name)
        try:
            queries.apply(patches)
            return fn(*args)
        finally:
            patches.undo()
            groups.resolvers.pop()
            active.pop()
            self.level = level

    # -- groups ---

    def partition(self, name: str) -> Partition:
        return self._partitions[self.group_name(name)]

    def knows(self, name: str | None) -> bool:
        """Is it a name of this stage's own, while it runs? Others may come to mean other groups,
        and what a compiler traces has sizes that are symbols."""
        return self.level is not None and name in self._partitions

    def group_name(self, group: Any) -> str:
        """The name by which ops refer to the groups of all ranks, of anything that names them."""
        if group is None:
            return self._name("world")
        if isinstance(group, str):
            return self._of_name(group)
        if isinstance(group, dist.ProcessGroup):
            return self._of_name(group.group_name)
        if isinstance(group, DeviceMesh):
            return self._of_mesh(group, range(group.ndim) if group.ndim == 1 else None)
        if isinstance(group, (list, tuple)) and group:
            if isinstance(group[0], DeviceMesh):
                axes = group[1] if isinstance(group[1], (list, tuple)) else [group[1]]
                return self._of_mesh(group[0], axes)
            if all(isinstance(axis, str) for axis in group):
                return self._of_axes(group)
            return self._of_ranks(group)
        raise UnknownGroup(group=repr(group), hint="")

    def _of_name(self, name: str) -> str:
        for known in (name, self._name(name)):
            if known in self._partitions:
                return known
        for mesh in self._meshes:
            if name in _torch.mesh_group_names(mesh):
                return self._of_mesh(mesh, [_torch.mesh_group_names(mesh).index(name)])
        try:
            ranks = group_ranks(groups._torch.resolve_process_group(name))
        except RuntimeError:
            hint = f"The axes of this simulation are {list(self.axes)}. "
            raise UnknownGroup(group=repr(name), hint=hint) from None
        return self._of_ranks(ranks)

    def _of_axes(self, axes: Sequence[str]) -> str:
        unknown = [axis for axis in axes if axis not in self.axes]
        if unknown or len(set(axes)) < len(axes):
            hint = f"The axes of this simulation are {list(self.axes)}. "
            raise UnknownGroup(group=f"for {tuple(axes)}", hint=hint)
        if len(axes) == 1:
            return self._name(axes[0])
        shape, order = tuple(self.axes.values()), list(self.axes)
        made = Partition.along(shape, *(order.index(axis) for axis in axes))
        return self._keep(",".join(axes), made)

    def _of_mesh(self, mesh: DeviceMesh, axes: Any) -> str:
        names = list(mesh.mesh_dim_names or range(mesh.ndim))
        if axes is None:
            hint = f"It has {mesh.ndim} dimensions: name one, as in (mesh, {names[0]!r}). "
            raise UnknownGroup(group=f"for {mesh}", hint=hint)
        at = [_position(mesh, names, axis) for axis in axes]
        if len(at) == 1 and (known := mesh_group_name(mesh, at[0])) in self._partitions:
            return known
        root = _torch.root_mesh(mesh)
        whole = list(root.mesh_dim_names or range(root.ndim))
        ranks = root.mesh.cpu()
        if ranks.numel() != self.size:
            hint = f"It has {ranks.numel()} ranks, this simulation {self.size}. "
            raise UnknownGroup(group=f"for {mesh}", hint=hint)
        chosen = [whole.index(names[i]) if root is not mesh else i for i in at]
        rows = ranks.movedim(chosen, list(range(-len(chosen), 0)))
        n = math.prod(ranks.shape[i] for i in chosen)
        made = Partition.of(rows.reshape(-1, n).tolist(), self.size)
        return self._keep(f"{made.groups}", made)

    def _of_ranks(self, ranks: Sequence[Any]) -> str:
        nested = isinstance(ranks[0], (list, tuple))
        if not nested and len(ranks) < self.size:
            hint = f"All {self.size} simulated ranks make this call: give the groups of all, as in "
            hint += f"[{list(ranks)}, [...]], or use fcoll.simulate_ranks. "
            raise UnknownGroup(group=list(ranks), hint=hint)
        made = Partition.of(ranks if nested else [ranks], self.size)
        return self._keep(f"{made.groups}", made)

    def _name(self, name: str) -> str:
        spans = self.axes.get(name) == self.size if name != "world" else True
        return f"{self.name}/{'world' if spans else name}"

    def _keep(self, label: str, made: Partition) -> str:
        name = self._name(label)
        if name not in self._partitions:
            axis = label if label in self.axes else None
            ranks = next(g for g in made.groups if 0 in g)
            self._partitions[name] = made
            groups.stacked_groups[name] = Group(name, ranks, ranks.index(0), axis, label, ())
            _by_name[name] = self
        return name


def _forget(partitions: dict[str, Partition]) -> None:
    for name in partitions:
        groups.stacked_groups.pop(name, None)


def _check_thread() -> None:
    if this_rank() is not None:
        hint = "Call it outside fcoll.simulate_ranks: it has ranks of its own."
        raise NotOnSimulatedRanks(what="fcoll.simulate", hint=hint)


def _rank_of(group: Any) -> Any:
    return groups.rank_here(active[-1].group_name(group))


def _saw_mesh(mesh: DeviceMesh) -> None:
    active[-1]._meshes.add(mesh)


queries = _torch.RankQueries(_rank_of, _saw_mesh)


def _position(mesh: DeviceMesh, names: list[Any], axis: Any) -> int:
    if axis in names:
        return names.index(axis)
    if isinstance(axis, int) and -mesh.ndim <= axis < mesh.ndim:
        return axis % mesh.ndim
    raise UnknownGroup(group=f"for dimension {axis!r} of {mesh}", hint=f"It has {names}. ")


def stage_of(name: str | None) -> Stage | None:
    """The stage that a call on this group belongs to; of a call without one, the innermost."""
    found = None if name is None else _by_name.get(name)
    return found or (active[-1] if active else None)


def _check_axes(axes: dict[str, int]) -> None:
    for axis, n in axes.items():
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise BadMesh(what=f"axis {axis!r} has size {n!r}", hint="A size is 1 or more.")
        if not isinstance(axis, str):
            raise BadMesh(what=f"an axis {axis!r}", hint="Axes have names.")
    if not axes:
        raise BadMesh(what="no axis", hint='Write mesh_shape={"dp": 4, "tp": 2}.')
