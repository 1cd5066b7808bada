"""DeviceMesh in a LocalTensorMode: its coordinates are ints of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fcoll.local import _torch, active_mode, rank_groups
from fcoll.local.errors import NotInMesh
from fcoll.local.ints import LocalIntNode, local_int

if TYPE_CHECKING:
    from fcoll.local.mode import LocalTensorMode


def _mode() -> LocalTensorMode:
    return active_mode.needed_local_tensor_mode("a coordinate of each rank")


class _LocalDeviceMesh:
    """The methods that stand in for DeviceMesh's in a mode (see mode_patches.py)."""

    @staticmethod
    def get_coordinate(self: Any) -> list[Any]:
        """The coordinates of each rank in its own sub-mesh of this kind."""
        mode = _mode()
        kept = mode._coordinate_cache.get(id(self))
        if kept is None:
            rank_groups.remember(self)
            kept = self, _coordinates(self, mode)  # with the mesh: its id stays its own
            mode._coordinate_cache[id(self)] = kept
        return kept[1]

    @staticmethod
    def _is_current_rank_part_of_mesh(self: Any) -> bool:
        return self.get_coordinate() is not None

    @staticmethod
    def _sym_get_coordinate(self: Any, index: int) -> Any:
        return self.get_coordinate()[index]

    @staticmethod
    def get_rank(self: Any) -> Any:
        return torch.SymInt(LocalIntNode({r: r for r in _mode().ranks}))

    @staticmethod
    def get_local_rank(self: Any, mesh_dim: int | str | None = None) -> Any:
        if self.ndim > 1 and mesh_dim is None:
            raise RuntimeError(
                f"Found the DeviceMesh have {self.ndim} dimensions",
                "Optional kwarg `mesh_dim` needs to be specified when device_mesh.ndim > 1.",
            )
        if isinstance(mesh_dim, str):
            mesh_dim = _torch.mesh_dim_index(self, mesh_dim)
        return _LocalDeviceMesh.get_coordinate(self)[mesh_dim or 0]


def _coordinates(mesh: Any, mode: LocalTensorMode) -> list[torch.SymInt]:
    fibers = _torch.mesh_fibers(mesh)
    found: list[dict[int, int]] = [{} for _ in range(mesh.ndim)]
    for place in (fibers >= 0).nonzero().tolist():
        rank = int(fibers[tuple(place)])
        if rank in mode.ranks:
            for axis, c in enumerate(place[1:]):
                found[axis][rank] = c
    missing = sorted(mode.ranks - found[0].keys()) if found else []
    if missing:
        raise NotInMesh(ranks=missing, mesh=mesh)
    return [torch.SymInt(LocalIntNode(c)) for c in found]


def runtime_coordinate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """``device_mesh::_runtime_compute_coordinate_on_dim`` on each rank."""
    full_mesh, index = (*args, *kwargs.values())
    found = {}
    for r in mode.order:
        mesh = _torch.submesh_of_rank(full_mesh, r)
        found[r] = int((mesh == r).nonzero()[0, index])
    return local_int(found)
