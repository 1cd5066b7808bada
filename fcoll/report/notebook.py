"""Tables and pictures for notebooks and pages: HTML that changes nothing around it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A table; ``align`` has < or > for each column.

    >>> table(["op", "n"], [["all_reduce", "8"]], "<>").count("<td")
    2
    """
    sides = ["left" if side == "<" else "right" for side in align]
    cells = [_row("th", head, sides), *(_row("td", row, sides) for row in rows)]
    return f"<table>{''.join(cells)}</table>"


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    made = (
        f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(made)}</tr>"


def picture(svg: str, about: str) -> str:
    """An SVG as an image: its styles stay inside."""
    data = b64encode(svg.encode()).decode()
    return f'<img alt="{escape(about)}" src="data:image/svg+xml;base64,{data}">'
