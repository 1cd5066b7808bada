"""Data-dependent branches: numbers that a traced step reads from tensors, and its ways by them.

A trace has no values. ``loss.item()`` gives a placeholder that can be printed and computed with; a
number of an integer tensor is a symbol, so that sizes that are read stay what they are. A branch on
either asks the run's Values, which has the answers that this run of the step is to take. So a step
runs with every answer to its branches on values and, where it makes plain numbers of values
(``float(loss)``), with several numbers. A way that ends in an error is one on which a run stops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy

from fcoll import source
from fcoll.errors import DataDependent, FcollError
from fcoll.graph.issued import Issued, describe
from fcoll.tracing.shared_values import SYMBOL

MOST_BRANCHES = 4  # on values, in one run of a step: both ways of 4 are 16 runs

_active: list[Values] = []
_agreed: dict[str, bool] = {}  # how ranks decide by values that they share


@contextmanager
def agreeing(answers: Mapping[str, bool]) -> Iterator[None]:
    """Inside, traces decide so by values that all ranks share; by their digests."""
    before = dict(_agreed)
    _agreed.update(answers)
    try:
        yield
    finally:
        _agreed.clear()
        _agreed.update(before)


def undecided(line: str, why: str, digest: str | None) -> DataDependent:
    """The error of a decision; ``digest`` says that all ranks take it alike."""
    if digest is not None:
        why += " All ranks share the value: fcoll.check follows both ways."
    return DataDependent(line=line, why=why, shared=digest)


@dataclass
class Values:
    """The values that one run of a step reads, and the branches that it took by them."""

    answers: tuple[bool, ...] = ()  # to the first branches
    number: float = 1.0  # what float() gives
    count: int = 1  # what int() gives
    branches: list[tuple[str, bool]] = field(default_factory=list)  # (line, answer) of each branch
    shared: list[str | None] = field(default_factory=list)  # and its digest, where ranks share it
    digest: Callable[[Any], str | None] = lambda condition: None
    agreed: Mapping[str, bool] = field(default_factory=lambda: dict(_agreed))  # by digest
    floats: str = ""  # the line that first made a plain float of a value
    ints: str = ""  # and that of a plain int, which could be a size
    layouts: list[dict[str, str]] = field(default_factory=list)  # of sharded tensors that it made
    _decided: dict[Any, bool] = field(default_factory=dict)

    def forget(self) -> None:
        """Clear the branches: the step begins anew."""
        self.branches.clear()
        self.shared.clear()
        self._decided.clear()
        self.floats = self.ints = ""

    def decide(self, usual: bool = False, condition: Any = None) -> bool:
        """The answer to a branch on a value; to the same condition the same."""
        if condition is not None and condition in self._decided:
            return self._decided[condition]
        line = user_line()
        digest = None if condition is None else self.digest(condition)
        if digest is not None and digest in self.agreed:
            return self.agreed[digest]
        if len(self.branches) == MOST_BRANCHES:
            most = f" A trace tries both ways of up to {MOST_BRANCHES} decisions; this is one more."
            first = next((i for i, shared in enumerate(self.shared) if shared), None)
            if first is None:
                raise undecided(line, most, digest)
            raise undecided(self.branches[first][0], most, self.shared[first])
        script = self.answers[len(self.branches) :]
        answer = script[0] if script else usual
        self.branches.append((line, answer))
        self.shared.append(digest)
        if condition is not None:
            self._decided[condition] = answer
        return answer

    def plain_float(self) -> float:
        self.floats = self.floats or user_line()
        return self.number

    def plain_int(self) -> int:
        self.ints = self.ints or user_line()
        return self.count


def user_line() -> str:
    """The line of the program that runs now, "model.py:31"."""
    return source.user_line() or "an unknown line"


def current() -> Values:
    """The Values of the run that is being traced."""
    if not _active:
        raise DataDependent(line=user_line(), why=" The value was read while a step was traced.")
    return _active[-1]


@contextmanager
def active(values: Values) -> Iterator[None]:
    _active.append(values)
    try:
        yield
    finally:
        _active.pop()


def assume(condition: Any, value: bool) -> bool:
    """bool(condition); while a step is traced, ``value``.

    Says which way a trace goes where a program decides by the value of a tensor:
    ``if fcoll.assume(loss.item() > 10, False):`` traces what follows if it is not.

    >>> assume(torch.tensor(3.0) > 10, True)
    False
    """
    return bool(value) if _active else bool(condition)


def note_layout(card: Callable[[], dict[str, str]]) -> None:
    """While a step is traced: it made a sharded tensor, of which this is a card."""
    if _active:
        _active[-1].layouts.append(card() | {"source": user_line()})


# -- placeholders ---


class Unknown(float):
    """A float that only a run knows. What is computed with it is unknown too, and what is decided
    by it is a branch on a value; to print it, it is a number like any other. ``of`` is how it was
    computed, of symbols; None if that is not known."""

    of: Any = None

    @classmethod
    def computed(cls, value: float, of: Any) -> Unknown:
        unknown = cls(value)
        unknown.of = of
        return unknown

    def __bool__(self) -> bool:
        return current().decide(condition=_computed("bool", self))

    def __float__(self) -> float:
        return current().plain_float()

    def __int__(self) -> int:
        return current().plain_int()

    __trunc__ = __floor__ = __ceil__ = __int__

    def __round__(self, digits: Any = None) -> Any:
        return self if digits is not None else current().plain_int()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return numpy.array(current().plain_float())

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """numpy.isnan(loss.item()) and the like."""
        plain = [float.__pos__(x) if isinstance(x, Unknown) else x for x in args]
        result = getattr(ufunc, method)(*plain, **kwargs)
        if isinstance(result, numpy.bool_):
            return Branch(usual=bool(result))
        return Unknown(result) if isinstance(result, float) else result


class Branch:
    """A condition that only a run knows: it is decided where it is used as one."""

    def __init__(self, usual: bool = False, of: Any = None) -> None:
        self.usual = usual  # the answer that is tried first
        self.of = of  # what is compared with what, if that is known

    def __bool__(self) -> bool:
        return current().decide(self.usual, self.of)

    def __int__(self) -> int:
        return int(bool(self))

    __index__ = __int__

    def __float__(self) -> float:
        return float(bool(self))

    def __invert__(self) -> Branch:
        return Branch(not self.usual, _computed("not", self))

    def __and__(self, other: Any) -> Branch:
        return Branch(self.usual)

    __or__ = __xor__ = __rand__ = __ror__ = __rxor__ = __and__

    def __repr__(self) -> str:
        return "unknown"


def _computed(name: str, *operands: Any) -> Any:
    """How a number or branch is computed, of symbols and plain numbers; None if that is unknown."""
    terms = [x.of if isinstance(x, (Unknown, Branch)) else x for x in operands]
    plain = all(type(x) in (int, float, bool, str, tuple) for x in terms)
    return (name, *terms) if plain else None


def _computing(name: str) -> Callable[..., Any]:
    """A float's method that computes: its result is unknown."""
    compute = getattr(float, name)

    def method(self: Unknown, *others: Any) -> Any:
        try:
            result = compute(self, *others)
        except ArithmeticError:  # the placeholders' fault, not the program's
            return Unknown(1.0)
        if isinstance(result, tuple):
            return tuple(map(Unknown, result))
        of = _computed(name, self, *others)
        return Unknown.computed(result, of) if isinstance(result, float) else result

    return method


