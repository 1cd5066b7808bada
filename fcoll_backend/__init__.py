"""The name "fcoll" as a backend of torch.distributed: a package of its own, because torch imports
it at the end of its own import, where nothing of fcoll may be imported yet."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make ``torch.distributed.init_process_group("fcoll")`` known."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "FCOLL"):
        dist.Backend.register_backend("fcoll", make, extended_api=True, devices=["cpu"])


def make(facts: Any, options: Any = None) -> Any:
    """What torch calls for every group that is asked for by that name."""
    from fcoll.transport import backend

    return backend.make(facts, options)
