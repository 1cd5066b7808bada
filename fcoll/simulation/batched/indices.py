"""``fcoll.rank`` and ``fcoll.axis_index``: ints on real ranks, per-rank values in a simulation."""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fcoll import groups
from fcoll._torch import all_groups, at_trace_time
from fcoll.errors import NotInitialized, UnknownAxis
from fcoll.groups import GroupLike, group_name, rank_here


def rank(group: GroupLike = None) -> int | Tensor:
    """This rank's place in the group, counted from 0.

    An int on real ranks and in :func:`fcoll.fake_world`. Inside :func:`fcoll.simulate` it is a
    tensor with each rank's own value: compute with it, or choose with ``torch.where``.

    >>> fcoll.rank() == rank
    True
    >>> fcoll.simulate(lambda x: x * fcoll.rank(), world_size=3)(torch.ones(3))
    tensor([0., 1., 2.])
    """
    return rank_here(group_name(group))


def axis_index(axis: str, mesh: DeviceMesh | None = None) -> int | Tensor:
    """This rank's coordinate along an axis of a mesh: the one that has an axis of this name.

    >>> with fcoll.fake_world(dp=4, tp=2, rank=5):
    ...     fcoll.axis_index("dp"), fcoll.axis_index("tp")
    (2, 1)
    """
    if mesh is not None:
        return rank((mesh, axis))
    if groups.resolvers:
        return rank(axis)
    return _axis_index(axis)


@at_trace_time
def _axis_index(axis: str) -> int:
    if not dist.is_initialized():
        raise NotInitialized(group=axis)
    known = [groups.by_name(pg.group_name) for pg in all_groups() if _is_group(pg)]
    found = {g.ranks: rank_here(g.name) for g in known if g.axis == axis}
    if not found:  # an axis of all ranks is the default group, which has not its name
        for mesh in _meshes_with(axis):
            found[tuple(mesh.mesh.flatten().tolist())] = mesh.get_local_rank(axis)
    if len(found) != 1:
        axes = sorted({g.axis for g in known if g.axis})
        raise UnknownAxis(axis=axis, why="there are several" if found else f"there are {axes}")
    return next(iter(found.values()))


def _is_group(pg: Any) -> bool:
    return isinstance(pg, dist.ProcessGroup)  # torch keeps a number for groups of other ranks


def _meshes_with(axis: str) -> list[DeviceMesh]:
    world = dist.get_world_size()
    meshes = [x for x in gc.get_objects() if type(x) is DeviceMesh]
    return [m for m in meshes if axis in (m.mesh_dim_names or ()) and m.mesh.numel() == world]
