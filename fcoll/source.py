"""The line of the user's program that is being run or traced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
import typing_extensions  # torch depends on it

Site = tuple[str, int]  # file name, line
Frames = tuple[Site, ...]  # innermost last

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
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_PYTHONS = sysconfig.get_paths()["stdlib"] + os.sep
_CALLS = " > "  # between a line of the program and that of the library which it calls


def is_library(filename: str) -> bool:
    """Is this a file of torch's or fcoll's, or generated, rather than the user's?"""
    if filename.startswith(_LIBRARIES):
        return filename != _DEMOS
    if filename in _commands:
        return True
    return len(filename) > 55 and _GENERATED.search(filename) is not None


def is_installed(filename: str) -> bool:
    """Is this a file of a package that was installed?"""
    return _INSTALLED.match(filename) is not None


def is_pythons(filename: str) -> bool:
    """Is this a file of Python's own library?"""
    return filename.startswith((_PYTHONS, "<frozen ")) and not _INSTALLED.match(filename)


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


def _is_generated_init(filename: str, function: str) -> bool:
    """Is it the constructor that dataclasses wrote for a class of ours?"""
    return filename == "<string>" and function == "__init__"


class _Part(threading.local):
    """The part that each thread is in: simulated ranks are threads."""

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


def program_sites(stack: Iterable[Site]) -> Frames:
    """Where a call is from, of its stack, innermost first: the nearest line that is not torch's,
    fcoll's or Python's own. If that is in an installed package, the program's own line that led to
    it comes before it; a program that is itself installed has none.

    >>> torch_file, lib = torch.__file__, "/usr/lib/python3/dist-packages/lib/tp.py"
    >>> program_sites([(torch_file, 3), (lib, 92), (lib, 7), ("train.py", 31), ("train.py", 40)])
    (('train.py', 31), ('/usr/lib/python3/dist-packages/lib/tp.py', 92))
    """
    library: Frames = ()
    for site in stack:
        filename = site[0]
        if is_library(filename):
            continue
        if "-packages" in filename and _INSTALLED.match(filename):  # the first costs 30 ns, not 300
            library = library or (site,)
        elif not is_pythons(filename):
            return (site, *library)
    return library


def _outwards(frame: FrameType | None) -> Iterator[Site]:
    while frame is not None:
        code = frame.f_code
        if not _is_generated_init(code.co_filename, code.co_name):
            yield code.co_filename, frame.f_lineno
        frame = frame.f_back


def sites_from(frame: FrameType | None) -> Frames:
    """The sites of the call that a frame is in."""
    return program_sites(_outwards(frame))


def user_sites() -> Frames:
    """The sites of the call that is being run: see program_sites."""
    return program_sites(_outwards(sys._getframe(1)))


def sites_of(frames: Iterable[dict[str, Any]]) -> Frames:
    """Those of a call whose stack was noted, as ``_torch.frames_of`` reads it."""
    return program_sites(
        (f["filename"], f["line"])
        for f in frames
        if not _is_generated_init(f["filename"], f["name"])
    )


def user_line(traced: Iterable[Any] = ()) -> str | None:
    """The user's line as "model.py:31"; of the frames that a compiler is tracing, if there are."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traced]
    return show(*(program_sites(reversed(frames)) or user_sites())) or None


def line_in(frames: Frames) -> str:
    """The user's line of a call that has these frames; or empty."""
    return show(*program_sites(reversed(frames)))


def line_of(error: BaseException) -> str:
    """The user's line at which it was raised: the innermost in its traceback; or empty."""
    stack = [(f.f_code.co_filename, line) for f, line in walk_tb(error.__traceback__)]
    return show(*program_sites(reversed(stack)))


def user_frames(stack_trace: str | None) -> tuple[Site, ...]:
    """The user's frames in a stack trace as graphs keep it, innermost last."""
    if not stack_trace:
        return ()
    return tuple([site for site in _frames(stack_trace) if not is_library(site[0])])


@functools.lru_cache(maxsize=4096)
def _frames(stack_trace: str) -> tuple[Site, ...]:
    """All of them. The nodes of one line have the same trace."""
    return tuple((name, int(line)) for name, line in _FRAME.findall(stack_trace))


def show(*sites: Site) -> str:
    """Where a call is from as people read it: files of installed packages relative to where these
    are, others to the working directory where they are below it; empty if it is not known.

    >>> show((os.path.join(os.getcwd(), "model.py"), 31))
    'model.py:31'
    >>> show(("train.py", 31), ("/venv/lib/python3.11/site-packages/lib/tp.py", 92))
    'train.py:31 > lib/tp.py:92'
    """
    return _CALLS.join(f"{_short(filename)}:{line}" for filename, line in sites)


def _short(filename: str) -> str:
    if match := _INSTALLED.match(filename):
        return filename[match.end() :]
    below = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return filename if below.startswith("..") else below


def lines_in(shown: str) -> list[str]:
    """The lines that ``show`` put together.

    >>> lines_in("train.py:31 > lib/tp.py:92")
    ['train.py:31', 'lib/tp.py:92']
    """
    return shown.split(_CALLS)


def site_of(line: str) -> Site | None:
    """The site that was shown as this line, if its file is here.

    >>> site_of("torch/nn/functional.py:1") == (os.path.join(_TORCH, "nn", "functional.py"), 1)
    True
    """
    filename, _, number = line.rpartition(":")
    paths = (os.path.join(folder, filename) for folder in ("", *sys.path))
    path = next(filter(os.path.isfile, paths), None)
    return (path, int(number)) if path and number.isdigit() else None
