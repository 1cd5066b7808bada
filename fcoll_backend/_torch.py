"""The private torch APIs that the names of backends need. Tested with torch 2.13.0; 2.15.0 has
these names, too.

torch imports this file at the end of its own import where FCOLL_AS is set: nothing of fcoll may be
imported here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from fcoll_backend import for_gloo

log = logging.getLogger("fcoll")

_in_force: dict[object, str] = {}  # the ``why`` of each serve_gloo() that is not undone
_logged: list[str] = []


def serve_gloo(why: str) -> Callable[[], None]:
    """Have groups that ask for gloo on CPU tensors made by fcoll, until the result is called;
    ``why`` is for the log."""
    if _theirs is None:  # torch's own import must not fail for it
        log.warning("%s has no effect: torch %s makes groups otherwise", why, torch.__version__)
        return lambda: None
    c10d._new_process_group_helper = _helper
    key = object()
    _in_force[key] = why

    def undo() -> None:
        _in_force.pop(key, None)
        if not _in_force:
            c10d._new_process_group_helper = _theirs

    return undo


_theirs = getattr(c10d, "_new_process_group_helper", None)


def _helper(
    group_size: int, group_rank: int, ranks: Sequence[int], backend: Any, *args: Any, **kwargs: Any
) -> Any:
    """torch's function of this place; groups keep the backend's name that was passed."""
    assert _theirs is not None
    config = c10d.BackendConfig(c10d.Backend(backend))
    ours = _with_fcoll(config.get_device_backend_map())
    if ours is None:
        return _theirs(group_size, group_rank, ranks, backend, *args, **kwargs)
    before = for_gloo.set(True)
    try:
        result = _theirs(group_size, group_rank, ranks, c10d.Backend(ours), *args, **kwargs)
    finally:
        for_gloo.reset(before)
    group, world = result[0], c10d._world
    if group not in world.pg_map or world.pg_map[group][0] != ours:  # of other ranks, or an old one
        return result
    _name_as_gloo(group)
    world.pg_map[group] = backend, world.pg_map[group][1]
    world.pg_backend_config[group] = str(config)
    if not _logged and (ranks[group_rank] if ranks else group_rank) == 0:
        _logged.append(next(iter(_in_force.values())))
        log.warning("gloo's groups of CPU tensors are made by fcoll: %s", _logged[0])
    return result


def _name_as_gloo(group: Any) -> None:
    """A group of one rank is gloo's own: say so to torch, which asks by the type, too. Of others it
    would take the backend for a ProcessGroupGloo, unchecked (the logger of DDP)."""
    cpu, gloo = torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO
    backend = group._get_backend(cpu)
    if group.name() in ("custom", "undefined") and isinstance(backend, c10d.ProcessGroupGloo):
        group._register_backend(cpu, gloo, backend)
        group._set_default_backend(gloo)


def _with_fcoll(backend_of: dict[str, str]) -> str | None:
    """The same devices with fcoll for CPU tensors; None if those are not gloo's."""
    if backend_of.get("cpu") != c10d.Backend.GLOO:
        return None
    # "gloo" names all devices that gloo knows: those that this machine lacks need no second gloo
    has_accelerator = torch._C._get_accelerator().type != "cpu"
    others = [
        f"{device}:{backend}"
        for device, backend in backend_of.items()
        if device != "cpu" and (has_accelerator or backend != c10d.Backend.GLOO)
    ]
    return ",".join(["cpu:fcoll", *others]) if others else "fcoll"
