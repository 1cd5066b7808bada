"""setuptools' build backend, and a wheel that carries the C++ part compiled for any recent x86_64.

Where it cannot be compiled the wheel goes without it: it is compiled at the first collective then.
An editable install has none either.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from setuptools import Distribution, build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that stay as they are

ROOT = Path(__file__).parents[4]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """The torch that the wheel is for: its classes change between versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = [name for name in project["dependencies"] if name.startswith("torch")]
    return [*build_meta.get_requires_for_build_wheel(config_settings), *torch, "numpy"]


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
