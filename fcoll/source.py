"""The line of the user's program that is being run or traced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
import typing_extensions  # torch depends on it

Site = tuple[str, int]  # file name, line

_HERE = os.path.dirname(os.path.abspath(__file__))
_COMPILER, _BACKEND = (
    os.path.join(os.path.dirname(_HERE), name) for name in ("inductor_ext", "fcoll_backend")
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_DEMOS = os.path.join(_HERE, "cli", "demos.py")  # written as a user's program
# what torch's functions are wrapped by stands between them and the user's line
_WRAPPERS = (
    *(contextlib.__file__, dataclasses.__file__, functools.__file__),
    typing_extensions.__file__,
)
_LIBRARIES = (
    *(folder + os.sep for folder in (_HERE, _COMPILER, _BACKEND, _TORCH)),
    "<frozen ",
    "<eval_with_key>",
    *map(os.path.abspath, _WRAPPERS),
)

# Inductor's cache: a hash for a name, in a folder of its first letters
_GENERATED = re.compile(r"/[a-z0-9]{2}/c[a-z0-9]{50,}\.py$")
_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def is_library(filename: str) -> bool:
    """Is this a file of torch's or fcoll's, or generated, rather than the user's?"""
    if filename.startswith(_LIBRARIES):
        return filename != _DEMOS
    if filename in _commands:
        return True
    return len(filename) > 55 and _GENERATED.search(filename) is not None


_commands: set[str] = set()


@contextlib.contextmanager
def command(filename: str) -> Iterator[None]:
    """Inside, this file is but the command that runs fcoll: no line of a program."""
    names = {filename, os.path.abspath(filename)} - _commands
    _commands.update(names)
    try:
        yield
    finally:
        _commands.difference_update(names)


def is_own_or_torchs(filename: str) -> bool:
    """Is this a file of fcoll's packages or of torch's own, so not a generated one?"""
    return filename.startswith(_LIBRARIES)


def _is_made(frame: FrameType) -> bool:
    """Is it the constructor that dataclasses wrote for a class of ours?"""
    code = frame.f_code
    return code.co_filename == "<string>" and code.co_name == "__init__"


class _Part(threading.local):
    """Of this thread: simulated ranks are threads, each in its own."""

    name = ""


_part = _Part()


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Inside, what is issued belongs to this part of the program, which has no line of its own:
    traces and profiles show it beside the line.

    >>> from fcoll.source import current_part, part
    >>> with part("bucket_0"):
    ...     current_part()
    'bucket_0'
    """
    before, _part.name = _part.name, name
    try:
        yield
    finally:
        _part.name = before


def current_part() -> str:
    return _part.name


def user_site() -> Site | None:
    """The nearest frame outside torch and fcoll."""
    frame = sys._getframe(1)
    while frame is not None and (is_library(frame.f_code.co_filename) or _is_made(frame)):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def user_line(traced: Iterable[Any] = ()) -> str | None:
    """The user's line as "model.py:31"; of the frames that a compiler is tracing, if there are."""
    for frame in reversed(list(traced)):
        if not is_library(frame.filename):
            return show((frame.filename, frame.lineno or 0))
    site = user_site()
    return show(site) if site else None


def line_of(error: BaseException) -> str:
    """The user's line at which it was raised: the innermost in its traceback; or empty."""
    found, at = "", error.__traceback__
    while at is not None:
        filename = at.tb_frame.f_code.co_filename
        if not is_library(filename):
            found = show((filename, at.tb_lineno))
        at = at.tb_next
    return found


def user_frames(stack_trace: str | None) -> tuple[Site, ...]:
    """The user's frames in a stack trace as graphs keep it, innermost last."""
    if not stack_trace:
        return ()
    return tuple([site for site in _frames(stack_trace) if not is_library(site[0])])


@functools.lru_cache(maxsize=4096)
def _frames(stack_trace: str) -> tuple[Site, ...]:
    """All of them. The nodes of one line have the same trace."""
    return tuple((name, int(line)) for name, line in _FRAME.findall(stack_trace))


def show(site: Site) -> str:
    """A site as people read it: relative to the working directory where it is below it.

    >>> show((os.path.join(os.getcwd(), "model.py"), 31))
    'model.py:31'
    """
    filename, line = site
    below = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return f"{filename if below.startswith('..') else below}:{line}"
