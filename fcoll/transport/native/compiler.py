"""Run the C++ compiler: on a few units, each of several files, at once, then a link.

Reading torch's headers takes twice as long as compiling a file of ours, so that all files which
include them are one unit. A line is printed for each unit that is finished. What the compiler said
when it failed is kept whole in a log, and the message has its first errors and the name of the log.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

# For any x86-64: what newer CPUs do faster, kernels.cpp has apart.
FLAGS = ["-std=c++20", "-march=x86-64", "-fwrapv", "-fPIC", "-DUSE_DISTRIBUTED"]
# Files with torch's headers have no loops; with -O2 they take 11 % longer, and calls are no faster.
OPTIMIZE, OPTIMIZE_WITH_TORCH = "-O3", "-O1"
ERRORS_SHOWN = 5
Unit = tuple[Path, ...]  # files that are compiled as one


class BuildFailed(RuntimeError):
    """The library could not be compiled; the message says why."""


def find_compiler() -> str:
    """The compiler that CXX names, or g++."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise BuildFailed("there is no C++ compiler: install g++, or name one in CXX")
    return found


def say(text: str) -> None:
    print(f"fcoll: {text}", file=sys.stderr, flush=True)


class _Failed(Exception):
    """A run of the compiler that failed: the command, its exit code and all that it said."""


class Compiler:
    """Compiles in a folder of its own, as many units at once as this process has cores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags = _flags()
        self.cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.cores)
        self._made: dict[Unit, Future[None]] = {}

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @functools.cached_property
    def program(self) -> str:
        return find_compiler()

    def start(self, units: Sequence[Unit]) -> None:
        """Begin with these, in this order."""
        for unit in units:
            if unit not in self._made:
                self._made[unit] = self._pool.submit(self._object, unit)

    def objects(self, units: Sequence[Unit], log: Path) -> list[str]:
        """The units' object files. The first that fails ends the attempt."""
        began = time.monotonic()
        self.start(units)
        made = {self._made[unit]: unit for unit in units}
        try:
            for i, future in enumerate(as_completed(made), 1):
                future.result()
                names = ", ".join(source.name for source in made[future])
                say(f"[{i}/{len(units)}] {names}: {time.monotonic() - began:.0f} s")
        except _Failed as failed:
            for future in made:
                future.cancel()
            raise _told(failed, log) from None
        return [str(self._place(unit)) for unit in units]

    def link(self, out: Path, parts: Sequence[str], log: Path) -> None:
        """A shared library of the parts. It appears under its name when it is whole."""
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
        partial = self.folder / out.name
        try:
            self._run([self.program, "-shared", *parts, *libraries, "-o", str(partial)])
        except _Failed as failed:
            raise _told(failed, log) from None
        os.replace(partial, out)

    def version(self) -> str:
        """The compiler's name and version, for people."""
        asked = subprocess.run([self.program, "--version"], capture_output=True, text=True)
        return f"{self.program}: {asked.stdout.partition(os.linesep)[0]}"

    def _place(self, unit: Unit) -> Path:
        return self.folder / f"{unit[0].stem}.o"

    def _object(self, unit: Unit) -> None:
        whole = self._place(unit).with_suffix(".cpp")
        whole.write_text("".join(f'#include "{source}"\n' for source in unit))
        level = OPTIMIZE_WITH_TORCH if any(map(includes_torch, unit)) else OPTIMIZE
        out = str(self._place(unit))
        self._run([self.program, *self.flags, level, "-c", str(whole), "-o", out])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise _Failed(command, done.returncode, done.stderr + done.stdout)


def _told(failed: _Failed, log: Path) -> BuildFailed:
    command, code, said = failed.args
    log.write_text(f"{' '.join(command)}\nexit code {code}\n{said}")
    return BuildFailed(
        f"the compiler failed (exit code {code}): {first_errors(said)}\n"
        f"All that it said is in {log}"
    )


def includes_torch(source: Path) -> bool:
    """Does a file of ours, or one of ours that it includes, include headers of torch's?"""
    text = source.read_text()
    if re.search(r"^#include <(torch|ATen|c10)/", text, re.M):
        return True
    ours = (source.parent / name for name in re.findall(r'^#include "(.+)"', text, re.M))
    return any(includes_torch(path) for path in ours if path != source)


def first_errors(said: str) -> str:
    """The first errors of a compiler's or linker's output: the rest mostly follows from them."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "undefined" in line]
    return "\n".join((errors or lines)[:ERRORS_SHOWN]) or "it said nothing"


def _flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    folders = [include, include / "torch/csrc/api/include", sysconfig.get_path("include")]
    return [*FLAGS, abi, *[f"-I{folder}" for folder in folders]]
