"""Sizes of several ranks compared: equal, different, or known only to a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import sympy

from fcoll.checking.provenance import Origins, Term, add
from fcoll.graph.symbolic_sizes import has_symbols


class HasOrigins(Protocol):
    @property
    def origins(self) -> Origins: ...


class Sizes:
    """The sizes of all ranks' calls, with what is known of where they come from."""

    def __init__(self, programs: Mapping[int, HasOrigins]) -> None:
        self._programs = programs
        self._resolved: dict[Term, Term] = {}
        self._symbols: dict[Term, sympy.Symbol] = {}

    def common(self, size: Any, rank: int) -> Any:
        """A size of one rank in terms that all ranks share: equal ones are equal sizes."""
        if not has_symbols(size):
            return size
        return size.subs({s: self._common_symbol(s, rank) for s in size.free_symbols}).expand()

    def _common_symbol(self, symbol: sympy.Symbol, rank: int) -> Any:
        term = self._programs[rank].origins.symbols.get(str(symbol), ("read", rank, str(symbol)))
        resolved = self._resolve(term)
        parts = resolved[1:] if resolved[0] == "sum" else (resolved,)
        return sum(self._symbol(part) for part in parts)

    def _symbol(self, term: Term) -> sympy.Symbol:
        name = f"x{len(self._symbols)}"
        return self._symbols.setdefault(term, sympy.Symbol(name, integer=True))

    def _resolve(self, term: Term) -> Term:
        """What was sent is what its sender computed, if the sender was traced."""
        if term not in self._resolved:
            self._resolved[term] = self._resolve_new(term)
        return self._resolved[term]

    def _resolve_new(self, term: Term) -> Term:
        kind = term[0]
        if kind == "sum":
            return add(*map(self._resolve, term[1:]))
        if kind == "op":
            name, plain, terms, i = term[1:]
            return "op", name, plain, tuple(map(self._resolve, terms)), i
        if kind == "sent":
            group, k, rank, i = term[1:]
            there = self._programs.get(rank)
            sent = there.origins.sent.get((group, k)) if there else None
            if sent is not None and i < len(sent):
                return self._resolve(sent[i])
        return term


def differ(a: Any, b: Any) -> bool | None:
    """Are two sizes, in common terms, different? None if only a run knows.

    >>> n = sympy.Symbol("n")
    >>> differ(3, 4), differ(n, n), differ(n, n + 1), differ(n, 4)
    (True, False, True, None)
    """
    if a == b:
        return False
    if not has_symbols(a) and not has_symbols(b):
        return True
    gap = a - b
    return None if has_symbols(gap) else bool(gap != 0)


def apart(x: Any, y: Any) -> bool | None:
    """``differ`` of nested tuples: True if anything surely differs, else None if anything may."""
    if isinstance(x, tuple) and isinstance(y, tuple):
        if len(x) != len(y):
            return True
        results = [apart(a, b) for a, b in zip(x, y, strict=True)]
        return True if True in results else None if None in results else False
    is_size = [isinstance(v, (int, sympy.Expr)) and not isinstance(v, bool) for v in (x, y)]
    return differ(x, y) if all(is_size) else bool(x != y)
