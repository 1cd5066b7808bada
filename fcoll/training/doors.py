"""Functions of torch.distributed that take a reducer or its logger: they know ours as well.

torch's are C++ and take torch's only. Once a reducer of ours is made, those names pass calls with
ours to ours; all others go where they went.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fcoll.training import _torch

Theirs = Callable[..., Any]
_doors: dict[str, Callable[[Theirs], Any]] = {}
_open = False


def door(name: str) -> Callable[[Callable[[Theirs], Any]], Callable[[Theirs], Any]]:
    """Name what takes torch's function and gives the one to put in its place."""

    def keep(make: Callable[[Theirs], Any]) -> Callable[[Theirs], Any]:
        _doors[name] = make
        return make

    return keep


def open_doors() -> None:
    """Once in a process."""
    global _open
    if not _open:
        _open = True
        for name, make in _doors.items():
            _torch.replace(name, make)
