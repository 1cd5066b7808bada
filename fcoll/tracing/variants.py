"""A step whose way depends on values, traced each way: does it issue the same collectives?

A step runs with every answer to its branches on values and, where it makes plain numbers of values
(``float(loss)``), with several numbers. A way that ends in an error is one on which a run stops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from fcoll.errors import DataDependent, FcollError
from fcoll.graph.issued import Issued, describe
from fcoll.tracing.values import Values, undecided

# Tried besides 1.0 and 1 for plain numbers, which are not seen to be compared or used as a size.
FLOATS = (math.nan, 1e6, -1e6)
COUNTS = (2, 3)


@dataclass(frozen=True)
class Way:
    """One run of a step: what it was told, and its trace or the error that ended it."""

    values: Values
    trace: Any = None
    error: BaseException | None = None

    @property
    def given(self) -> tuple[bool, ...]:
        """The answers to all branches that it came to."""
        return tuple(answer for _, answer in self.values.asked)

    @property
    def turn(self) -> tuple[str, bool, str | None]:
        """The branch at which it left the way before: its line, its answer there, and its digest if
        all ranks share the value."""
        i = min(len(self.values.answers), len(self.values.asked)) - 1
        return *self.values.asked[i], self.values.shared[i]


def settled(run: Callable[[Values], Any]) -> tuple[Any, tuple[str, ...]]:
    """The trace of the first way that comes to its end, and notes on the values that it went by.

    Raises DataDependent if another way issues other collectives.
    """
    ways: list[Way] = []
    first: Way | None = None
    for way in _ways(run):
        ways.append(way)
        if first is None and way.error is None:
            first = way
        elif first is not None and way.error is None:
            _compare(first, way, *way.turn)
    if first is None:
        assert ways[0].error is not None
        raise ways[0].error
    _try_numbers(run, first)
    return first.trace, tuple(dict.fromkeys(_notes(ways, first)))


def _ways(run: Callable[[Values], Any]) -> Iterator[Way]:
    """The step with each answer to each of its branches, the usual ones first."""
    todo: list[tuple[bool, ...]] = [()]
    while todo:
        answers = todo.pop(0)
        way = _try(run, Values(answers))
        yield way
        given = way.given
        todo += [(*given[:i], not given[i]) for i in range(len(answers), len(given))]


def _try_numbers(run: Callable[[Values], Any], first: Way) -> None:
    """The same way with other plain numbers, if it made any."""
    told = first.values
    answers = first.given
    others = [(Values(answers, number=x), told.floats) for x in FLOATS if told.floats]
    others += [(Values(answers, count=n), told.ints) for n in COUNTS if told.ints]
    for values, line in others:
        way = _try(run, values)
        if way.error is None:
            _compare(first, way, line, f"{values.count if line == told.ints else values.number}")


def _try(run: Callable[[Values], Any], values: Values) -> Way:
    try:
        return Way(values, trace=run(values))
    except DataDependent:
        raise
    except (Exception, SystemExit) as error:
        if values.ints:
            raise DataDependent(line=values.ints, why=_PLAIN_INT + _said(error)) from error
        unasked = not values.asked and not values.floats
        if unasked or isinstance(error, FcollError):
            raise
        return Way(values, error=error)


_PLAIN_INT = (
    " int() makes a plain number of it, which is 1 in a trace; .item() and .tolist() keep it a "
    "symbol, which can be a size."
)


def _said(error: BaseException) -> str:
    name = "" if isinstance(error, FcollError) else f"{type(error).__name__}: "
    return f" With it: {name}{str(error).partition(chr(10))[0]}"


def _compare(first: Way, other: Way, line: str, answer: Any, digest: str | None = None) -> None:
    """Raise unless both issue the same collectives."""
    lists = [way.trace.collectives for way in (first, other)]
    keys = [_keys(calls) for calls in lists]
    if keys[0] == keys[1]:
        return
    # where they went apart, which may be before the calls stop being the same
    lines = [[c.source for c in calls] for calls in lists]
    pairs = zip(zip_longest(*keys), zip_longest(*lines), strict=True)
    i = next(i for i, two in enumerate(pairs) if any(a != b for a, b in two))
    mine, theirs = (describe(c[i]) if i < len(c) else "no more collectives" for c in lists)
    why = f" If it is {answer}: {theirs}; else: {mine}."
    if other.values.ints == line:
        why += _PLAIN_INT
    raise undecided(line, why, digest)


_SYMBOL = re.compile(r"\b(?:u|zuf)\d+\b")


def _keys(calls: tuple[Issued, ...]) -> list[str]:
    """What ranks would have to agree on of each call; symbols by the order they come in."""
    names: dict[str, str] = {}

    def name(found: re.Match[str]) -> str:
        return names.setdefault(found[0], f"n{len(names)}")

    facts = [(c.op, c.ranks, c.instance, c.shapes, c.dtypes, c.args) for c in calls]
    return [_SYMBOL.sub(name, repr(fact)) for fact in facts]


def _notes(ways: list[Way], first: Way) -> Iterator[str]:
    """Where the first way decided by a value, and what the other decision would have led to."""
    given = first.given
    for i, (line, answer) in enumerate(first.values.asked):
        other = (*given[:i], not answer)
        ends = [way.error for way in ways if way.given[: i + 1] == other]
        errors = {type(error).__name__ for error in ends if error is not None}
        same = "the collectives are the same" if None in ends else ", ".join(sorted(errors))
        yield f"{line} decides by a value, taken to be {answer}; if not: {same}"
