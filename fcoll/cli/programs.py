"""What a command line names as a program: a function of a module or file, a demo, a saved trace."""

from __future__ import annotations

import errno
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fcoll import source
from fcoll.cli.demos import DEMOS
from fcoll.errors import BadTarget, BadTraceFile
from fcoll.tracing.trace import Trace

#: build(mesh) -> (fn, args)
Build = Callable[[Any], Any]


def demo(name: str) -> Build:
    if name not in DEMOS:
        raise BadTarget(target=f"--demo {name}", why=f"the demos are {', '.join(DEMOS)}")
    return DEMOS[name]


def load(target: str | None) -> Build:
    """The function that "pkg.mod:build" or "path/file.py:build" names."""
    if not target:
        raise BadTarget(target="nothing", why="no program was named")
    name, _, attribute = target.rpartition(":")
    if not name or not attribute:
        raise BadTarget(target=target, why="it has no :function")
    found = _import(name, target).get(attribute)
    if found is None:
        raise BadTarget(target=target, why=f"{name} has no function {attribute!r}")
    if not callable(found):
        raise BadTarget(target=target, why="it is not a function")
    return _checked(found, target)


def _import(name: str, target: str) -> dict[str, Any]:
    """The names of a module or file. Errors of its own code are the program's."""
    try:
        if name.endswith(".py"):
            return vars(_run_file(Path(name)))
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return vars(importlib.import_module(name))
    except (ImportError, OSError) as error:
        if line_of(error):
            raise
        raise BadTarget(target=target, why=f"{type(error).__name__}: {error}") from error


def _run_file(path: Path) -> ModuleType:
    """A file as a module of its name: its classes are found by it, and torch.compile asks for it.
    What lies beside it can be imported, as where Python runs it."""
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem if path.stem not in sys.modules else f"program_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as Python's own import does
        raise
    return module


def _checked(build: Build, target: str) -> Build:
    """The same function; what it returns must be a program."""

    @functools.wraps(build)
    def checked(mesh: Any) -> Any:
        made = build(mesh)
        is_pair = isinstance(made, (tuple, list)) and len(made) == 2
        if not (is_pair and callable(made[0]) and isinstance(made[1], (tuple, list))):
            why = f"the function at {_defined_at(build)} returned {_shown(made)}, not (fn, args)"
            raise BadTarget(target=target, why=why)
        return made

    return checked


def _defined_at(fn: Any) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return source.show((code.co_filename, code.co_firstlineno)) if code else type(fn).__name__


def _shown(made: Any) -> str:
    if isinstance(made, (tuple, list)):
        return f"({', '.join(type(x).__name__ for x in made)})"
    return "None" if made is None else f"a {type(made).__name__}"


def line_of(error: BaseException) -> str:
    """The user's line that an error comes from, "train.py:31"; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename and not source.is_library(error.filename):
        return source.show((error.filename, error.lineno or 1))
    return source.line_of(error)


def read_trace(path: str) -> Trace:
    """A trace that `fcoll report --save` wrote."""
    try:
        return Trace.from_json(Path(path).read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadTraceFile(path=path, why=f"{type(error).__name__}: {error}") from error
