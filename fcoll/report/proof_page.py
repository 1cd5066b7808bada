"""A verdict of ``fcoll.prove`` as a picture and as a page."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from fcoll.report.html import source_text
from fcoll.report.lanes import page
from fcoll.report.svg import document

WIDTH, LEFT, CELL, GAP = 900, 190, 14, 3
COLUMNS = (WIDTH - LEFT - 16) // (CELL + GAP)
MOST_ROWS = 4  # of cells for one kind; more are counted
MOST_TOLD = 4  # differences on the picture; the page has all
WRAPPED = 112  # characters of a line on the picture

STYLE = """
.same { fill: #3f9d7a; } .differs { fill: #d9552c; } .open { fill: #9aa3af; }
.code { font: 12px ui-monospace, monospace; }
"""
TITLES = {
    True: "proved equal to one device",
    False: "not the function of one device",
    None: "could not tell",
}
#: How differences of what is compared are named
_NAMES = {
    "losses": r"loss$|result[\[.]",
    "gradients": r"gradient of (?!the output of )|gradient \(step",
    "updated parameters": r"updated parameter of ",
}
MEANING = (
    "Equal as functions of the parameters over the reals, for these shapes, inputs, integers and "
    "masks; rounding is not modelled."
)


def svg(verdict: Any, title: str) -> str:
    """What was compared, a square for each value, and the differences."""
    kind = {True: "same", False: "differs", None: "open"}[verdict.equal]
    parts = [
        f'<circle class="{kind}" cx="24" cy="24" r="8"/>',
        f'<text class="title" x="42" y="29">{escape(TITLES[verdict.equal])}</text>',
        f'<text class="soft code" x="16" y="54">{escape(title)}</text>',
    ]
    y = 72.0
    wrong = _wrong(verdict)
    for what, n in verdict.compared.items():
        if n:
            cells, height = _cells(what, n, wrong[what], y)
            parts, y = [*parts, *cells], y + height
    for text, soft in _told(verdict):
        y += 18
        style = ' class="soft"' if soft else ""
        parts.append(f'<text{style} x="{40 if soft else 16}" y="{y:.0f}">{escape(text)}</text>')
    return document(parts, WIDTH, y + 20, STYLE, TITLES[verdict.equal])


def html(verdict: Any, title: str) -> str:
    """The picture, every difference with its lines, and what the verdict rests on."""
    facts = [f"{verdict.trials} trials" if verdict.trials != 1 else "1 trial"]
    if verdict.equal:
        facts.append(f"different functions agree in all of them with a chance ≤ {_bound(verdict)}")
    if verdict.uninterpreted:
        facts.append(f"uninterpreted functions: {', '.join(verdict.uninterpreted)}")
    sections = [svg(verdict, title)]
    if verdict.differences:
        sections.append(_table(verdict.differences))
    foot = "".join(f"<p class='soft'>{escape(text)}</p>" for text in ("; ".join(facts), MEANING))
    return page(TITLES[verdict.equal], title, sections, foot)


def _bound(verdict: Any) -> str:
    return f"{verdict.error_bound:.0e}"


def _wrong(verdict: Any) -> Counter[str]:
    """How many differ of each kind that is compared; others, as of a module, are told in words."""
    return Counter(
        kind for d in verdict.differences for kind, name in _NAMES.items() if re.match(name, d.name)
    )


def _cells(what: str, n: int, wrong: int, y: float) -> tuple[list[str], float]:
    """A row of squares, those that differ first, and its height."""
    wrong = min(wrong, n)
    label = what.removesuffix("s") if n == 1 and what != "losses" else what
    label = "loss" if (what, n) == ("losses", 1) else f"{n} {label}"
    parts = [f'<text x="16" y="{y + 12:.0f}">{label}</text>']
    drawn = min(n, MOST_ROWS * COLUMNS)
    for i in range(drawn):
        left, top = LEFT + i % COLUMNS * (CELL + GAP), y + i // COLUMNS * (CELL + GAP)
        kind = "differs" if i < wrong else "same"
        size = f'width="{CELL}" height="{CELL}" rx="2"'
        parts.append(f'<rect class="{kind}" x="{left}" y="{top:.0f}" {size}/>')
    return parts, -(-drawn // COLUMNS) * (CELL + GAP) + 8


def _told(verdict: Any) -> list[tuple[str, bool]]:
    """(line, is it a detail) of the text below the squares."""
    if verdict.equal is None:
        return [(line, False) for line in textwrap.wrap(verdict.why, WRAPPED)]
    if verdict.equal:
        tried = f"{verdict.trials} trials, error ≤ {_bound(verdict)}"
        return [(f"{tried}; no value differs", False)]
    lines: list[tuple[str, bool]] = []
    for d in verdict.differences[:MOST_TOLD]:
        lines.append((f"{d.name}{d.line and f', at {d.line}'}", False))
        for text in filter(None, (d.what, d.remedy)):
            lines += [(line, True) for line in textwrap.wrap(text, WRAPPED)]
    if (more := len(verdict.differences) - MOST_TOLD) > 0:
        lines.append((f"and {more} more", False))
    return lines


def _table(differences: Sequence[Any]) -> str:
    rows = ["<tr><th>differs</th><th>what is known of it</th></tr>"]
    for d in differences:
        told = "<br>".join(escape(text) for text in (d.what, d.remedy) if text)
        where = f"<br><span class='soft'>{escape(d.line)}</span>" if d.line else ""
        rows.append(f"<tr><td>{escape(d.name)}{where}</td><td>{told}{_source(d.line)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _source(line: str) -> str:
    """The lines around it, if the file is here."""
    shown = [
        f"<b>{number:>4}  {escape(text)}</b>" if here else f"{number:>4}  {escape(text)}"
        for number, text, here in (source_text(line) if line else ())
    ]
    return f"<pre>{chr(10).join(shown)}</pre>" if shown else ""
