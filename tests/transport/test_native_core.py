"""The C++ core alone: random collectives on ranks that are threads, under the sanitizers."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NATIVE = ROOT / "fcoll" / "transport" / "native"
CORE = [
    str(NATIVE / f"{name}.cpp") for name in ("core", "collectives", "kernels", "peers", "arena")
]
FLAGS = ["-std=c++20", "-O1", "-g", "-march=native", "-fwrapv", f"-I{NATIVE}"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compiled(folder: Path, test: str, *flags: str) -> str:
    """The program of a test in tests/transport/native, with the core."""
    program = str(folder / test)
    source = str(ROOT / "tests/transport/native" / f"{test}.cpp")
    command = ["g++", *FLAGS, *flags, source, *CORE, "-lpthread", "-o", program]
    subprocess.run(command, check=True, timeout=170)
    return program


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_core_under_sanitizer(tmp_path, sanitizer):
    flags = ("-DFCOLL_TEST_THREADS", f"-fsanitize={sanitizer}")
    program = compiled(tmp_path, "core_test", *flags)
    for n, calls in ((2, 300), (3, 200), (5, 60)):
        done = subprocess.run(
            [program, str(n), str(calls), "1"], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert f"{n} ranks, {calls} calls: all right" in done.stdout


def test_parts_in_arenas_last_until_they_are_read(tmp_path):
    program = compiled(tmp_path, "arena_test", "-fsanitize=address,undefined")
    for n, calls, ranks_read in itertools.product((2, 4), (1000,), ("agree", "differ")):
        done = subprocess.run(
            [program, str(n), str(calls), "7", ranks_read],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert f"{n} ranks, {calls} calls: all right" in done.stdout
