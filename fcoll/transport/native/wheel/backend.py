"""setuptools' build backend, and a wheel that carries the C++ part, compiled for one torch (2.13.0,
or FCOLL_TORCH) and any x86_64.

Where it cannot be compiled the wheel goes without it: it is compiled at the first collective then.
An editable install has none either.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that stay as they are

ROOT = Path(__file__).parents[4]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """The torch that the wheel's C++ part is for, whose classes change between versions."""
    torch = os.environ.get("FCOLL_TORCH", "2.13.0")
    needed = build_meta.get_requires_for_build_wheel(config_settings)
    return [*needed, f"torch=={torch}", "sympy", "numpy"]


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    sys.path.insert(0, str(ROOT))
    from fcoll.transport.native import build, prebuilt

    try:
        build.make_prebuilt()
        # a wheel for one platform: its name says which
        setattr(Distribution, "has_ext_modules", lambda self: True)  # noqa: B010
    except build.BuildFailed as error:
        print(f"fcoll: the wheel goes without its C++ part: {error}", file=sys.stderr)
    try:
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    finally:
        shutil.rmtree(prebuilt.FOLDER, ignore_errors=True)
