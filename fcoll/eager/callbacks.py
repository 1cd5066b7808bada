"""Callbacks for the C++ fast path: look up a group, wrap a result, translate an error."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fcoll.eager.async_tensor import in_flight
from fcoll.errors import from_native
from fcoll.groups import group_name
from fcoll.transport.native import build


def world() -> Any:
    return dist.group.WORLD


def name_of_mesh(group: Any) -> str | None:
    """The name of a mesh's group; None for what is not a mesh: that is not served."""
    mesh = group[0] if isinstance(group, tuple) and group else group
    return group_name(group) if isinstance(mesh, DeviceMesh) else None


def error(message: str) -> Exception:
    """What a C++ error with this message is in Python."""
    return from_native(RuntimeError(message))


build.when_loaded(lambda fast: fast.set_callbacks(world, name_of_mesh, in_flight, error))
