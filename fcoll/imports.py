"""Do something when a module is imported, or before it is, without importing it."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, act: Callable[[], object]) -> None:
    """Call a function as soon as a module is there: now, or at the end of its first import.

    >>> done = []
    >>> when_imported("sys", lambda: done.append("sys is there"))
    >>> done
    ['sys is there']
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


def before_import(wanted: Callable[[str], bool], act: Callable[[], object]) -> None:
    """Call a function once, before the first import of a module whose name is wanted."""
    sys.meta_path.insert(0, _Watch(wanted, act))


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing; goes when it has acted."""

    def __init__(self, wanted: Callable[[str], bool], act: Callable[[], object]) -> None:
        self.wanted, self.act = wanted, act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if self in sys.meta_path and self.wanted(name):
            sys.meta_path.remove(self)
            self.act()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, once, by asking the others; its loader is wrapped."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        for finder in [f for f in sys.meta_path if f is not self]:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads as the loader that it stands for; then it leaves no trace of itself."""

    def __init__(self, inner: Any, finder: _Finder) -> None:
        self.inner, self.finder = inner, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.inner
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        self.inner.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
            self.finder.act()
