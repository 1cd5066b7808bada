"""What a command line names as a program: a function of a module or file, a demo, a saved trace."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fcoll.demos import DEMOS
from fcoll.errors import BadTarget
from fcoll.trace import Trace

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
    try:
        found = _import(name, attribute)
    except (ImportError, AttributeError, KeyError, OSError) as error:
        raise BadTarget(target=target, why=f"{type(error).__name__}: {error}") from error
    if not callable(found):
        raise BadTarget(target=target, why="it is not a function")
    return found


def _import(name: str, attribute: str) -> Any:
    if name.endswith(".py"):
        return runpy.run_path(name)[attribute]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(name), attribute)


def read_trace(path: str) -> Trace:
    try:
        return Trace.from_json(Path(path).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadTarget(target=path, why=f"{type(error).__name__}: {error}") from error
