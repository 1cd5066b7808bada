"""What a person sees of a command: progress and tables, drawn by rich if it is installed.

Only on a terminal: what is piped, or written to a file, is the same with and without rich.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import StringIO
from typing import Any

from fcoll import units

PROGRESS_S = 5.0  # between lines that say how far it is
TICK_S = 1.0

_shown: list[_Line] = []  # the innermost last, which is the one to be seen


@contextmanager
def progress(what: str, quiet: bool, ticks: bool = False) -> Iterator[Callable[[str], None]]:
    """Say on stderr what is going on, and how long it took. With ``ticks`` the seconds are counted
    by a thread, which keeps programs from being traced in forks of this process."""
    begin = time.perf_counter()
    if quiet or not sys.stderr.isatty():

        def tell(more: str) -> None:
            if not quiet:
                print(f"fcoll: {_joined(what, more)} ...", file=sys.stderr, flush=True)

        tell("")
        yield tell
        return
    line = (_RichLine if find_spec("rich") else _Line)(what, begin, ticks)
    if _shown:
        _shown[-1].hide()
    _shown.append(line)
    line.show()
    try:
        yield line.tell
    finally:
        line.hide()
        _shown.pop()
        print(f"fcoll: {what}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        if _shown:
            _shown[-1].show()


def now_and_then(tell: Callable[[str], None]) -> Callable[[int, int], None]:
    """Tells how many ranks are done, if it takes long."""
    last = time.perf_counter()

    def progress(done: int, of: int) -> None:
        nonlocal last
        if time.perf_counter() - last > PROGRESS_S:
            last = time.perf_counter()
            tell(f"{done} of {of}")

    return progress


@contextmanager
def drawn_tables() -> Iterator[None]:
    """Inside, rich draws the tables that are printed on a terminal, and alarms are red there."""
    if sys.stdout.isatty():
        units.draw = _draw if find_spec("rich") else None
        units.on_terminal = not os.environ.get("NO_COLOR")
    try:
        yield
    finally:
        units.draw, units.on_terminal = None, False


class _Line:
    """A line that is written again and again, with the seconds so far."""

    def __init__(self, what: str, begin: float, ticks: bool) -> None:
        self.what, self.begin, self.ticks, self.more = what, begin, ticks, ""
        self._hidden = threading.Event()

    def tell(self, more: str) -> None:
        self.more = more
        self._write()

    def show(self) -> None:
        self._hidden.clear()
        self._write()
        if self.ticks:
            threading.Thread(target=self._tick, daemon=True).start()

    def hide(self) -> None:
        self._hidden.set()
        os.write(sys.stderr.fileno(), b"\r\x1b[K")

    def _tick(self) -> None:
        while not self._hidden.wait(TICK_S):
            self._write()

    def _write(self) -> None:  # not by print: its lock may be held while a process is forked
        seconds = time.perf_counter() - self.begin
        so_far = f" {seconds:.0f} s" if seconds >= 1 else ""
        text = f"\r\x1b[Kfcoll: {_joined(self.what, self.more)} ...{so_far}"
        os.write(sys.stderr.fileno(), text.encode())


class _RichLine(_Line):
    """The same as a spinner with a clock."""

    def show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        console = Console(stderr=True)
        self._live = Progress(
            *columns,
            console=console,
            transient=True,
            auto_refresh=self.ticks,
            redirect_stdout=False,
        )
        self._task = self._live.add_task(self._text())
        self._live.start()

    def tell(self, more: str) -> None:
        self.more = more
        self._live.update(self._task, description=self._text(), refresh=True)

    def hide(self) -> None:
        self._live.stop()

    def _text(self) -> str:
        from rich.markup import escape

        return escape(f"fcoll: {_joined(self.what, self.more)} ...")


def _joined(what: str, more: str) -> str:
    return f"{what}: {more}" if more else what


def _draw(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """The lines of ``units.table``, one a row, with a bold head and every other row dim."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made: Any = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", row_styles=["", "dim"]
    )
    for head, side in zip(rows[0], align, strict=True):
        made.add_column(Text(head), justify="right" if side == ">" else "left", no_wrap=True)
    for row in rows[1:]:
        made.add_row(*map(Text, row))
    width = sum(max(len(row[i]) for row in rows) + 2 for i in range(len(align)))
    out = StringIO()
    Console(file=out, force_terminal=True, width=width + 1).print(made)
    return [line.rstrip() for line in out.getvalue().splitlines()]
