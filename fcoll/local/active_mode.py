"""Which LocalTensorMode is active: one list for the process, or one a thread in a runner."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fcoll.local.errors import NoMode

if TYPE_CHECKING:
    from fcoll.local.mode import LocalTensorMode

_process: list[LocalTensorMode] = []
_thread = threading.local()
_one_for_all = True


def get_local_tensor_mode_list() -> list[LocalTensorMode]:
    """The modes that were entered and not yet left, the innermost last."""
    if _one_for_all:
        return _process
    if not hasattr(_thread, "modes"):
        _thread.modes = []
    return _thread.modes


def share_between_threads(shared: bool) -> bool:
    """Whether threads see each other's modes; returns what it was."""
    global _one_for_all
    before, _one_for_all = _one_for_all, shared
    return before


def local_tensor_mode() -> LocalTensorMode | None:
    """The innermost LocalTensorMode, or None outside of all."""
    modes = get_local_tensor_mode_list()
    return modes[-1] if modes else None


def enabled_local_tensor_mode() -> LocalTensorMode | None:
    """The innermost LocalTensorMode unless it is disabled for now."""
    mode = local_tensor_mode()
    return mode if mode is not None and not mode._disable else None


def needed_local_tensor_mode(what: str) -> LocalTensorMode:
    """The same, where there must be one."""
    mode = enabled_local_tensor_mode()
    if mode is None:
        raise NoMode(what=what)
    return mode
