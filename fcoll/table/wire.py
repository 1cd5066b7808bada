"""Cost of collectives: the bytes that a rank of n sends, with b bytes each, and sequential steps.

All take numbers or sympy symbols, as does the arithmetic of prices below.
"""

from __future__ import annotations

import math

import sympy

from fcoll.table.row import Expr


def ring(n: Expr, b: Expr) -> Expr:
    """Each rank passes on all parts but one."""
    return b * (n - 1) / n


def ring_twice(n: Expr, b: Expr) -> Expr:
    return 2 * ring(n, b)


def everything(n: Expr, b: Expr) -> Expr:
    return b


def to_each(n: Expr, b: Expr) -> Expr:
    """The whole message to every other rank."""
    return b * (n - 1)


def nothing(n: Expr, b: Expr) -> Expr:
    return 0 * b


def n_minus_1(n: Expr) -> Expr:
    return n - 1


def twice_n_minus_1(n: Expr) -> Expr:
    return 2 * (n - 1)


def one(n: Expr) -> Expr:
    return 1


def zero(n: Expr) -> Expr:
    return 0


# -- arithmetic ---


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
