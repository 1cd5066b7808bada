"""Compile the C++ once, at first use, and load it.

The library is cached under the hash of its sources, the exact torch version (the classes it
derives from change between versions), the compiler and the CPU's flags. A lock lets one of many
ranks compile while the others wait.
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
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp")) + sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = ["-std=c++20", "-O3", "-march=native", "-fwrapv", "-fPIC", "-DUSE_DISTRIBUTED"]


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


def _compile(compiler: str, folder: Path, out: Path) -> None:
    """Each source in a compiler of its own, at once; then link."""
    home = Path(torch.__file__).parent
    include = home / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = [*_FLAGS, abi, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    sources = [s for s in _SOURCES if s.suffix == ".cpp"]
    objects = [str(folder / f"{s.stem}.o") for s in sources]
    commands = [
        [compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(_run, commands))
    libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run([compiler, "-shared", *objects, *libraries, "-o", str(out)])


def _run(command: list[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        raise BuildFailed(f"the compiler failed:\n{made.stderr[-2000:]}")


def build() -> Path:
    """The path of the compiled library, compiling it if this machine has not yet."""
    path = library_path()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():  # another rank has compiled it meanwhile
            return path
        print("fcoll: compiling its C++ part (once, about 30 s) ...", file=sys.stderr, flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder) / path.name
            _compile(_compiler(), Path(folder), partial)
            os.replace(partial, path)
        print(f"fcoll: done in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return path


@functools.cache
def load() -> str:
    """Load the library. Empty if it serves, else the reason why process groups must."""
    if os.environ.get("FCOLL_NATIVE", "1") == "0":
        return "FCOLL_NATIVE=0 switches it off"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is written for Linux on x86_64, not {sys.platform} on {platform.machine()}"
    try:
        torch.ops.load_library(str(build()))
    except (BuildFailed, OSError) as error:
        warnings.warn(
            f"fcoll: collectives on this host go through process groups, which is slower: {error}",
            stacklevel=2,
        )
        return str(error).splitlines()[0]
    return ""


def loaded() -> bool:
    """Is the library in this process? It is from the first collective on CPU tensors on."""
    return load.cache_info().currsize > 0 and load() == ""
