"""Run the C++ compiler: torch's headers once, every source in a process of its own, then a link.

A line is printed for each file that is finished. What the compiler said when it failed is kept
whole in a log, and the message has its first errors and the name of the log.
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
FLAGS = ["-std=c++20", "-O3", "-march=x86-64", "-fwrapv", "-fPIC", "-DUSE_DISTRIBUTED"]
ERRORS_SHOWN = 5
# Included ahead of all files that include torch's headers.
TORCH_HEADERS = Path(__file__).parent / "torch_headers.h"


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
    """Compiles in a folder of its own. As many files at once as this process has cores; torch's
    headers, which take 10 times as long to read as our files, are read once, ahead."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags = _flags()
        self.cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.cores)
        self._made: dict[Path, Future[None]] = {}
        self._headers: Future[None] | None = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @functools.cached_property
    def program(self) -> str:
        return find_compiler()

    def start(self, sources: Sequence[Path]) -> None:
        """Begin with these files: those without torch's headers, the largest first, while the
        headers are read, then the others."""
        new = [source for source in sources if source not in self._made]
        with_torch = {source: includes_torch(source) for source in new}
        if any(with_torch.values()) and self._headers is None:
            self._headers = self._pool.submit(self._precompile)
        for source in sorted(new, key=lambda s: (with_torch[s], -s.stat().st_size)):
            headers = self._headers if with_torch[source] else None
            self._made[source] = self._pool.submit(self._object, source, headers)

    def objects(self, sources: Sequence[Path], log: Path) -> list[str]:
        """The sources' object files. The first that fails ends the attempt."""
        began = time.monotonic()
        self.start(sources)
        made = {self._made[source]: source for source in sources}
        try:
            for i, future in enumerate(as_completed(made), 1):
                future.result()
                seconds = time.monotonic() - began
                say(f"[{i}/{len(sources)}] {made[future].name}, {seconds:.0f} s")
        except _Failed as failed:
            for future in made:
                future.cancel()
            raise _told(failed, log) from None
        return [str(self._place(source)) for source in sources]

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

    def _place(self, source: Path) -> Path:
        return self.folder / f"{source.stem}.o"

    def _precompile(self) -> None:
        """Beside a copy of the header, where the compiler looks for it."""
        copy = shutil.copy(TORCH_HEADERS, self.folder)
        self._run([self.program, *self.flags, "-x", "c++-header", str(copy), "-o", f"{copy}.gch"])

    def _object(self, source: Path, headers: Future[None] | None) -> None:
        ahead: list[str] = []
        if headers is not None:
            headers.result()
            ahead = ["-include", str(self.folder / TORCH_HEADERS.name)]
        out = str(self._place(source))
        self._run([self.program, *self.flags, *ahead, "-c", str(source), "-o", out])

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
