"""Globals of modules that each rank has for itself, where ranks share a process.

Libraries keep a rank's groups and numbers in globals of a module (Megatron's parallel_state) or on
a class (accelerate's PartialState). Exactly one rank runs at a time: what the modules hold is kept
when a rank stops and put back when it goes on. Containers stay the same objects, since others may
have imported them by name; what is in them changes.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

#: Modules of libraries that keep a rank's state.
KNOWN = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel.random",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.rerun_state_machine",
    "megatron.training.global_vars",  # of Megatron-LM's own scripts
    "accelerate.state",
)

Held = tuple[Any, Any]  # (module, class or container, what is in it)

_CONTAINERS = (dict, list, set, deque)
_MISSING = object()


class Globals:
    """What the modules of these names, and those below them, hold for one rank."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.packages = frozenset(name.partition(".")[0] for name in names)
        self.first = self._walk(_imported(names))  # what a rank begins with
        self.saved = list(self.first)
        self.copies = [self]  # those of all ranks and of the caller

    def copy(self) -> Globals:
        """The globals that a rank begins with, as a forked process does."""
        copied = copy.copy(self)
        copied.first, copied.saved = list(self.first), list(self.saved)
        self.copies.append(copied)
        return copied

    def save(self) -> None:
        """Keep what is there now."""
        if self.first:  # also containers that the rank has given up: others may know them
            self.saved = self._walk(owner for owner, _ in self.first)

    def restore(self) -> None:
        """Put it back."""
        for owner, contents in self.saved:
            _put(owner, contents)

    def begin_again(self) -> None:
        """Put back what the rank began with."""
        for owner, contents in self.first:
            _put(owner, contents)

    def is_changed(self) -> bool:
        """Is something else there than what was there first?"""
        return any(not _same(_contents(owner), contents) for owner, contents in self.first)

    @contextmanager
    def following_imports(self) -> Iterator[None]:
        """Inside, a module that a rank imports is for all others what it was when imported."""
        if not self.names:
            yield
            return

        def add(module: ModuleType) -> None:
            entries = self._walk([module])
            for each in self.copies:
                each.saved += entries
                each.first += entries

        finder = _ImportWatcher(self.names, add)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, one rank runs alone; afterwards all is what it was."""
        with self.following_imports():
            try:
                yield
            finally:
                self.restore()

    def _walk(self, roots: Iterable[Any]) -> list[Held]:
        """All that can be reached over containers, classes of the modules, and objects of classes
        of their packages."""
        entries: list[Held] = []
        visited, todo = set(), list(roots)
        while todo:
            x = todo.pop()
            if id(x) in visited:
                continue
            visited.add(id(x))
            if _is(x, ModuleType, type) or _is_namespace(x):
                if not _covers(self.names, _module_of(x)):
                    continue
            elif not _is(x, *_CONTAINERS):
                if _is(x, tuple):
                    todo.extend(x)
                elif self._is_state(x):
                    todo.append(vars(x))
                continue
            contents = _contents(x)
            entries.append((x, contents))
            todo.extend(contents.values() if isinstance(contents, dict) else contents)
        return entries

    def _is_state(self, x: Any) -> bool:
        kind = type(x)
        of_package = _module_of(kind).partition(".")[0] in self.packages
        return (of_package or kind is SimpleNamespace) and hasattr(x, "__dict__")


def _is(x: Any, *kinds: type) -> bool:
    """isinstance that asks only the type: an object may warn when its __class__ is read, as
    torch.distributed.reduce_op does."""
    return issubclass(type(x), kinds)


def _contents(owner: Any) -> Any:
    if _is(owner, *_CONTAINERS):
        return dict(owner) if isinstance(owner, dict) else list(owner)
    return _attributes(owner)


def _same(now: Any, then: Any) -> bool:
    """Are they the same objects, by the same names?"""
    if isinstance(now, dict):
        return now.keys() == then.keys() and all(now[name] is x for name, x in then.items())
    return len(now) == len(then) and all(x is y for x, y in zip(now, then, strict=True))


def _attributes(owner: Any) -> dict[str, Any]:
    """A module's or class's own, without submodules, which the whole process shares."""
    return {
        name: value
        for name, value in vars(owner).items()
        if not ((name.startswith("__") and name.endswith("__")) or _is(value, ModuleType))
    }


def _put(owner: Any, contents: Any) -> None:
    if isinstance(owner, _CONTAINERS):
        owner.clear()
        if isinstance(owner, (dict, set)):
            owner.update(contents)
        else:
            owner.extend(contents)
        return
    kind: Any = type if isinstance(owner, type) else ModuleType
    now = _attributes(owner)
    for name in now.keys() - contents.keys():
        kind.__delattr__(owner, name)
    for name, value in contents.items():
        if now.get(name, _MISSING) is not value:
            kind.__setattr__(owner, name, value)


def _is_namespace(x: Any) -> bool:
    """Is it the dict of a module?"""
    return _is(x, dict) and _is(dict.get(x, "__spec__"), ModuleSpec)


def _module_of(x: Any) -> str:
    """The name of a module, by its dict too, or of that which a class is from; some classes have a
    descriptor of that name."""
    if _is(x, ModuleType):
        return x.__name__
    name = x["__name__"] if _is(x, dict) else x.__module__
    return name if isinstance(name, str) else ""


def _covers(names: tuple[str, ...], module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _imported(names: tuple[str, ...]) -> Iterator[ModuleType]:
    for name in names:
        module = sys.modules.get(name)
        if module is not None:
            yield module
        if hasattr(module, "__path__"):  # a package
            yield from (m for n, m in list(sys.modules.items()) if n.startswith(f"{name}."))


class _ImportWatcher:
    """A finder ahead of the others in sys.meta_path that calls ``imported`` after an import."""

    def __init__(self, names: tuple[str, ...], imported: Callable[[ModuleType], None]) -> None:
        self.names, self.imported = names, imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not _covers(self.names, name):
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        loader = getattr(spec, "loader", None)
        if hasattr(loader, "exec_module") and not isinstance(loader, type):
            execute = loader.exec_module  # type: ignore[union-attr]

            def executed(module: ModuleType) -> None:
                execute(module)
                self.imported(sys.modules.get(name, module))

            loader.exec_module = executed  # type: ignore[union-attr]
        return spec


# -- what a process keeps once and what holds a rank, as accelerate's PartialState: several ranks in
# one process would share it ---

_RANKS = (
    *("rank", "local_rank", "global_rank", "process_index", "local_process_index"),
    *("world_size", "num_processes"),
)
_OWN = ("torch", "fcoll", "fcoll_pytest", "inductor_ext", "pytest", "_pytest")


def singletons_hint() -> str:
    """Words for a test that failed on simulated ranks, if this process has such objects."""
    paths = sorted({path for path, x in _kept_once() if _holds_rank(x)})
    if not paths:
        return ""
    shown = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
    module = paths[0].rpartition(".")[0]
    return (
        f"{shown}: one for the whole process, and it holds a rank or the number of ranks. "
        "Simulated ranks are threads and share it; if that is the cause, let each have its own, "
        f'@pytest.mark.ranks(n, isolate=["{module}"]), or run the test on real processes: '
        "@pytest.mark.ranks(n, processes=True)."
    )


@contextmanager
def shared_dicts_put_back() -> Iterator[None]:
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
    """The dicts of classes, searched again only after imports, since it takes up to 0.1 s."""
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
                objects = [x for x in list(vars(value).values()) if type(x) in (dict, value)]
                yield from ((f"{name}.{key}", x) for x in objects)
            elif getattr(type(value), "__module__", None) == name:
                yield f"{name}.{key}", value


def _holds_rank(x: Any) -> bool:
    """Is there a number for a rank, or for how many there are, among its attributes?"""
    attributes = x if type(x) is dict else getattr(x, "__dict__", {})
    return any(isinstance(attributes.get(name), int) for name in _RANKS)
