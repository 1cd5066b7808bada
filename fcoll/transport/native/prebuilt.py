"""The library that came with the wheel, and whether it serves here.

It runs on any x86-64 CPU, with one torch: what it was made for is written beside it. Elsewhere the
library is compiled as if there were none.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

FOLDER = Path(__file__).parent / "prebuilt"
LIBRARY = "fcoll.so"


def made_for(torch_version: str) -> str:
    return f"torch {torch_version} on {platform.machine()}"


@functools.cache
def prebuilt_library(torch_version: str) -> Path | None:
    """Its path; None where there is none, or not one for this torch."""
    try:
        note = (FOLDER / "made_for.txt").read_text()
    except OSError:
        return None
    return FOLDER / LIBRARY if note == made_for(torch_version) else None
