"""The line of the user's program that is being run or traced."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys

import typing_extensions  # torch depends on it

from fcoll import _torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_DEMOS = os.path.join(_HERE, "demos.py")  # written as a user's program
# what torch's functions are wrapped by stands between them and the user's line
_WRAPPERS = (contextlib.__file__, functools.__file__, typing_extensions.__file__)
_LIBRARIES = (
    _HERE + os.sep,
    _torch.TORCH_DIR + os.sep,
    "<frozen ",
    "<eval_with_key>",
    *map(os.path.abspath, _WRAPPERS),
)


# Inductor's cache: a hash for a name, in a folder of its first letters
_GENERATED = re.compile(r"/[a-z0-9]{2}/c[a-z0-9]{50,}\.py$")


def is_library(filename: str) -> bool:
    """Is this a file of torch's or fcoll's, or generated, rather than the user's?"""
    if filename.startswith(_LIBRARIES):
        return filename != _DEMOS
    return len(filename) > 55 and _GENERATED.search(filename) is not None


def user_site() -> tuple[str, int] | None:
    """The nearest frame outside torch and fcoll, as (file name, line)."""
    frame = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def user_line() -> str | None:
    """The user's line as "model.py:31"; while Dynamo traces, the line being traced."""
    for frame in reversed(_torch.traced_stack()):
        if not is_library(frame.filename):
            return show((frame.filename, frame.lineno or 0))
    site = user_site()
    return show(site) if site else None


def show(site: tuple[str, int]) -> str:
    """A site as people read it: relative to the working directory where it is below it.

    >>> show((os.path.join(os.getcwd(), "model.py"), 31))
    'model.py:31'
    """
    filename, line = site
    below = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return f"{filename if below.startswith('..') else below}:{line}"
