"""The C++ part is compiled once, by one of many ranks; a failure is told, and not for ever.

The compiler is a script that makes empty files, or fails if a file "broken" is there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fcoll.transport.native import build, cache
from fcoll.transport.native.compiler import BuildFailed, first_errors

SCRIPT = """#!{python}
import os, pathlib, sys, time
home = pathlib.Path({home!r})
out = sys.argv[sys.argv.index("-o") + 1] if "-o" in sys.argv else ""
with open(home / "runs", "a") as runs:
    print(*sys.argv[1:], file=runs)
if "--version" in sys.argv:
    print("fake 1.0")
elif (home / "broken").exists() and (home / "broken").read_text() in " ".join(sys.argv):
    print("In file included from x.cpp:1:", file=sys.stderr)
    print("x.h:3:1: error: no such thing", file=sys.stderr)
    print("note\\n" * 2000, file=sys.stderr)
    sys.exit(1)
elif out:
    pathlib.Path(out).write_text("made")
"""


class FakeCompiler:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.path = home / "c++"
        self.path.write_text(SCRIPT.format(python=sys.executable, home=str(home)))
        self.path.chmod(0o755)

    def breaks_on(self, word: str) -> None:
        (self.home / "broken").write_text(word)

    def mended(self) -> None:
        (self.home / "broken").unlink()

    def lines(self) -> list[str]:
        """What it was started with since the last look."""
        made = self.home / "runs"
        lines = made.read_text().splitlines() if made.exists() else []
        made.unlink(missing_ok=True)
        return lines

    def runs(self) -> int:
        return len(self.lines())


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> FakeCompiler:
    fake = FakeCompiler(tmp_path)
    monkeypatch.setenv("CXX", str(fake.path))
    monkeypatch.setenv("FCOLL_CACHE_DIR", str(tmp_path / "cache"))
    return fake


SOURCES = [source for source in build._SOURCES if source.suffix == ".cpp"]
UNITS = len(build.units_of_library()) + 1  # and the extension


def attempt(*args) -> str:
    """What build raises; empty if nothing."""
    try:
        build.build(*args)
    except BuildFailed as error:
        return str(error)
    return ""


def failed_before(path: Path, seconds: float) -> None:
    """As if the attempt to make ``path`` had failed that long ago."""
    reason = cache.failure_of(path, 0)
    assert reason
    then = time.time() - seconds
    note = cache.FailedBuild(reason, then, cache._compiler_identity())
    cache._note_of(path).write_text(cache.json.dumps(cache.asdict(note)))


def test_one_of_many_ranks_compiles(compiler, capfd):
    with ThreadPoolExecutor(5) as ranks:  # a lock of files keeps threads apart, too
        paths = {path for path in ranks.map(lambda _: build.build(), range(5))}
    (path,) = paths
    assert path.read_text() == "made"
    assert path.with_suffix(".txt").read_text().endswith("fake 1.0\n")
    assert compiler.runs() == UNITS + 3  # two links, and its version
    said = capfd.readouterr().err
    assert f"[{UNITS - 1}/{UNITS - 1}]" in said
    assert all(source.name in said for source in SOURCES)
    assert not list(path.parent.glob("building-*"))


def test_a_failing_attempt_is_made_once_for_all_that_wait(compiler):
    compiler.breaks_on(".cpp")
    with ThreadPoolExecutor(5) as ranks:
        reasons = list(ranks.map(attempt, [build.RETRY_S] * 5))
    assert compiler.runs() <= UNITS
    assert len(set(reasons)) == 1 and "x.h:3:1: error: no such thing" in reasons[0]


def test_the_message_has_the_first_error_and_the_log(compiler, tmp_path):
    compiler.breaks_on(".cpp")
    first, *_, last = attempt().splitlines()
    assert first == "the compiler failed (exit code 1): x.h:3:1: error: no such thing"
    log = Path(last.removeprefix("All that it said is in ")).read_text()
    assert "In file included from" in log and log.count("note") == 2000
    assert str(compiler.path) in log  # the command


def test_a_failure_is_taken_over_for_a_short_time(compiler):
    compiler.breaks_on(".cpp")
    assert attempt()
    compiler.mended()
    compiler.runs()
    path = build.library_path()
    assert "no such thing" in attempt(build.RETRY_S)
    assert compiler.runs() == 0
    failed_before(path, build.RETRY_S + 1)
    assert not attempt(build.RETRY_S)
    assert path.exists() and not cache.failure_of(path, 0)


def test_who_builds_by_hand_tries_again_at_once(compiler):
    compiler.breaks_on(".cpp")
    assert attempt()
    compiler.mended()
    assert not attempt()


def test_another_compiler_is_tried_at_once(compiler):
    compiler.breaks_on(".cpp")
    assert attempt()
    compiler.mended()
    os.utime(compiler.path, (1, 1))
    assert not attempt(build.RETRY_S)


def test_an_extension_that_failed_is_tried_again(compiler, capfd):
    compiler.breaks_on("python.cpp")
    path = build.build()
    extension = build._extension_path(path)
    assert path.exists() and not extension.exists()
    assert "no such thing" in capfd.readouterr().err
    compiler.runs()
    build.build()
    assert compiler.runs() == 0, "not in every process"
    compiler.mended()
    failed_before(extension, build.RETRY_EXTENSION_S + 1)
    build.build()
    assert extension.read_text() == "made"
    assert compiler.runs() == 2  # its files and a link: the library is there already


def test_every_source_is_in_one_unit():
    units = [*build.units_of_library(), build._EXTENSION]
    assert sorted(source for unit in units for source in unit) == SOURCES


def test_a_library_that_is_there_needs_no_compiler(compiler, monkeypatch):
    path = build.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build() == path
    build._extension_path(path).unlink()
    assert build.build() == path
    path.unlink()
    assert "there is no C++ compiler" in attempt()


# -- the key ---


def test_the_key_is_of_torch_and_the_sources_and_of_no_cpu(tmp_path):
    source = tmp_path / "a.cpp"
    source.write_text("1")
    key = cache.key_of([source], "2.13.0")
    assert cache.key_of([source], "2.14.0") != key
    source.write_text("2")
    assert cache.key_of([source], "2.13.0") != key


def test_the_compiler_makes_code_for_any_cpu(compiler):
    build.build()
    compiled = [line for line in compiler.lines() if " -c " in f" {line} "]
    assert len(compiled) == UNITS
    flags = [re.findall(r"(?<=\s)-m\S+", line) for line in compiled]  # not of a folder's name
    assert flags == [["-march=x86-64"]] * UNITS


LIBRARY = build.library_path()  # before a test changes where it is
INSTRUCTIONS = re.compile(r"^[0-9a-f]+ <(.*)>:$|(%[yz]mm)")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_wide_vectors_are_used_in_the_loops_that_are_chosen_for_them_only(compiled):
    """Else a library that a new machine has compiled would stop an old one."""
    code = subprocess.run(["objdump", "-dC", LIBRARY], capture_output=True, text=True, check=True)
    function, wide = "", set()
    for line in code.stdout.splitlines():
        if found := INSTRUCTIONS.search(line):
            function = found[1] or function
            if found[2]:
                wide.add(re.search(r"\(anonymous namespace\)::(\w+)::|$", function)[1])
    assert wide == {"avx2", "avx512"}


def test_first_errors_of_a_linker_and_of_nothing():
    assert first_errors("a\nx: undefined reference to `f'\nb") == "x: undefined reference to `f'"
    assert first_errors("killed\n") == "killed"
    assert first_errors("") == "it said nothing"


# -- old entries ---


def test_old_entries_go_and_the_newest_stay(tmp_path):
    day = 24 * 3600
    for i in range(cache.KEPT + 4):
        for ending in ("so", "lock", "cpython-311.so"):
            path = tmp_path / f"fcoll-{i:02}.{ending}"
            path.write_text("")
            os.utime(path, (time.time() - i * day,) * 2)
    (tmp_path / "building-x").mkdir()
    os.utime(tmp_path / "building-x", (0, 0))
    mine = tmp_path / "fcoll-11.so"
    cache.used(mine)
    assert sorted(cache.prune(tmp_path)) == [f"fcoll-{i:02}" for i in range(7, 11)]
    left = {path.name.partition(".")[0] for path in tmp_path.iterdir()}
    assert left == {f"fcoll-{i:02}" for i in range(cache.KEPT - 1)} | {"fcoll-11"}


def test_entries_of_today_stay(tmp_path):
    for i in range(3 * cache.KEPT):
        (tmp_path / f"fcoll-{i:02}.so").write_text("")
    assert cache.prune(tmp_path) == []


# -- in a wheel ---


@pytest.fixture
def wheel(compiler, tmp_path, monkeypatch):
    """A library that came with the wheel."""
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "prebuilt")
    cache.prebuilt_library.cache_clear()
    made = build.make_prebuilt()
    compiler.runs()
    yield made
    cache.prebuilt_library.cache_clear()


def test_the_library_of_a_wheel_needs_no_compiler(wheel, compiler, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build() == wheel and build._extension_path(wheel).exists()
    assert compiler.runs() == 0 and not list(wheel.parent.glob("building-*"))


def test_for_another_torch_it_is_compiled(wheel, monkeypatch):
    monkeypatch.setattr(build.torch, "__version__", "2.99.0")
    assert build.build() != wheel
