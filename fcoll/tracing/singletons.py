"""What a process keeps once and what holds a rank, as accelerate's PartialState: several ranks in
one process would share it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RANKS = (
    *("rank", "local_rank", "global_rank", "process_index", "local_process_index"),
    *("world_size", "num_processes"),
)
_OWN = ("torch", "fcoll", "fcoll_pytest", "inductor_ext", "pytest", "_pytest")


def hint() -> str:
    """Words for a test that failed on simulated ranks, if this process has such objects."""
    found = sorted({path for path, x in _kept_once() if _holds_rank(x)})
    if not found:
        return ""
    shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    module = found[0].rpartition(".")[0]
    return (
        f"{shown}: one for the whole process, and it holds a rank or the number of ranks. "
        "Simulated ranks are threads and share it; if that is the cause, let each have its own, "
        f'@pytest.mark.ranks(n, isolate=["{module}"]), or run the test on real processes: '
        "@pytest.mark.ranks(n, processes=True)."
    )


@contextmanager
def as_before() -> Iterator[None]:
    """Inside, a rank is traced. Afterwards dicts that classes keep their objects' attributes in,
    and that have come to hold its rank, have what they had: the next rank finds its own."""
    before = {id(x): dict(x) for x in _shared_dicts()}
    try:
        yield
    finally:
        for x in filter(_holds_rank, _shared_dicts()):
            x.clear()
            x.update(before.get(id(x), {}))


_dicts: tuple[int, list[dict[Any, Any]]] = 0, []  # of so many modules


def _shared_dicts() -> list[dict[Any, Any]]:
    """Of classes; looked for again where modules were imported, since it takes up to 0.1 s."""
    global _dicts
    if _dicts[0] != len(sys.modules):
        _dicts = len(sys.modules), [x for _, x in _kept_once() if type(x) is dict]
    return _dicts[1]


def _kept_once() -> Iterator[tuple[str, Any]]:
    """("lib.state.State", object) of the dicts and objects of its own that a class has, and of the
    objects that a module has of its classes."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _OWN or getattr(module, "__spec__", None) is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                kept = [x for x in list(vars(value).values()) if type(x) in (dict, value)]
                yield from ((f"{name}.{key}", x) for x in kept)
            elif getattr(type(value), "__module__", None) == name:
                yield f"{name}.{key}", value


def _holds_rank(x: Any) -> bool:
    """Is there a number for a rank, or for how many there are, among its attributes?"""
    attributes = x if type(x) is dict else getattr(x, "__dict__", {})
    return any(isinstance(attributes.get(name), int) for name in _RANKS)
