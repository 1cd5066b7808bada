"""What collectives cost on a machine, by size and form, and which form a program pays for."""

from __future__ import annotations

from typing import Any

from fcoll.costs.machine import Machine
from fcoll.costs.model import form_of, times_by_form
from fcoll.table.collectives import COLLECTIVES
from fcoll.units import show_bytes, show_us, table

#: The collectives that C++ carries out, in which every rank has a part.
OPS = [name for name, row in COLLECTIVES.items() if row.native.kernel and "src" not in row.position]
SIZES = (*(1 << k for k in range(10, 31, 4)), 1 << 32)


def by_form(machine: Machine, n: int) -> dict[str, Any]:
    """{collective: [{"bytes", "us": {form: us}, "form": the one that is priced}]}"""
    return {
        op: [
            {
                "bytes": b,
                "us": times_by_form(op, n, b, machine),
                "form": form_of(op, n, b, machine),
            }
            for b in SIZES
        ]
        for op in OPS
    }


def render(machine: Machine, found: dict[str, Any]) -> str:
    """A table for each collective; a star marks the form that a program pays for."""
    parts = [": ".join(filter(None, (machine.name, machine.note)))]
    for op, sizes in found.items():
        forms = list(dict.fromkeys(form for size in sizes for form in size["us"]))
        if not forms:
            continue
        lines = [(op, *forms)]
        for size in sizes:
            cells = [_cell(size, form) for form in forms]
            lines.append((show_bytes(size["bytes"]), *cells))
        parts += ["", *table(lines, "<" + ">" * len(forms))]
    if any(size["form"] == "measured" for sizes in found.values() for size in sizes):
        parts += ["", "measured times go before these formulas"]
    return "\n".join(parts)


def _cell(size: dict[str, Any], form: str) -> str:
    if form not in size["us"]:
        return ""
    return show_us(size["us"][form]) + ("*" if form == size["form"] else " ")
