"""Values by what makes them, so that those of two graphs can be compared.

A *term* is a call and the values that it takes, kept once: equal terms are one number. The bytes of
a value are *pieces* of terms, in order. Ops that only move bytes make no terms, they cut and join
pieces. A collective acts on each byte by itself (a gather), or on each element of several parts (a
sum), so its result is pieces of terms, too: those of a bucket are its members'.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch


class Piece(NamedTuple):
    """``size`` bytes of a term's value, from byte ``begin`` on."""

    term: int
    begin: int
    size: int


Pieces = tuple[Piece, ...]
Range = tuple[int, int]  # begin and size, in bytes


class Terms:
    """The terms of the graphs that are compared; the number of each is its place in ``keys``."""

    def __init__(self) -> None:
        self.keys: list[tuple[Any, ...]] = []
        self.forms: list[Any] = []  # shape and dtype of each that is a whole value
        self.number: dict[tuple[Any, ...], int] = {}
        self.parts: dict[int, Pieces] = {}  # of other terms, which a term's value is made of

    def of(self, *key: Any, form: Any = None) -> int:
        found = self.number.get(key)
        if found is None:
            found = self.number[key] = len(self.keys)
            self.keys.append(key)
            self.forms.append(form)
        return found

    def value(self, pieces: Pieces, form: Any) -> int:
        """The term of a value; that of a call, if it is all that the call gives, as it gives it."""
        if len(pieces) == 1 and pieces[0].begin == 0 and self.forms[pieces[0].term] == form:
            return pieces[0].term
        return self.of("value", form, pieces)

    def form(self, term: int) -> Any:
        """Shape and dtype of a value; (None, "") where they are not known."""
        key = self.keys[term]
        return (key[1] if key[0] == "value" else self.forms[term]) or (None, "")

    def pieces(self, term: int) -> Pieces:
        """What a value is made of: itself, if it is no value of other terms' bytes."""
        key = self.keys[term]
        return key[2] if key[0] == "value" else (Piece(term, 0, self.size(term)),)

    def given(self, term: int, size: int) -> Pieces:
        """What a call gives: so many bytes of its own, or parts of other terms."""
        return self.parts.get(term) or (Piece(term, 0, size),)

    def size(self, term: int) -> int:
        """In bytes; of a shape that is not known, one: such a value is never cut."""
        shape, dtype = self.form(term)
        return 1 if shape is None else prod(shape) * _item_bytes(dtype)

    # -- what collectives make of bytes ---

    def each(self, head: tuple[Any, ...], pieces: Iterable[Piece]) -> Pieces:
        """Of each byte, or element, by itself."""
        return tuple(Piece(self.of(*head, term), begin, size) for term, begin, size in pieces)

    def cast(self, pieces: Pieces, old: tuple[str, int], new: tuple[str, int]) -> Pieces:
        """Elements of another dtype; ``old`` and ``new`` are its name and size."""
        if old == new:
            return pieces
        return tuple(
            Piece(self.of("cast", old, new, t), b * new[1] // old[1], size * new[1] // old[1])
            for t, b, size in pieces
        )

    def combined(self, head: tuple[Any, ...], parts: Sequence[Pieces]) -> Pieces:
        """Of the elements at one place in all parts, which are of one size."""
        cuts = sorted({end for part in parts for end in accumulate(p.size for p in part)})
        made, at = [], 0
        aligned = [list(_cut(part, cuts)) for part in parts]
        for i, end in enumerate(cuts):
            here = [part[i] for part in aligned]
            first = here[0].begin  # places are told by those of the first part
            of = tuple((piece.term, piece.begin - first) for piece in here)
            made.append(Piece(self.of(*head, of), first, end - at))
            at = end
        return joined(made)


@cache
def _item_bytes(dtype: str) -> int:
    return int(getattr(torch, dtype.removeprefix("torch.")).itemsize) if dtype else 1


def numbers(key: Any) -> Iterator[int]:
    """The terms among arguments: their literals are pairs of texts."""
    if isinstance(key, int):
        yield key
    elif isinstance(key, tuple):
        for x in key:
            yield from numbers(x)


def literals(key: Any) -> Any:
    """Arguments without the terms among them."""
    if isinstance(key, tuple):
        return tuple(literals(x) for x in key)
    return None if isinstance(key, int) else key


def joined(pieces: Iterable[Piece]) -> Pieces:
    """With neighbours that are one piece made one."""
    made: list[Piece] = []
    for piece in pieces:
        last = made[-1] if made else None
        if last and last.term == piece.term and last.begin + last.size == piece.begin:
            made[-1] = Piece(last.term, last.begin, last.size + piece.size)
        elif piece.size:
            made.append(piece)
    return tuple(made)


def _cut(pieces: Pieces, cuts: Sequence[int]) -> Iterator[Piece]:
    at = 0
    places = iter(cuts)
    for term, begin, size in pieces:
        end, start = at + size, at
        while at < end:
            cut = next(places)
            yield Piece(term, begin + at - start, cut - at)
            at = cut


def taken(pieces: Sequence[tuple[int, ...]], ranges: Iterable[Range]) -> list[tuple[int, ...]]:
    """What lies in these ranges of pieces, or of ranges themselves: their last two numbers are
    where they begin, and their size."""
    ends = list(accumulate(p[-1] for p in pieces))
    found = []
    for begin, size in ranges:
        at, end = begin, begin + size
        i = bisect_right(ends, at)
        while at < end:
            piece, stop = pieces[i], min(ends[i], end)
            inside = at - (ends[i] - piece[-1])
            found.append((*piece[:-2], piece[-2] + inside, stop - at))
            at, i = stop, i + 1
    return found


def replaced(content: Pieces, ranges: Sequence[Range], written: Pieces) -> Pieces:
    """The content after these bytes were written to its ranges, which are in the order of those."""
    changes, at = [], 0
    for begin, size in ranges:
        changes.append((begin, size, at))
        at += size
    made: list[Any] = []
    done, total = 0, sum(p.size for p in content)
    for begin, size, source in sorted(changes):
        made += taken(content, [(done, begin - done)])
        made += taken(written, [(source, size)])
        done = begin + size
    made += taken(content, [(done, total - done)])
    return joined(Piece(*p) for p in made)
