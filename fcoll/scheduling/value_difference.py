"""Where two values differ, and whether that refutes or only cannot be told.

Calls are taken for unknown functions: the same call of other values, and another value of the same
graph, are different. A call that the first graph does not have may still give the same, as a
product in chunks does: that cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fcoll.scheduling.value_terms import Terms, literals, numbers
from fcoll.scheduling.value_walk import GraphValues


@dataclass(frozen=True)
class GraphDifference:
    text: str
    nodes: tuple[str, ...]
    is_sure: bool


def difference(
    terms: Terms, what: str, one: int, two: int, a: GraphValues, b: GraphValues
) -> GraphDifference:
    """Of a result: term ``one`` in the first graph, ``two`` in the second."""
    return _Descent(terms, a, b).run(what, one, two)


class _Descent:
    def __init__(self, terms: Terms, before: GraphValues, after: GraphValues) -> None:
        self.terms, self.before, self.after = terms, before, after

    def run(self, what: str, one: int, two: int) -> GraphDifference:
        """From a result to the first call that takes another value."""
        users: list[str] = []
        while not self.is_known(two):
            step = self.inputs(one, two)
            if step is None:
                break
            users += filter(None, [self.name(self.after, two)])
            one, two = step
        known = self.is_known(two)
        # by names of the first graph, which has each for one value
        now, was = self.show(two, self.before if known else self.after), self.show(one, self.before)
        text = f"{what} is {now} where it was {was}"
        if users:
            text = f"{users[-1]}, and with it {what}, takes {now} where it took {was}"
        here = [self.name(self.after, two), self.name(self.before, one)]
        nodes = dict.fromkeys(filter(None, [*users[-1:], *here]))
        return GraphDifference(text, tuple(nodes), known or self.is_sure(one, two))

    # -- what is where ---

    def name(self, reading: GraphValues, term: int) -> str:
        """A node that has a value, or part of it."""
        for t in (term, *(p.term for p in self.terms.pieces(term))):
            found = reading.made_of.get(t) or reading.made_by.get(t)
            if found:
                return found
        return ""

    def has(self, reading: GraphValues, term: int) -> bool:
        return term in reading.made_by or term in reading.made_of

    def is_known(self, term: int) -> bool:
        """Is a value of the second graph made of calls of the first one?"""
        seen, left = set(), [term]
        while left:
            t = left.pop()
            if t in seen or self.has(self.before, t):
                continue
            seen.add(t)
            if self.terms.keys[t][0] in ("call", "attribute", "input"):
                return False
            left.extend(self.terms_in(t))
        return True

    def is_sure(self, one: int, two: int) -> bool:
        """Are they the same call, of the same values, with other arguments?"""
        a, b = self.terms.keys[one], self.terms.keys[two]
        same = a[0] == b[0] == "call" and a[1] == b[1]
        return same and list(self.terms_in(one)) == list(self.terms_in(two))

    def inputs(self, one: int, two: int) -> tuple[int, int] | None:
        """The first of what two equal calls take that differs."""
        a, b = self.terms.keys[one], self.terms.keys[two]
        if a[0] == b[0] == "value":
            mine, theirs = a[2], b[2]
            same = [p[1:] for p in mine] == [p[1:] for p in theirs] and a[1] == b[1]
            pairs = zip((p.term for p in mine), (p.term for p in theirs), strict=False)
            return next((pair for pair in pairs if pair[0] != pair[1]), None) if same else None
        if a[:2] != b[:2] or _literals(self, one) != _literals(self, two):
            return None
        mine, theirs = list(self.terms_in(one)), list(self.terms_in(two))
        pairs = zip(mine, theirs, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        alike = first is not None and self.terms.form(first[0]) == self.terms.form(first[1])
        return first if alike else None

    def terms_in(self, term: int) -> Iterator[int]:
        """What a term takes."""
        key = self.terms.keys[term]
        if key[0] == "value":
            yield from (piece.term for piece in key[2])
        elif key[0] == "call":
            yield from numbers(key[-2:] if isinstance(key[-2], tuple) else key[-1:])
        elif key[0] in ("item", "written"):
            yield key[1]
        elif key[0] == "written into":
            yield key[3]
            yield from (piece.term for piece in key[4])
        elif key[0] == "cast" or (isinstance(key[-1], int) and len(key) > 2):
            yield key[-1]
        elif isinstance(key[-1], tuple):
            yield from (t for t, _ in key[-1])

    def show(self, term: int, reading: GraphValues) -> str:
        if self.terms.keys[term][0] == "uninitialized":
            return "memory that nobody has written to"
        if self.terms.keys[term][0] != "value":
            return self.name(reading, term) or self.name(self.before, term) or "another value"
        pieces, shown = self.terms.pieces(term), []
        for piece in pieces[:3]:
            end = piece.begin + piece.size
            name = self.show(piece.term, reading)
            shown.append(f"bytes {piece.begin}..{end} of {name}")
        return ", ".join(shown) + (", ..." if len(pieces) > 3 else "")


def _literals(descent: _Descent, term: int) -> Any:
    """The arguments of a call without the values that it takes."""
    key = descent.terms.keys[term]
    return literals(key[-2:]) if key[0] == "call" else len(key)
