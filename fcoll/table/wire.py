"""Cost of collectives: the bytes that a rank of n sends, with b bytes each, and sequential steps.

All take numbers or sympy symbols.
"""

from __future__ import annotations

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
