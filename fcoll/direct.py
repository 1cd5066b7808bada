"""What the short way of eager (native/python.cpp) asks Python for.

From Python a call and its wait take 2 us that way. Through the rest of the library they take 20 to
40, most of which finds out what C++ sees at a glance: that no tracer, mode, transform, subclass or
gradient has a part in the call, and which group it is on.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fcoll.async_tensor import in_flight as under_way
from fcoll.errors import from_native
from fcoll.groups import group_name

__all__ = ["error", "name_of_mesh", "under_way", "world"]


def world() -> Any:
    return dist.group.WORLD


def name_of_mesh(group: Any) -> str | None:
    """The name of a mesh's group; None for what is not a mesh, which goes the long way."""
    mesh = group[0] if isinstance(group, tuple) and group else group
    return group_name(group) if isinstance(mesh, DeviceMesh) else None


def error(message: str) -> Exception:
    """What a C++ error with this message is in Python."""
    return from_native(RuntimeError(message))
