"""Run the C++ compiler: every source in a process of its own, then a link.

A line is printed for each file that is finished. What the compiler said when it failed is kept
whole in a log, and the message has its first errors and the name of the log.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

FLAGS = ["-std=c++20", "-O3", "-march=native", "-fwrapv", "-fPIC", "-DUSE_DISTRIBUTED"]
ERRORS_SHOWN = 5


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


class Compiler:
    """One attempt to compile, in a folder of its own; the log is written when it fails."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.program = find_compiler()
        self.folder = folder
        self.log = log

    def objects(self, sources: Sequence[Path]) -> list[str]:
        """The sources' object files. The first that fails ends the attempt."""
        start = time.monotonic()
        with ThreadPoolExecutor() as pool:
            made = {pool.submit(self._object, source): source for source in sources}
            try:
                for i, future in enumerate(as_completed(made), 1):
                    future.result()
                    seconds = time.monotonic() - start
                    say(f"[{i}/{len(sources)}] {made[future].name}, {seconds:.0f} s")
            except BuildFailed:
                pool.shutdown(cancel_futures=True)
                raise
        return [str(self._place(source)) for source in sources]

    def link(self, out: Path, parts: Sequence[str]) -> None:
        """A shared library of the parts. It appears under its name when it is whole."""
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
        partial = self.folder / out.name
        self._run([self.program, "-shared", *parts, *libraries, "-o", str(partial)])
        os.replace(partial, out)

    def version(self) -> str:
        """The compiler's name and version, for people."""
        asked = subprocess.run([self.program, "--version"], capture_output=True, text=True)
        return f"{self.program}: {asked.stdout.partition(os.linesep)[0]}"

    def _place(self, source: Path) -> Path:
        return self.folder / f"{source.stem}.o"

    def _object(self, source: Path) -> None:
        self._run([self.program, *_flags(), "-c", str(source), "-o", str(self._place(source))])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return
        said = done.stderr + done.stdout
        self.log.write_text(f"{' '.join(command)}\nexit code {done.returncode}\n{said}")
        raise BuildFailed(
            f"the compiler failed (exit code {done.returncode}): {first_errors(said)}\n"
            f"All that it said is in {self.log}"
        )


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
