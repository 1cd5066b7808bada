"""The name "fcoll" as a backend of torch.distributed: a package of its own, because torch imports
it at the end of its own import, where nothing of fcoll may be imported yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

# Is the group that is being made requested as gloo's?
for_gloo: ContextVar[bool] = ContextVar("for_gloo", default=False)


def register() -> None:
    """Make ``torch.distributed.init_process_group("fcoll")`` known, and do what FCOLL_AS says."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "FCOLL"):
        return
    dist.Backend.register_backend("fcoll", make, extended_api=True, devices=["cpu"])
    if name := os.environ.get("FCOLL_AS"):
        stand_for(name, f"FCOLL_AS={name}")


def stand_for(name: str, why: str) -> Callable[[], None]:
    """Have the groups of CPU tensors that ask for that backend made by fcoll; gives what ends it.
    ``why`` is for the log."""
    from fcoll_backend import _torch

    if name == "gloo":
        return _torch.serve_gloo(why)
    _torch.log.warning("%s has no effect: fcoll can stand for gloo only", why)
    return lambda: None


def make(facts: Any, options: Any = None) -> Any:
    """The creator that torch calls for every group of that backend."""
    from fcoll.transport import backend

    return backend.make(facts, options)
