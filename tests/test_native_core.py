"""The C++ core alone: random collectives on ranks that are threads, under the sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NATIVE = ROOT / "fcoll" / "native"
SOURCES = [ROOT / "tests/native/core_test.cpp", NATIVE / "core.cpp", NATIVE / "kernels.cpp"]
FLAGS = ["-std=c++20", "-O1", "-g", "-march=native", "-fwrapv", "-DFCOLL_TEST_THREADS"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_core_under_sanitizer(tmp_path, sanitizer):
    program = str(tmp_path / "core_test")
    command = ["g++", *FLAGS, f"-fsanitize={sanitizer}", f"-I{NATIVE}", *map(str, SOURCES)]
    subprocess.run([*command, "-lpthread", "-o", program], check=True, timeout=100)
    for n, calls in ((2, 300), (3, 200), (5, 60)):
        done = subprocess.run(
            [program, str(n), str(calls), "1"], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert f"{n} ranks, {calls} calls: all right" in done.stdout
