"""Compile the C++ once, at first use, and load it.

The library is cached under the hash of its sources and the exact torch version (the classes it
derives from change between versions). A lock lets one of many ranks compile while the others wait;
if it fails, they fail with it.

Beside it is an extension module of Python's, ``fast``, one for each version of Python, where
Python's headers are installed. Nothing but speed depends on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from fcoll.transport.native import cache
from fcoll.transport.native.compiler import BuildFailed as BuildFailed
from fcoll.transport.native.compiler import Compiler, Unit, includes_torch, say

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp")) + sorted(Path(__file__).parent.glob("*.h"))
_EXTENSION = tuple(
    Path(__file__).parent / name
    for name in ("python.cpp", "gradients.cpp", "buckets.cpp", "backend.cpp")
)
# Until then a process that starts takes over the failure of another: ranks do not start at once.
RETRY_S = 60.0
# Of one core, measured; and what it takes with any number of them: the longest unit.
ALL_CPU_S, LONGEST_S = 44.0, 16.0
RETRY_EXTENSION_S = 3600.0  # all works without it, so that it is not worth an attempt in every job


# The functions of native/python.cpp, once they are loaded; each returns NotImplemented for calls it
# does not serve.
fast: Any = None
_when_loaded: list[Callable[[Any], object]] = []
_loaded = False


def has_fast_path() -> bool:
    """Is the extension in this process?"""
    return fast is not None


def when_loaded(prepare: Callable[[Any], object]) -> None:
    """Call a function with the extension module when it is loaded, before anyone else has it."""
    _when_loaded.append(prepare)


# -- where ---


def library_path() -> Path:
    """Where the library for this machine and these sources is or will be."""
    if found := cache.prebuilt_library(torch.__version__):
        return found
    return cache.cache_dir() / f"fcoll-{library_key()}.so"


@functools.cache
def library_key() -> str:
    """What ranks compare before they share memory: the same sources, compiled for one torch."""
    return cache.key_of(_SOURCES, torch.__version__)


def _extension_path(library: Path) -> Path | None:
    """Where the extension module for this Python is or will be; None without Python's headers."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return library.with_suffix(sysconfig.get_config_var("EXT_SUFFIX")) if headers.exists() else None


# -- make ---


def build(taken_over_s: float = 0.0) -> Path:
    """The path of the compiled library, compiling it if this machine has not yet.

    An attempt of another process that failed while this one waited for it, or up to
    ``taken_over_s`` before, is not repeated: its BuildFailed is raised here, too.
    """
    path = library_path()
    extension = _extension_path(path)
    began = time.time()
    if path.parent != cache.FOLDER and (why_not := cache.untrusted(path)):
        raise BuildFailed(why_not)
    if path.exists() and not _wants_extension(extension, began):
        cache.used(path)
        return path
    if path.exists() and not os.access(path.parent, os.W_OK):
        return path  # somebody else's cache: without the extension then
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path), _compiler(path.parent) as compiler:
        wanted = extension if _wants_extension(extension, began) else None
        if not path.exists():
            if reason := cache.failure_of(path, began - taken_over_s):
                raise BuildFailed(reason)
            _make(path, lambda log: _library(compiler, path, log, bool(wanted)))
            cache.prune(path.parent)
        if wanted:
            try:
                _make(wanted, lambda log: _extension(compiler, path, wanted, log))
            except BuildFailed as error:
                say(f"calls from Python will be slower, without the fast path: {error}")
    return path


def _wants_extension(extension: Path | None, now: float) -> bool:
    if extension is None or extension.exists():
        return False
    return not cache.failure_of(extension, now - RETRY_EXTENSION_S)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _compiler(beside: Path) -> Iterator[Compiler]:
    made = tempfile.TemporaryDirectory(dir=beside, prefix="building-")
    with made as folder, Compiler(Path(folder)) as compiler:
        yield compiler


