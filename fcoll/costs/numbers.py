"""Arithmetic that takes numbers and sympy expressions alike."""

from __future__ import annotations

import math

import sympy

from fcoll.table.row import Expr


def is_symbolic(x: Expr) -> bool:
    return isinstance(x, sympy.Basic) and not x.is_number


def log2(n: Expr) -> Expr:
    return sympy.log(n) / sympy.log(2) if isinstance(n, sympy.Basic) else math.log2(n)


def sqrt(x: Expr) -> Expr:
    return sympy.sqrt(x) if isinstance(x, sympy.Basic) else math.sqrt(x)


def ratio(a: Expr, b: Expr) -> Expr:
    """a / b, exact where an expression is made of whole numbers."""
    whole = isinstance(a, int) and isinstance(b, int)
    return sympy.Rational(a, b) if whole and a % b else a / b


def least(*values: Expr) -> Expr:
    if any(is_symbolic(v) for v in values):
        return sympy.Min(*values, evaluate=False)  # comparing them takes sympy seconds
    return min(values)


def most(*values: Expr) -> Expr:
    if any(is_symbolic(v) for v in values):
        return sympy.Max(*values, evaluate=False)
    return max(values)
