"""The C++ core alone, ranks being threads: random collectives and failures, under sanitizers."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fcoll.transport.native.build import units_of_library
from fcoll.transport.native.compiler import Unit, includes_torch

ROOT = Path(__file__).parent.parent.parent
NATIVE = ROOT / "fcoll" / "transport" / "native"
TESTS = ROOT / "tests" / "transport" / "native"
FLAGS = ["-std=c++20", "-O1", "-g1", "-march=x86-64", "-fwrapv", f"-I{NATIVE}", f"-I{TESTS}"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def object_of(unit: Unit, sanitizer: str, folder: Path) -> str:
    made = folder / f"{unit[0].stem}.{sanitizer}.o"
    whole = made.with_suffix(".cpp")
    whole.write_text("".join(f'#include "{source}"\n' for source in unit))
    command = ["g++", *FLAGS, f"-fsanitize={sanitizer}", "-c", str(whole), "-o", str(made)]
    subprocess.run(command, check=True, timeout=170)
    return str(made)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """sanitizer -> the objects of the core, made once."""
    folder = tmp_path_factory.mktemp("core")
    made: dict[str, list[str]] = {}

    def objects(sanitizer: str) -> list[str]:
        if sanitizer not in made:
            units = [u for u in units_of_library() if not any(map(includes_torch, u))]
            with ThreadPoolExecutor(2) as pool:
                found = pool.map(lambda unit: object_of(unit, sanitizer, folder), units)
            made[sanitizer] = list(found)
        return made[sanitizer]

    return objects


def test_files_compile_in_any_order(tmp_path):
    """They are compiled as one: a name of one must not be what another happens to need."""
    core = [s for u in units_of_library() for s in u if not any(map(includes_torch, u))]
    whole = tmp_path / "reversed.cpp"
    whole.write_text("".join(f'#include "{source}"\n' for source in sorted(core, reverse=True)))
    subprocess.run(["g++", *FLAGS, "-O0", "-fsyntax-only", str(whole)], check=True, timeout=100)


def program(folder: Path, test: str, sanitizer: str, objects: list[str]) -> str:
    """The program of a test in tests/transport/native, with the core."""
    made = str(folder / test)
    main = object_of((TESTS / f"{test}.cpp",), sanitizer, folder)
    flags = [f"-fsanitize={sanitizer}", "-lpthread", "-o", made]
    subprocess.run(["g++", main, *objects, *flags], check=True, timeout=170)
    return made


def passes(*command: object, says: str) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert says in done.stdout


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_random_collectives(tmp_path, core, sanitizer):
    made = program(tmp_path, "core_test", sanitizer, core(sanitizer))
    for seed, (n, calls) in enumerate(((2, 300), (3, 200), (5, 60))):
        passes(made, n, calls, seed, says=f"{n} ranks, {calls} calls: all right")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_failures(tmp_path, core, sanitizer):
    """Differing calls, late and leaving ranks, retries, errors between the halves of a call."""
    made = program(tmp_path, "failures_test", sanitizer, core(sanitizer))
    for seed in (1, 2, 3):
        passes(made, seed, says="12 cases: all right")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_ranks_that_do_not_use_the_same_lanes(tmp_path, core, sanitizer):
    """Recompiled ranks, threads, sums in place beside other calls: each went wrong once."""
    made = program(tmp_path, "lanes_test", sanitizer, core(sanitizer))
    passes(made, says="12 cases: all right")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_calls_that_the_groups_thread_makes(tmp_path, core, sanitizer):
    """In order with those that the program makes; jobs that wait for jobs; a group that is left."""
    made = program(tmp_path, "background_test", sanitizer, core(sanitizer))
    passes(made, says="3 cases: all right")


def test_loops_of_all_widths_give_the_same_bits(tmp_path, core):
    sanitizer = "address,undefined"
    made = program(tmp_path, "kernels_test", sanitizer, core(sanitizer))
    passes(made, says="reductions: all right")


def test_parts_in_arenas_last_until_they_are_read(tmp_path, core):
    sanitizer = "address,undefined"
    made = program(tmp_path, "arena_test", sanitizer, core(sanitizer))
    for n, calls, ranks_read in itertools.product((2, 4), (1000,), ("agree", "differ")):
        passes(made, n, calls, 7, ranks_read, says=f"{n} ranks, {calls} calls: all right")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sums_in_place(tmp_path, core, sanitizer):
    made = program(tmp_path, "in_place_test", sanitizer, core(sanitizer))
    for seed, (n, calls) in enumerate(((2, 200), (3, 150), (5, 60))):
        passes(made, n, calls, seed, says=f"{n} ranks, {calls} calls: all right")
