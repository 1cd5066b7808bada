"""Bytes, times and tables for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: What draws tables instead, while a command prints on a terminal (cli/terminal.py).
draw: Callable[[Sequence[Sequence[str]], str], list[str]] | None = None

#: Is what is made now printed on a terminal that shows colours?
on_terminal = False


def alarm(text: str) -> str:
    """In red where there are colours: something that will not work."""
    return f"\x1b[31m{text}\x1b[0m" if on_terminal and text else text


def show_bytes(nbytes: Any) -> str:
    """Bytes with three digits that count; an expression as it is.

    >>> show_bytes(64 << 20), show_bytes(700), show_bytes(3 << 29)
    ('64 MiB', '700 B', '1.5 GiB')
    """
    if not isinstance(nbytes, (int, float)):
        return str(nbytes)
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            value = nbytes / size
            return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"
    return f"{nbytes:.0f} B"


def show_us(us: float) -> str:
    """A time in the unit that suits it.

    >>> show_us(0.25), show_us(999.4), show_us(12345), show_us(2.5e6)
    ('0.25 us', '999 us', '12.3 ms', '2.50 s')
    """
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(us) >= size:
            return f"{_three(us / size)} {unit}"
    return f"{_three(us)} us"


def _three(value: float) -> str:
    """Three digits that count."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """The lines of a table; ``align`` has < or > for each column, the first row is its head.

    >>> print(*table([("op", "n"), ("all_reduce", "8")], "<>"), sep="\\n")
    op          n
    all_reduce  8
    """
    if draw is not None:
        return draw(rows, align)
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    return [
        "  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]
