"""Sizes that are expressions, and what they are taken to be where a number is needed.

A symbol of a shape has the value that it had in the trace. One that only a run knows (of what
``nonzero`` gives, of splits that are read from a tensor) is taken at its upper bound, if torch
knows one: from the op that made it, or from ``torch._check(n <= 4096)`` in the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from fcoll.errors import MissingSize
from fcoll.graph import _torch


def values_of(size: Any) -> dict[str, int]:
    """The symbols of a size that have a value or a bound: {"s0": 128}."""
    node = getattr(size, "node", None)  # of a SymInt
    symbols = node.expr.free_symbols if node is not None else ()
    values = {str(s): _torch.symbol_value(node, s) for s in symbols}
    return {name: value for name, value in values.items() if value is not None}


class Hints:
    """A size as a number: ``hint(size)``. ``given`` are values by name, which go first."""

    def __init__(self, given: Mapping[str, int] | None = None) -> None:
        self.given = dict(given or {})

    def __call__(self, size: Any) -> int:
        node = getattr(size, "node", None)
        if node is None:
            return int(size)
        known = values_of(size) | self.given
        missing = sorted(str(s) for s in node.expr.free_symbols if str(s) not in known)
        if missing:
            raise MissingSize(symbols=", ".join(missing), first=missing[0])
        return int(node.expr.subs({s: known[str(s)] for s in node.expr.free_symbols}))


def to_text(expr: Any) -> str:
    """An expression such that from_text gives an equal one, assumptions of its symbols included.

    >>> n = sympy.Symbol("n", integer=True, positive=True)
    >>> from_text(to_text(4 * n + 1)) == 4 * n + 1
    True
    """
    return sympy.srepr(expr)


def from_text(text: str) -> Any:
    return sympy.sympify(text, locals=_torch.SYMPY_FUNCTIONS)
