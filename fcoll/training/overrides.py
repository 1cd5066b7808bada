"""Overrides of torch.distributed's names that take a reducer or its logger: they take ours too.

torch's are C++ and take torch's only. Once a reducer of ours is made, those names pass calls with
ours to ours; all others go where they went.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fcoll.training import _torch

Theirs = Callable[..., Any]
_overrides: dict[str, Callable[[Theirs], Any]] = {}


class Override(type):
    """The type of a class in place of one of torch's: calling it makes one of theirs or of ours,
    and both are its instances."""

    theirs: type
    ours: type
    pick: Callable[..., bool]  # ours, by the arguments?

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return (cls.ours if cls.pick(*args) else cls.theirs)(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.theirs, cls.ours))


def class_of_both(theirs: Any, ours: type, pick: Callable[..., bool]) -> Any:
    """A class that makes one of the two by its arguments."""
    facts = {"theirs": theirs, "ours": ours, "pick": staticmethod(pick), "__doc__": theirs.__doc__}
    return Override(theirs.__name__, (), facts)


def override_class(name: str, ours: type, pick: Callable[..., bool]) -> None:
    """Have torch's class of this name make one of ours where ``pick`` says so of the arguments."""
    _overrides[name] = lambda theirs: class_of_both(theirs, ours, pick)


def override(name: str, ours: Theirs, kinds: tuple[type, ...]) -> None:
    """Have torch's function of this name pass calls with an argument of these kinds to ours."""

    def make(theirs: Theirs) -> Theirs:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_ours = any(isinstance(x, kinds) for x in (*args, *kwargs.values()))
            return (ours if is_ours else theirs)(*args, **kwargs)

        return call

    _overrides[name] = make


def install_overrides() -> None:
    """Put the overrides into torch.distributed, once in a process."""
    while _overrides:
        name, make = _overrides.popitem()
        _torch.replace(name, make)


# -- torch's DistributedDataParallel on our reducer, for some of its modules ---


class _Serving(threading.local):
    """Are reducers to be ours? A flag of each thread: simulated ranks are threads."""

    ours = 0  # how many ask for it: they may end in any order


_serving = _Serving()


@contextmanager
def serving(ours: type) -> Iterator[None]:
    """Inside, on this thread, ``torch.distributed.Reducer(...)`` makes one of ours."""
    if dist.Reducer is not ours and not isinstance(dist.Reducer, Override):
        _torch.replace(
            "Reducer", lambda theirs: class_of_both(theirs, ours, lambda *_: _serving.ours > 0)
        )
    _serving.ours += 1
    try:
        yield
    finally:
        _serving.ours -= 1
