"""What a command shows on a terminal, with rich and without it; in a pipe both are the same."""

from __future__ import annotations

import os
import pty
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fcoll import units
from fcoll.cli import terminal

ROWS = [("op", "n"), ("all_reduce", "8"), ("[bold]", "16")]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def screen() -> Iterator[int]:
    """A terminal in place of stdout and stderr: where what is written there can be read. Not a
    fixture: pytest puts its own files there when the test begins."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stderr", file)
        patch.setenv("TERM", "xterm")
        yield master
    os.close(master)


@pytest.fixture(params=["rich", "plain"])
def rich(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "rich":
        pytest.importorskip("rich")
        return True
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    return False


def read_until(master: int, end: str) -> str:
    text = ""
    while end not in text:  # or the test's timeout
        text += os.read(master, 4096).decode()
    return text


def test_progress(rich: bool) -> None:
    with screen() as seen:
        with terminal.progress("tracing", quiet=False) as tell:
            with terminal.progress("timing", quiet=False):
                read_until(seen, "fcoll: timing ...")
            tell("3 of [8]")
            text = read_until(seen, "fcoll: tracing: 3 of [8] ...")
            assert re.search(r"fcoll: timing: \d+\.\d s", text)
        assert re.search(r"fcoll: tracing: \d+\.\d s", read_until(seen, " s\r\n"))
    assert not terminal._shown


def test_seconds_are_counted(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "TICK_S", 0.01)
    with screen() as seen, terminal.progress("tracing", quiet=False, ticks=True):
        assert read_until(seen, "0:00:01" if rich else "... 1 s")


def test_an_error_ends_it(rich: bool) -> None:
    with screen() as seen:
        with pytest.raises(KeyError), terminal.progress("tracing", quiet=False, ticks=True):
            raise KeyError
        assert re.search(r"fcoll: tracing: \d+\.\d s", read_until(seen, " s\r\n"))
    assert not terminal._shown


def test_tables_have_the_same_lines(rich: bool) -> None:
    plain = units.table(ROWS, "<>")
    with screen(), terminal.drawn_tables():
        drawn = units.table(ROWS, "<>")
    assert [ESCAPES.sub("", line).rstrip() for line in drawn] == plain
    assert (drawn != plain) == rich
    assert units.table(ROWS, "<>") == plain


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("tracing", quiet=False) as tell, terminal.drawn_tables():
        tell("3 of 8")
        assert units.table(ROWS, "<>")[1] == "all_reduce   8"
    assert capsys.readouterr().err == "fcoll: tracing ...\nfcoll: tracing: 3 of 8 ...\n"
