"""The library that came with the wheel, and whether it serves here.

It is compiled for every CPU of the x86-64-v3 level (AVX2, since 2013), and for one torch: what it
was made for is written beside it. Elsewhere the library is compiled as if there were none.
"""

from __future__ import annotations

import functools
from pathlib import Path

from fcoll.transport.native import cache

FOLDER = Path(__file__).parent / "prebuilt"
LIBRARY = "fcoll.so"
LEVEL = "x86-64-v3"
_FLAGS_OF_LEVEL = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}


def made_for(torch_version: str) -> str:
    return f"torch {torch_version} on {LEVEL}"


@functools.cache
def prebuilt_library(torch_version: str) -> Path | None:
    """Its path; None where there is none, or not one for this torch and CPU."""
    try:
        note = (FOLDER / "made_for.txt").read_text()
    except OSError:
        return None
    fits = set(cache.instruction_set().split()) >= _FLAGS_OF_LEVEL
    return FOLDER / LIBRARY if fits and note == made_for(torch_version) else None
