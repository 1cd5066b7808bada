"""Calls on parts of values: parts of what another graph's call on the whole values gives.

A chunk of a value is the j-th of k equal parts of each of so many blocks, which lie in it one
behind the other. What an op that acts on each row by itself makes of chunks that are cut in the
same places is a chunk of what it makes of the whole; where that is, the shapes tell.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from fcoll.graph import _torch
from fcoll.scheduling.value_terms import Piece, Pieces, Terms, literals, numbers

Shape = tuple[int, ...]


class Part(NamedTuple):
    """Of a value: ``x.reshape(blocks, k, -1)[:, j]``; all of it if k is 1."""

    k: int = 1
    j: int = 0
    blocks: int = 1


class Operand(NamedTuple):
    """What a call takes a part of, and the dimension that is smaller in it (None: it is whole)."""

    part: Part
    shape: Shape
    dim: int | None


class Wholes:
    """The calls of a graph that was read: the first ``count`` terms. ``sums`` are names of products
    over rows, ``x.t() @ y``, that may be added up chunk by chunk, which rounds otherwise; those
    that are, are in ``summed``."""

    def __init__(
        self, terms: Terms, count: int, made_by: dict[int, str], sums: Collection[str]
    ) -> None:
        self.terms, self.sums = terms, sums
        self.made_by, self.count = made_by, count
        self.summed: set[str] = set()

    @cached_property
    def calls(self) -> dict[tuple[str, int], list[int]]:
        """By the op and a term that is in what they take."""
        found: dict[tuple[str, int], list[int]] = {}
        for term, key in enumerate(self.terms.keys[: self.count]):
            if key[0] == "call":
                taken = {p.term for x in numbers(key[2:]) for p in self.terms.pieces(x)}
                for x in taken:
                    found.setdefault((key[1], x), []).append(term)
        return found

    def part(self, key: tuple[Any, ...], form: Any, op: Any) -> Pieces | None:
        """What the call of this key gives, if that is a part of another call's result."""
        if form[0] is None or len(key) < 3 or key[2] == "draw":
            return None
        rule = _RULES.get(key[1]) or (_pointwise if op and _torch.op_is_pointwise(op) else None)
        if rule is not None:
            for whole in self.like(key[1], numbers(key[2:])):
                if (found := self._part_of(key, form, whole, rule)) is not None:
                    return found
        return self._sum(key, form) if self.sums else None

    def like(self, name: str, taken: Iterator[int]) -> Sequence[int]:
        """Calls of an op on values of which these may be parts."""
        firsts = [p.term for x in taken for p in self.terms.pieces(x)[:1]]
        return min((self.calls.get((name, x), []) for x in firsts), key=len, default=[])

    def _part_of(self, key: tuple[Any, ...], form: Any, whole: int, rule: Rule) -> Pieces | None:
        of, (shape, dtype) = self.terms.keys[whole], self.terms.form(whole)
        same = key[1] in _SIZED or literals(of[2:]) == literals(key[2:])
        if not same or shape is None or dtype != form[1]:
            return None
        pairs = zip(numbers(key[2:]), numbers(of[2:]), strict=True)
        operands = [self.operand(x, y) for x, y in pairs]
        cuts = {(o.part.k, o.part.j) for o in operands if o is not None and o.dim is not None}
        if None in operands or len(cuts) != 1:
            return None
        (k, j), dim = cuts.pop(), _dim_cut(shape, form[0])
        blocks = None if dim is None else rule(operands, shape, dim, key)
        if not blocks or not _fits(shape, form[0], Part(k, j, blocks)):
            return None
        size = self.terms.size(whole) // (blocks * k)
        return tuple(Piece(whole, (i * k + j) * size, size) for i in range(blocks))

    def operand(self, part: int, whole: int) -> Operand | None:
        """What of a term another term is."""
        shape, form = self.terms.form(whole)[0], self.terms.form(part)
        if part == whole:
            return Operand(Part(), shape or (), None)
        found = self.part_of(part, whole)
        if found is None or shape is None or form[1] != self.terms.form(whole)[1]:
            return None
        fits = form[0] is not None and _fits(shape, form[0], found)
        return Operand(found, shape, _dim_cut(shape, form[0])) if fits else None

    def part_of(self, part: int, whole: int) -> Part | None:
        """Where the bytes of a term lie in another's, if that is a chunk."""
        ranges = _located(self.terms.pieces(part), self.terms.pieces(whole))
        total = self.terms.size(whole)
        if ranges is None or not ranges:
            return None
        begin, size = ranges[0]
        if size == total:
            return Part()
        step = ranges[1][0] - begin if len(ranges) > 1 else total
        even = all(b - a == step and n == size for (a, n), (b, _) in pairwise(ranges))
        if not even or ranges[-1][1] != size or step * len(ranges) != total:
            return None
        if step % size or begin % size:
            return None
        return Part(step // size, begin // size, len(ranges))

    # -- products that are added up ---

    def _sum(self, key: tuple[Any, ...], form: Any) -> Pieces | None:
        """``x.t() @ y`` by chunks of rows of both: the first so many, or with the last all."""
        args: tuple[Any, ...] = key[2] if len(key) == 4 and not key[3] else ()
        if len(args) != {_MM: 2, _ADDMM: 3}.get(key[1]):
            return None
        *before, turned, y = args
        for whole in self.like(_MM, iter([y])):
            name, (turned_whole, y_whole) = self.made_by.get(whole, ""), self.terms.keys[whole][2]
            left, right = self._turned(turned, turned_whole), self.operand(y, y_whole)
            if name not in self.sums or left is None or right is None or left.part != right.part:
                continue
            k, j, blocks = left.part
            done = ("summed", whole, k, blocks)
            expected = [self.terms.number.get((*done, str(j)))] if j else []
            rows = left.dim == right.dim == 0
            if not rows or before != expected or self.terms.form(whole) != form:
                continue
            if j + 1 < k:
                whole = self.terms.of(*done, str(j + 1), form=form)
            else:
                self.summed.add(name)
            return (Piece(whole, 0, self.terms.size(whole)),)
        return None

    def _turned(self, part: int, whole: int) -> Operand | None:
        """Of x.t(): what part of x it is of."""
        one, two = self.terms.keys[part], self.terms.keys[whole]
        if one[:2] != ("call", _T) or two[:2] != ("call", _T):
            return None
        return self.operand(one[-1][0], two[-1][0])


def _located(part: Pieces, whole: Pieces) -> list[tuple[int, int]] | None:
    """The ranges of the whole in which these pieces lie, neighbours as one, in order."""
    places: dict[int, list[tuple[int, int, int]]] = {}
    at = 0
    for term, begin, size in whole:
        places.setdefault(term, []).append((begin, begin + size, at))
        at += size
    found: list[tuple[int, int]] = []
    end = 0
    for term, begin, size in part:
        fits = (
            to + begin - first
            for first, last, to in places.get(term, ())
            if first <= begin and begin + size <= last and to + begin - first >= end
        )
        if (place := next(fits, None)) is None:
            return None
        if found and place == end:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((place, size))
        end = place + size
    return found


def _dim_cut(whole: Shape, part: Shape) -> int | None:
    """The one dimension that differs."""
    if len(whole) != len(part):
        return None
    differ = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    return differ[0] if len(differ) == 1 else None


def _fits(whole: Shape, part: Shape, cut: Part) -> bool:
    """Is it a tensor of the part's shape, whose blocks end in the dimension that is cut?"""
    d = _dim_cut(whole, part)
    if d is None or whole[d] != cut.k * part[d]:
        return False
    outside = prod(whole[:d])
    return cut.blocks % outside == 0 and part[d] % (cut.blocks // outside) == 0


# -- rules: the blocks of the result, None where it is no chunk ---

Key = tuple[Any, ...]  # of a term: "call", the op, its arguments
Rule = Callable[[Sequence[Any], Shape, int, Key], int | None]


def _product(operands: Sequence[Operand], shape: Shape, dim: int, key: Key) -> int | None:
    """Rows of the left matrix; all of the right one, and of a bias that all rows have."""
    *bias, left, right = operands
    whole = right.dim is None and all(b.dim is None and len(b.shape) == 1 for b in bias)
    return left.part.blocks if whole and left.dim == dim == 0 else None


def _behind(where: slice) -> Rule:
    """It acts on dimensions behind the one that is cut; ``where`` they are among its arguments, of
    a view among those behind the tensor."""

    def rule(operands: Sequence[Operand], shape: Shape, dim: int, key: Key) -> int | None:
        first, given = operands[0], _ints(key[2][where])
        if first.dim != dim or not given or any(o.part != first.part for o in operands):
            return None
        behind = all(d % len(first.shape) > dim for d in given)
        return first.part.blocks if behind and first.shape[:dim] == shape[:dim] else None

    return rule


def _in_order(operands: Sequence[Operand], shape: Shape, dim: int, key: Key) -> int | None:
    """The elements stay in their order."""
    return operands[0].part.blocks


def _pointwise(operands: Sequence[Operand], shape: Shape, dim: int, key: Key) -> int | None:
    """Every operand has the same rows as the result, or one for all."""
    each = set()
    for part, of, d in operands:
        at = dim - len(shape) + len(of)
        if d is None:
            if at >= 0 and of[at] != 1:
                return None
        elif d != at:
            return None
        else:
            each.add(part.blocks // prod(of[:at]))
    return each.pop() * prod(shape[:dim]) if len(each) == 1 else None


def _ints(key: Any) -> list[int]:
    """The ints among literals, which are pairs of texts."""
    if not isinstance(key, tuple):
        return []
    return [int(key[1])] if key[:1] == ("int",) else [i for x in key for i in _ints(x)]


_MM, _ADDMM, _T, _RESHAPE = (
    f"call_function aten.{name}.default" for name in ("mm", "addmm", "t", "reshape")
)
_SIZED = {_RESHAPE}  # its arguments are sizes, and those are a chunk's
_FIRST, _SECOND, _BOTH = slice(0, 1), slice(1, 2), slice(0, 2)
_BY_DIM = {
    **dict.fromkeys(("sum.dim_IntList", "mean.dim", "amax.default", "amin.default"), _SECOND),
    **dict.fromkeys(("_softmax.default", "_log_softmax.default", "cat.default"), _SECOND),
    **dict.fromkeys(("slice.Tensor", "narrow.default", "select.int"), _FIRST),
    **dict.fromkeys(("split.Tensor", "split_with_sizes.default"), _SECOND),
    "transpose.int": _BOTH,
}
_RULES: dict[str, Rule] = {
    **dict.fromkeys((_MM, _ADDMM), _product),
    **dict.fromkeys((_RESHAPE, "call_function aten._to_copy.default"), _in_order),
    **{f"call_function aten.{name}": _behind(where) for name, where in _BY_DIM.items()},
}
