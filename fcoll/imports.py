"""Do something when a module is imported, or before it is, without importing it; and import names
that a version of torch need not have."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

#: fcoll's own version, which pyproject.toml has too.
VERSION = "0.5.0"


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


def before_import(matches: Callable[[str], bool], act: Callable[[], object]) -> None:
    """Call a function once, before the first import of a module whose name matches."""
    sys.meta_path.insert(0, _ImportWatch(matches, act))


class _ImportWatch(importlib.abc.MetaPathFinder):
    """Finds nothing; goes when it has acted."""

    def __init__(self, matches: Callable[[str], bool], act: Callable[[], object]) -> None:
        self.matches, self.act = matches, act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if self in sys.meta_path and self.matches(name):
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


# -- private names of torch: they come and go ---

#: The versions of torch that the tests are run on; pyproject.toml asks for one of them.
TESTED = ("2.13", "2.14", "2.15")


class MissingInTorch(RuntimeError):
    """A feature needs a private name that this version of torch does not have."""


def tested(version: str) -> bool:
    """Are the tests run on this version of torch?

    >>> tested("2.15.1+cpu"), tested("2.16.0")
    (True, False)
    """
    return ".".join(version.split(".")[:2]) in TESTED


def warn_of_untested(version: str) -> None:
    """Say so, once, where torch is not one of those: its private names may have changed."""
    if not tested(version):
        warnings.warn(
            f"fcoll is tested with torch {TESTED[0]} to {TESTED[-1]}, this is {version}: what "
            "needs a private name of torch that is gone raises MissingInTorch, which names it.",
            stacklevel=2,
        )


def private(module: str, name: str = "", instead: Any = None) -> Any:
    """A private name of torch, or a module; where this version has none, ``instead``, or else what
    raises MissingInTorch when it is used.

    >>> private("collections", "OrderedDict").__name__
    'OrderedDict'
    >>> private("collections", "DisorderedDict")()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    fcoll.imports.MissingInTorch: torch 2.13.0 has no collections.DisorderedDict
    """
    try:
        value = importlib.import_module(module)
        for part in filter(None, name.split(".")):
            value = getattr(value, part)
        return value
    except (ImportError, AttributeError):
        return _Missing(f"{module}.{name}".rstrip(".")) if instead is None else instead


def private_names(module: str, *names: str) -> list[Any]:
    return [private(module, name) for name in names]


def is_missing(value: Any) -> bool:
    """Is it the stand-in for a name that this version of torch lacks?"""
    return isinstance(value, _Missing)


class _Missing:
    """Stands for a name that is not there. Nothing is an instance of it."""

    def __init__(self, path: str) -> None:
        self.__dict__["path"] = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise missing(self.path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own, asked of anything
            raise AttributeError(name)
        raise missing(self.path)

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        path = self.path

        def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
            raise missing(path)

        return (type("Missing", (), {"__new__": refuse}),)


def missing(path: str) -> MissingInTorch:
    version = getattr(sys.modules.get("torch"), "__version__", "?")
    return MissingInTorch(
        f"torch {version} has no {path}, which this needs. fcoll is tested with torch "
        f"{TESTED[0]} to {TESTED[-1]}: install one of them, or a newer fcoll."
    )


def say_what_is_missing(module: str) -> None:
    """Where torch is not a tested version, the functions of a module raise MissingInTorch instead
    of an AttributeError or ImportError of a module of torch's. Elsewhere they stay as they are."""
    names = vars(sys.modules[module])
    if tested(sys.modules["torch"].__version__):
        return
    for name, value in list(names.items()):
        if isinstance(value, FunctionType) and value.__module__ == module:
            names[name] = _telling(value)


def _telling(fn: Any) -> Any:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except (AttributeError, ImportError) as error:
            path = _name_in_torch(error)
            if path is None:
                raise
            raise missing(path) from error

    return call


def _name_in_torch(error: AttributeError | ImportError) -> str | None:
    """The name of torch's that an error is about, None if it is about something else."""
    if isinstance(error, ImportError):
        return error.name if (error.name or "").partition(".")[0] == "torch" else None
    owner = error.obj
    path = getattr(owner, "__name__", "") if isinstance(owner, (ModuleType, type)) else ""
    if isinstance(owner, type):
        path = f"{owner.__module__}.{path}"
    return f"{path}.{error.name}" if path.partition(".")[0] == "torch" else None