def _comparing(name: str) -> Callable[..., Any]:
    """A float's method that compares: it gives a branch."""
    compare = getattr(float, name)

    def method(self: Unknown, other: Any) -> Any:
        if compare(self, other) is NotImplemented:
            return NotImplemented
        return Branch(of=_computed(name, self, other))

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
for _name in (*_BINARY, *("r" + name for name in _BINARY), "neg", "pos", "abs"):
    setattr(Unknown, f"__{_name}__", _computing(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Unknown, f"__{_name}__", _comparing(f"__{_name}__"))
Unknown.__hash__ = float.__hash__  # type: ignore[method-assign]


# -- a step whose way depends on values, traced each way: does it issue the same collectives? ---

# Tried besides 1.0 and 1 for plain numbers, which are not seen to be compared or used as a size.
FLOATS = (math.nan, 1e6, -1e6)
COUNTS = (2, 3)


@dataclass(frozen=True)
class Way:
    """One run of a step: its values, and its trace or the error that ended it."""

    values: Values
    trace: Any = None
    error: BaseException | None = None

    @property
    def answers(self) -> tuple[bool, ...]:
        """The answers to all branches that it came to."""
        return tuple(answer for _, answer in self.values.branches)

    @property
    def turn(self) -> tuple[str, bool, str | None]:
        """The branch at which it left the way before: its line, its answer there, and its digest if
        all ranks share the value."""
        i = min(len(self.values.answers), len(self.values.branches)) - 1
        return *self.values.branches[i], self.values.shared[i]


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
        path = way.answers
        todo += [(*path[:i], not path[i]) for i in range(len(answers), len(path))]


def _try_numbers(run: Callable[[Values], Any], first: Way) -> None:
    """Run the first way with other plain numbers, if it made any, and compare."""
    base = first.values
    answers = first.answers
    others = [(Values(answers, number=x), base.floats) for x in FLOATS if base.floats]
    others += [(Values(answers, count=n), base.ints) for n in COUNTS if base.ints]
    for values, line in others:
        way = _try(run, values)
        if way.error is None:
            _compare(first, way, line, f"{values.count if line == base.ints else values.number}")


def _try(run: Callable[[Values], Any], values: Values) -> Way:
    try:
        return Way(values, trace=run(values))
    except DataDependent:
        raise
    except (Exception, SystemExit) as error:
        if values.ints:
            raise DataDependent(line=values.ints, why=_PLAIN_INT + _error_text(error)) from error
        unasked = not values.branches and not values.floats
        if unasked or isinstance(error, FcollError):
            raise
        return Way(values, error=error)


_PLAIN_INT = (
    " int() makes a plain number of it, which is 1 in a trace; .item() and .tolist() keep it a "
    "symbol, which can be a size."
)


def _error_text(error: BaseException) -> str:
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


def _keys(calls: tuple[Issued, ...]) -> list[str]:
    """What ranks would have to agree on of each call; symbols by the order they come in."""
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"n{len(names)}")

    facts = [(c.op, c.ranks, c.instance, c.shapes, c.dtypes, c.args) for c in calls]
    return [SYMBOL.sub(name, repr(fact)) for fact in facts]


def _notes(ways: list[Way], first: Way) -> Iterator[str]:
    """Where the first way decided by a value, and what the other decision would have led to."""
    path = first.answers
    for i, (line, answer) in enumerate(first.values.branches):
        other = (*path[:i], not answer)
        ends = [way.error for way in ways if way.answers[: i + 1] == other]
        errors = {type(error).__name__ for error in ends if error is not None}
        same = "the collectives are the same" if None in ends else ", ".join(sorted(errors))
        yield f"{line} decides by a value, taken to be {answer}; if not: {same}"
