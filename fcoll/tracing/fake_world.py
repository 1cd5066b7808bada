"""A DeviceMesh of any size over groups that communicate nothing: no processes, no data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fcoll import _torch
from fcoll.errors import BadMesh, NotOnSimulatedRanks
from fcoll.groups import on_simulated_rank
from fcoll.lobby import torchrun_variables
from fcoll.tracing import ddp
from fcoll.tracing._torch import around_axes, around_new_groups
from fcoll.tracing.values import user_line

_active: list[fake_world] = []


class fake_world:
    """A context manager that gives a DeviceMesh with these axes, as rank ``rank`` sees it.

    Inside, torch.distributed is initialized with a group for all ranks and one for each axis, and
    torchrun's variables (RANK, WORLD_SIZE, ...) are those of a world on one host. At the end all is
    as it was, another process group of the program included. Worlds nest.

    >>> with fcoll.fake_world(dp=4, tp=2, rank=3) as mesh:
    ...     mesh.get_coordinate(), mesh["tp"].size(), torch.distributed.get_world_size()
    ((1, 1), 2, 8)
    """

    def __init__(self, *, rank: int = 0, device: str = "cpu", **axes: int) -> None:
        self.axes, self.rank, self.device = axes, rank, device
        self.size = math.prod(axes.values())
        for axis, n in axes.items():
            if not isinstance(n, int) or n < 1:
                raise BadMesh(what=f"axis {axis!r} has size {n!r}", hint="A size is 1 or more.")
        if not axes:
            raise BadMesh(what="no axis", hint="Write fake_world(dp=4, tp=2).")
        if not 0 <= rank < self.size:
            raise BadMesh(what=f"rank {rank} of {self.size}", hint="Ranks count from 0.")

    def __enter__(self) -> DeviceMesh:
        if on_simulated_rank():
            hint = "Make it outside fcoll.simulate_ranks: a fake world is the whole process's."
            raise NotOnSimulatedRanks(what="fcoll.fake_world", hint=hint)
        with ExitStack() as stack:
            stack.enter_context(_torch.fresh_world())
            stack.enter_context(ddp.made())
            stack.enter_context(torchrun_variables(self.size, self.rank))
            mesh = self._mesh()
            _active.append(self)
            stack.callback(_active.pop)
            self._stack = stack.pop_all()
        return mesh

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _mesh(self) -> DeviceMesh:
        whole = torch.arange(self.size, device="cpu").view(*self.axes.values())
        # As init_device_mesh does: an axis of all ranks is the default group.
        spans = next((axis for axis, n in self.axes.items() if n == self.size), None)
        desc = f"mesh_{spans}" if spans else "default_pg"
        world = _torch.fake_group(range(self.size), self.rank, "world", desc)
        groups = [
            world if axis == spans else self._group(axis, whole.movedim(i, -1))
            for i, axis in enumerate(self.axes)
        ]
        return _torch.mesh_of_groups(whole, tuple(self.axes), groups, self.device)

    def _group(self, axis: str, rows: torch.Tensor) -> Any:
        """The group of the axis that this rank is in: its row of the mesh along the axis."""
        rows = rows.reshape(-1, rows.shape[-1])
        mine = rows[(rows == self.rank).any(1)][0].tolist()
        return _torch.fake_group(mine, self.rank, axis, f"mesh_{axis}")


@dataclass(frozen=True)
class NewGroup:
    """A call that makes a group; ``local``: only its members make it."""

    ranks: tuple[int, ...]
    local: bool
    source: str

    def __str__(self) -> str:
        local = ", use_local_synchronization=True" * self.local
        return f"new_group({list(self.ranks)}{local}) at {self.source}"


@contextmanager
def new_groups_noted() -> Iterator[list[NewGroup]]:
    """Inside, what makes groups is written down."""
    made: list[NewGroup] = []

    def note(ranks: Sequence[int], local: bool) -> None:
        made.append(NewGroup(tuple(map(int, ranks)), local, user_line()))

    with around_new_groups(note):
        yield made


@contextmanager
def axes_asked_for() -> Iterator[set[str]]:
    """The axes that a program names while this is open: mesh["tp"], mesh.get_group("tp")."""
    asked: set[str] = set()

    def note(given: Any) -> None:
        names = given if isinstance(given, (tuple, list)) else (given,)
        asked.update(name for name in names if isinstance(name, str))

    with around_axes(note):
        yield asked


def current_axes() -> dict[str, int]:
    """The axes of the innermost fake world, none outside."""
    return dict(_active[-1].axes) if _active else {}
