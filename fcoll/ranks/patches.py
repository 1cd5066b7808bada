"""The one way to replace names of torch and of Python, and to put them back.

    with patched("a trace", dist.ProcessGroup, {"rank": ours}):
        ...

Who replaces a name says who it is; ``print(report())`` shows what is replaced now and by whom.
Patches nest, and may end in any order: a name gets back what it had before all of them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Make = Callable[[Any], Any]

_INHERITED = object()  # in the place of a value: a base class has it
_lock = threading.RLock()  # patches may be undone while others are applied, by a finalizer
_in_force: list[Patches] = []  # the oldest first


class Patches:
    """The names that one part of fcoll has replaced, until ``undo``."""

    def __init__(self, by: str) -> None:
        self.by = by
        self._before: list[tuple[Any, str, Any]] = []  # (owner, name, what was there)
        self._at_undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """``owner``, a module or a class, has this value under this name."""
        self.apply([(owner, name, value)])

    def wrap(self, owner: Any, name: str, make: Make) -> None:
        """``make(what is there)`` takes its place."""
        self.apply([(owner, name, make(getattr(owner, name)))])

    def apply(self, changes: list[tuple[Any, str, Any]]) -> None:
        """Replace all (owner, name, value)."""
        with _lock:
            if not self._before:
                _in_force.append(self)
            self._before += [(o, name, vars(o).get(name, _INHERITED)) for o, name, _ in changes]
            for owner, name, value in changes:
                setattr(owner, name, value)

    def at_undo(self, call: Callable[[], object]) -> None:
        """What else is to be undone: called ahead of the names, the last first."""
        self._at_undo.append(call)

    def undo(self) -> None:
        """Put everything back, the last first; what was put on top of it stays."""
        with _lock:
            if not self._before:
                return
            while self._at_undo:
                self._at_undo.pop()()
            at = _in_force.index(self)
            later = _in_force[at + 1 :]
            for owner, name, before in reversed(self._before):
                if later and any(other._rebase(owner, name, before) for other in later):
                    continue
                if before is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
            self._before.clear()
            del _in_force[at]

    def _rebase(self, owner: Any, name: str, before: Any) -> bool:
        """Put ``before`` back instead of what was there, if this name is replaced here."""
        for i, (own_owner, own_name, _) in enumerate(self._before):
            if own_owner is owner and own_name == name:
                self._before[i] = owner, name, before
                return True
        return False

    def names(self) -> list[str]:
        return [f"{_shown(owner)}.{name}" for owner, name, _ in self._before]

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def _shown(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return getattr(owner, "__name__", repr(owner))


@contextmanager
def patched(by: str, owner: Any, names: dict[str, Any]) -> Iterator[None]:
    """Inside, a class or module has these values under these names."""
    with Patches(by) as patches:
        patches.apply([(owner, name, value) for name, value in names.items()])
        yield


class SharedPatches:
    """Patches that several threads need at once: the first to enter applies them, the last to leave
    undoes them. What they put in place asks whose thread it is (``where``)."""

    def __init__(self, by: str, apply: Callable[[Patches], None]) -> None:
        self._patches, self._apply = Patches(by), apply
        self._users, self._entry = 0, threading.Lock()

    def __enter__(self) -> None:
        with self._entry:
            self._users += 1
            if self._users == 1:
                self._apply(self._patches)

    def __exit__(self, *error: object) -> None:
        with self._entry:
            self._users -= 1
            if self._users == 0:
                self._patches.undo()


def where(holds: Callable[[], Any], ours: Callable[..., Any]) -> Make:
    """For ``wrap``: ``ours(original, ...)`` in calls where ``holds()``, else the original."""

    last: tuple[Any, Any] = None, None  # patches come and go: what was made for the same is kept

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        nonlocal last
        if last[0] is original:
            return last[1]

        @functools.wraps(original)
        def either(*args: Any, **kwargs: Any) -> Any:
            if holds():
                return ours(original, *args, **kwargs)
            return original(*args, **kwargs)

        last = original, either
        return either

    return make


def replaced_now() -> dict[str, list[str]]:
    """By whom -> the names that are replaced now, those replaced last at the end.

    >>> import math
    >>> with patched("an example", math, {"pi": 3}):
    ...     replaced_now()["an example"]
    ['math.pi']
    """
    replaced: dict[str, list[str]] = {}
    with _lock:
        for patches in _in_force:
            replaced.setdefault(patches.by, []).extend(patches.names())
    return replaced


def report() -> str:
    """``replaced_now()`` for people: a line a name."""
    lines = [f"{name}  by {by}" for by, names in replaced_now().items() for name in names]
    return "\n".join(lines) or "nothing is replaced"


# -- torchrun's variables ---

#: In which torchrun tells a process its rank.
RANK_VARIABLES = ("RANK", "LOCAL_RANK")


@contextmanager
def torchrun_variables(world_size: int, rank: int | None = None) -> Iterator[None]:
    """Inside, the environment tells of a world on one host, as torchrun does; of a rank, too, if it
    is given. Libraries that find none take it that they are alone."""
    numbers = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0}
    numbers |= {} if rank is None else dict.fromkeys(RANK_VARIABLES, rank)
    shown = {name: str(number) for name, number in numbers.items()}
    shown |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    before = {name: os.environ.get(name) for name in shown}
    os.environ.update(shown)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
