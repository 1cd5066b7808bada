"""setuptools' build backend, and a wheel that carries the C++ part, compiled for one torch and any
x86_64.

The torch is that of the environment which pip installs into. An isolated build does not see it, so
the Python that has it compiles, in a process of its own; only where none has a torch that serves is
one downloaded (2.13.0, or FCOLL_TORCH).

Where it cannot be compiled the wheel goes without it: it is compiled at the first collective then.
An editable install has none either.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import Distribution, build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that stay as they are

ROOT = Path(__file__).parents[4]
PREBUILT = Path(__file__).parents[1] / "prebuilt"  # cache.FOLDER, which torch is needed to import
DEFAULT = "2.13.0"
# Not imported, which would take seconds: its version, if this Python is the one that the wheel is
# for, by whose name the fast path is found.
_FIND = """
import importlib.metadata, sys
if sys.implementation.cache_tag == "{tag}":
    print(importlib.metadata.version("torch"))
"""
_COMPILE = """
import sys
sys.path.insert(0, {root!r})
from fcoll.transport.native import build
try:
    build.make_prebuilt()
except build.BuildFailed as error:
    sys.exit(f"fcoll: {{error}}")
"""


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What is downloaded for the build: a torch, whose classes change between versions, only if
    there is none to compile with."""
    needed = build_meta.get_requires_for_build_wheel(config_settings)
    if found := installed_torch():
        say("compiles its C++ part for torch {1} of {0}".format(*found))
        return needed
    version = os.environ.get("FCOLL_TORCH") or DEFAULT
    if os.sep in version:
        sys.exit(f"fcoll: FCOLL_TORCH={version} is no Python of this version that has torch")
    say(
        f"no torch to compile its C++ part with, so torch {version} is downloaded for the build: "
        "200 MB to 6 GB. Install torch first, or set FCOLL_TORCH to a version or to a Python "
        "that has torch"
    )
    return [*needed, f"torch=={version}", "sympy", "numpy"]


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    found = installed_torch()
    # the environment of the build has the torch that was downloaded for it
    python, variables = (found[0], _outside()) if found else (sys.executable, None)
    command = [python, "-c", _COMPILE.format(root=str(ROOT))]
    if subprocess.run(command, env=variables).returncode == 0:
        # a wheel for one platform: its name says which
        setattr(Distribution, "has_ext_modules", lambda self: True)  # noqa: B010
    else:
        say("the wheel goes without its C++ part, which is compiled at the first collective")
    try:
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    finally:
        shutil.rmtree(PREBUILT, ignore_errors=True)


def installed_torch() -> tuple[str, str] | None:
    """(the Python that has it, its version) of a torch that can be compiled with."""
    asked = os.environ.get("FCOLL_TORCH", "")
    for python in _pythons(asked):
        try:
            command = [python, "-c", _FIND.format(tag=sys.implementation.cache_tag)]
            told = subprocess.run(command, env=_outside(), capture_output=True, text=True)
        except OSError:  # there is no such Python
            continue
        version = told.stdout.strip()
        if version and _serves(version, asked):
            return python, version
    return None


def _pythons(asked: str) -> Iterator[str]:
    """Where torch may be: the Python that was named; pip's own, which is this one; that of the
    active environment, and the one below a temporary environment, as other installers make it."""
    if os.sep in asked:
        yield asked
        return
    yield sys.executable
    if "VIRTUAL_ENV" in os.environ:
        yield str(Path(os.environ["VIRTUAL_ENV"], "bin", "python"))
    yield str(Path(sys.base_prefix, "bin", "python3"))


def _serves(version: str, asked: str) -> bool:
    """Is it the version that was asked for, or one that fcoll is for?

    >>> _serves("2.13.0+cpu", "2.13.0"), _serves("2.13.0+cpu", "2.14.1"), _serves("2.14.1", "")
    (True, False, True)
    """
    if asked and os.sep not in asked:
        return asked in (version, version.partition("+")[0])
    sys.path.insert(0, str(ROOT))
    from fcoll.imports import tested

    return tested(version)


def _outside() -> dict[str, str]:
    """Variables without those by which pip hides the environment's packages from a build."""
    hidden = ("PYTHONPATH", "PYTHONNOUSERSITE")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def say(text: str) -> None:
    """Shown by ``pip install -v``, or where the build fails."""
    print(f"fcoll: {text}", file=sys.stderr, flush=True)
