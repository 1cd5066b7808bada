"""Compile the C++ once, at first use, and load it.

The library is cached under the hash of its sources, the exact torch version (the classes it
derives from change between versions), the compiler and the CPU's flags. A lock lets one of many
ranks compile while the others wait.

Beside it is an extension module of Python's, ``fast``, one for each version of Python, where
Python's headers are installed. Nothing but speed depends on it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp")) + sorted(Path(__file__).parent.glob("*.h"))
_EXTENSION = Path(__file__).parent / "python.cpp"
_FLAGS = ["-std=c++20", "-O3", "-march=native", "-fwrapv", "-fPIC", "-DUSE_DISTRIBUTED"]


class NoFastPath:
    """In the place of the extension module: its functions serve no call."""

    def __getattr__(self, name: str) -> Any:
        return _not_served


def _not_served(*args: Any) -> Any:
    return NotImplemented


no_fast_path = NoFastPath()
# The functions of native/python.cpp; each returns NotImplemented for calls it does not serve.
fast: Any = no_fast_path
_when_loaded: list[Callable[[Any], object]] = []
_loaded = False


def has_fast_path() -> bool:
    """Is the extension in this process?"""
    return fast is not no_fast_path


def when_loaded(prepare: Callable[[Any], object]) -> None:
    """Call a function with the extension module when it is loaded, before anyone else has it."""
    _when_loaded.append(prepare)


class BuildFailed(RuntimeError):
    """The library could not be compiled; the message says why."""


def cache_dir() -> Path:
    """Where compiled libraries are kept: FCOLL_CACHE_DIR, or the user's cache folder."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "fcoll")
    return Path(os.environ.get("FCOLL_CACHE_DIR", default)).expanduser()


def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise BuildFailed("there is no C++ compiler: install g++, or name one in CXX")
    return found


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def library_path() -> Path:
    """Where the library for this machine and these sources is or will be."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256()
    for part in (torch.__version__, version, _cpu_flags(), " ".join(_FLAGS)):
        digest.update(part.encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return cache_dir() / f"fcoll-{digest.hexdigest()[:16]}.so"


def _extension_path(library: Path) -> Path | None:
    """Where the extension module for this Python is or will be; None without Python's headers."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return library.with_suffix(sysconfig.get_config_var("EXT_SUFFIX")) if headers.exists() else None


def _flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    folders = [include, include / "torch/csrc/api/include", sysconfig.get_path("include")]
    return [*_FLAGS, abi, *[f"-I{folder}" for folder in folders]]


def _compile(folder: Path, library: Path, extension: Path | None) -> None:
    """What is missing of the two. Each source in a compiler of its own, at once; then link."""
    sources = [s for s in _SOURCES if s.suffix == ".cpp" and s != _EXTENSION]
    sources = [] if library.exists() else sources
    with ThreadPoolExecutor() as pool:
        made = [pool.submit(_object, source, folder) for source in sources]
        extension_made = pool.submit(_object, _EXTENSION, folder) if extension else None
    if sources:
        objects = [future.result() for future in made]
        _link(folder, library, [*objects, f"-Wl,-soname,{library.name}"])
    if extension and extension_made:
        try:
            parts = [extension_made.result(), str(library), "-Wl,-rpath,$ORIGIN", "-ltorch_python"]
            _link(folder, extension, parts)
        except BuildFailed:
            extension.touch()  # empty: it cannot be compiled here, and is not tried again


def _object(source: Path, folder: Path) -> str:
    made = str(folder / f"{source.stem}.o")
    _run([_compiler(), *_flags(), "-c", str(source), "-o", made])
    return made


def _link(folder: Path, out: Path, parts: list[str]) -> None:
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    partial = folder / out.name
    _run([_compiler(), "-shared", *parts, *libraries, "-o", str(partial)])
    os.replace(partial, out)


def _run(command: list[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        raise BuildFailed(f"the compiler failed:\n{made.stderr[-2000:]}")


def build() -> Path:
    """The path of the compiled library, compiling it if this machine has not yet."""
    path = library_path()
    extension = _extension_path(path)

    def complete() -> bool:
        return path.exists() and (extension is None or extension.exists())

    if complete():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if complete():  # another rank has compiled it meanwhile
            return path
        print(
            "fcoll: compiling its C++ part (once, about a minute) ...", file=sys.stderr, flush=True
        )
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _compile(Path(folder), path, extension)
        print(f"fcoll: done in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return path


def _load_extension(library: Path) -> None:
    global fast
    path = _extension_path(library)
    if path is None or path.stat().st_size == 0:
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
        library = build()
        torch.ops.load_library(str(library))
        _load_extension(library)
        _loaded = True
    except (BuildFailed, OSError, ImportError) as error:
        warnings.warn(
            f"fcoll: collectives on this host go through process groups, which is slower: {error}",
            stacklevel=2,
        )
        return str(error).splitlines()[0]
    return ""


def loaded() -> bool:
    """Is the library in this process? It is from the first collective on CPU tensors on."""
    return _loaded