def _make(out: Path, make: Callable[[Path], None]) -> None:
    """Make one file of the cache, given where to log; a failure is noted for those who wait."""
    start = time.monotonic()
    try:
        make(out.with_name(f"{out.name}.log"))
    except BuildFailed as error:
        cache.note_failure(out, error)
        raise
    cache.forget_failure(out)
    say(f"done in {time.monotonic() - start:.0f} s")


def units_of_library() -> list[Unit]:
    """The library: files with torch's headers, the loops, which take as long as all others, and
    those. The longest first."""
    sources = [s for s in _SOURCES if s.suffix == ".cpp" and s not in _EXTENSION]
    with_torch = [s for s in sources if includes_torch(s)]
    loops = [s for s in sources if s.name == "kernels.cpp"]
    others = [s for s in sources if s not in with_torch and s not in loops]
    return [tuple(with_torch), tuple(loops), tuple(others)]


def _library(compiler: Compiler, library: Path, log: Path, extension: bool) -> None:
    seconds = max(ALL_CPU_S / compiler.cores, LONGEST_S)
    cores = "1 core" if compiler.cores == 1 else f"{compiler.cores} cores"
    say(f"compiling its C++ part, once: about {seconds:.0f} s on {cores} ...")
    compiler.program  # noqa: B018  or say that there is none
    units = units_of_library()
    first, *others = units  # the longest, and the extension, which takes as long
    compiler.start([first, *([_EXTENSION] if extension else []), *others])
    objects = compiler.objects(units, log)
    compiler.link(library, [*objects, f"-Wl,-soname,{library.name}"], log)
    library.with_suffix(".txt").write_text(f"compiled by {compiler.version()}\n")


def _extension(compiler: Compiler, library: Path, extension: Path, log: Path) -> None:
    say("compiling its fast path for this Python ...")
    made = compiler.objects([_EXTENSION], log)
    compiler.link(extension, [*made, str(library), "-Wl,-rpath,$ORIGIN", "-ltorch_python"], log)


def make_prebuilt() -> Path:
    """Compile the library and the extension for a wheel: see wheel/wheel_build.py."""
    library = cache.FOLDER / cache.LIBRARY
    extension = _extension_path(library)
    library.parent.mkdir(exist_ok=True)
    log = Path(tempfile.gettempdir(), "fcoll-wheel.log")
    with _compiler(library.parent) as compiler:
        _library(compiler, library, log, extension is not None)
        if extension:
            _extension(compiler, library, extension, log)
    (library.parent / "made_for.txt").write_text(cache.made_for(torch.__version__))
    return library


# -- load ---


def _load_extension(library: Path) -> None:
    global fast
    path = _extension_path(library)
    if path is None or not path.exists():
        return
    loader = ExtensionFileLoader("fcoll_fast", str(path))
    spec = spec_from_file_location("fcoll_fast", path, loader=loader)
    assert spec is not None
    made = module_from_spec(spec)
    loader.exec_module(made)
    for prepare in _when_loaded:
        prepare(made)
    fast = made


@functools.cache
def load() -> str:
    """Load the library. Empty if it serves, else the reason why process groups must."""
    global _loaded
    if os.environ.get("FCOLL_NATIVE", "1") == "0":
        return "FCOLL_NATIVE=0 switches it off"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is written for Linux on x86_64, not {sys.platform} on {platform.machine()}"
    try:
        library = build(taken_over_s=RETRY_S)
        torch.ops.load_library(str(library))
        _load_extension(library)
        _loaded = True
    except (BuildFailed, OSError, ImportError) as error:
        warnings.warn(
            f"fcoll: collectives on this host go through process groups, which is slower: {error}",
            stacklevel=2,
        )
        return f"{error}".partition("\n")[0] or type(error).__name__
    return ""


def loaded() -> bool:
    """Is the library in this process? It is from the first collective on CPU tensors on."""
    return _loaded


def load_if_compiled() -> bool:
    """Load the library unless it would have to be compiled first. Is it in this process?"""
    return _loaded or (library_path().exists() and not load())
