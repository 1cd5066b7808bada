"""Equivalent ranks: those with the same answers to all that a program asks about ranks.

While a rank is traced, its number is not an int but a Number, which has the value of every rank. A
comparison (``rank == 13``) is answered for the rank that is traced, and the ranks with another
answer are not like it. So is every use as a plain number. What is computed of a Number is one, too.
A program has no other way to tell ranks apart, so ranks that are alike in the end run the same
trace, each on groups of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy

Values = numpy.ndarray  # a number of every rank

MOST_MEMBERS = 1024  # of a group whose ranks a program is given as Numbers


class Alike:
    """The ranks of a mesh that have answered like one of them so far: ``same``."""

    def __init__(self, axes: Mapping[str, int], rank: int) -> None:
        self.axes, self.rank, self.size = dict(axes), rank, prod(axes.values())
        self.same = numpy.ones(self.size, dtype=bool)
        self.in_tensors = False  # is a number of ranks in a tensor, or in a seed?
        self.ranks = numpy.arange(self.size)
        sizes = list(axes.values())
        strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
        self.stride = dict(zip(axes, strides, strict=True))

    def ask(self, values: Values) -> Any:
        """This rank's answer; those with others are not like it."""
        mine = values[self.rank]
        self.same &= values == mine
        return mine.item()

    def only_me(self) -> None:
        """The program asked for something that is known of this rank only."""
        self.same &= self.ranks == self.rank

    def index(self, axis: str) -> Values:
        """The place of every rank along an axis."""
        return self.ranks // self.stride[axis] % self.axes[axis]

    def member(self, axis: str, place: Any) -> Values:
        """The rank at a place of every rank's group along an axis."""
        return self.ranks + (place - self.index(axis)) * self.stride[axis]

    def place_of(self, axis: str, ranks: Any) -> Values:
        """Where ranks are in every rank's group along an axis; -1 where they are not in it."""
        first, stride = self.member(axis, 0), self.stride[axis]
        place = (ranks - first) // stride
        inside = (place >= 0) & (place < self.axes[axis]) & (first + place * stride == ranks)
        return numpy.where(inside, place, -1)

    def number(self, values: Values) -> Number:
        return Number(values, self)

    def shares(self, size: Any, n: int) -> None:
        """A dim of this size was cut into n parts, of which ranks take the one of their place."""
        if isinstance(size, int) and n > 0 and size % n == 0:
            return
        axes = [axis for axis, length in self.axes.items() if length == n]
        if not axes or not isinstance(size, int):
            self.only_me()
        whole = -(-size // n) if isinstance(size, int) else 0
        for axis in axes:
            self.ask(numpy.clip(size - self.index(axis) * whole, 0, whole))

    def issued(self, calls: Iterable[Any]) -> None:
        """What ranks ask by their calls: which of uneven sizes is theirs, and what their groups
        are, where not an axis."""
        for call in calls:
            if call.group not in (*self.axes, "world"):
                self.only_me()
            lists = [v for v in call.args.values() if isinstance(v, (list, tuple))]
            if any(len(set(map(str, v))) > 1 for v in lists) and call.group in self.axes:
                self.ask(self.index(call.group))


def told_apart(colours: Values, axes: Mapping[str, int]) -> Values:
    """A colour of every rank, finer until all ranks of a colour meet the same colours, place by
    place, along each axis: what holds of one of them then holds of all.

    >>> len({*told_apart(numpy.array([0, 0, 0, 1]), {"dp": 2, "tp": 2})})  # by whom they meet
    4
    """
    shape = tuple(axes.values())
    while True:
        keys = [colours]
        for i, n in enumerate(shape):
            along = numpy.moveaxis(colours.reshape(shape), i, -1)
            rows = numpy.unique(along.reshape(-1, n), axis=0, return_inverse=True)[1].reshape(-1)
            whole = numpy.repeat(rows, n).reshape(along.shape)
            keys.append(numpy.moveaxis(whole, -1, i).reshape(-1))
        finer = together(keys)
        if finer.max() == colours.max():
            return colours
        colours = finer


def together(keys: Sequence[Values]) -> Values:
    """One colour for each set of values that ranks have."""
    return numpy.unique(numpy.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)


class Number:
    """A number of every rank that acts as the traced rank's; every decision by it goes to ask()."""

    __slots__ = ("_of", "_values")

    def __init__(self, values: Values, of: Alike) -> None:
        self._values, self._of = values, of

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override, misc]
        """isinstance(rank, int)"""
        return float if self._values.dtype.kind == "f" else int

    def __index__(self) -> int:
        return int(self._of.ask(self._values))

    __int__ = __trunc__ = __index__

    def __float__(self) -> float:
        return float(self._of.ask(self._values))

    def __bool__(self) -> bool:
        return self._of.ask(self._values != 0)

    def __hash__(self) -> int:
        return hash(self._of.ask(self._values))

    def __format__(self, spec: str) -> str:
        """To print it is to decide nothing."""
        return format(self._values[self._of.rank].item(), spec)

    def __str__(self) -> str:
        return format(self)

    __repr__ = __str__

    def __neg__(self) -> Number:
        return Number(-self._values, self._of)

    def __abs__(self) -> Number:
        return Number(abs(self._values), self._of)

    def __pos__(self) -> Number:
        return self

    def __copy__(self) -> Number:
        return self

    def __deepcopy__(self, memo: Any) -> Number:
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An op on tensors and numbers. Where it computes element by element the number decides
        nothing but values, as in ``targets >= rank * size``, and a trace has no values."""
        plain = this_ranks if getattr(func, "__name__", "") in _ELEMENTWISE else plain_number
        options = {name: nested(plain, x) for name, x in (kwargs or {}).items()}
        return func(*nested(plain, args), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of.ask(self._values), name)


def _values_of(x: Any) -> Any:
    """To compute with it for all ranks at once: a Number's values, or a plain number."""
    if type(x) is Number:
        return x._values
    return x if type(x) in (int, float, bool) else None


def _computing(fn: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        theirs = _values_of(other)
        if theirs is None:
            of_tensor = hasattr(other, "__torch_function__")
            mine = (this_ranks if of_tensor else plain_number)(self)
            return fn(other, mine) if swapped else fn(mine, other)
        a, b = (theirs, self._values) if swapped else (self._values, theirs)
        if fn in _DIVIDING:
            if not self._of.ask(numpy.broadcast_to(b, self._values.shape) != 0):
                raise ZeroDivisionError("division by zero")
            b = numpy.where(b == 0, 1, b)  # of ranks that are not alike by now
        return Number(numpy.asarray(fn(a, b)), self._of)

    return method


def _comparing(fn: Callable[[Any, Any], Any]) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        theirs = _values_of(other)
        if theirs is None:
            return NotImplemented
        return self._of.ask(fn(self._values, theirs))

    return method


def _plainly(name: str) -> Callable[..., Any]:
    """By the plain number: seldom done with ranks."""

    def method(self: Number, *others: Any) -> Any:
        return getattr(self._of.ask(self._values), name)(*map(plain_number, others))

    return method


def plain_number(x: Any) -> Any:
    """The plain number that a Number is on the traced rank; anything else as it is."""
    return x._of.ask(x._values) if type(x) is Number else x


def this_ranks(x: Any) -> Any:
    """The traced rank's number as a tensor element: who reads the tensor's value decides by it."""
    if type(x) is not Number:
        return x
    x._of.in_tensors = True
    return x._values[x._of.rank].item()


def nested(fn: Callable[[Any], Any], x: Any) -> Any:
    return type(x)(nested(fn, y) for y in x) if type(x) in (tuple, list) else fn(x)


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
#: Of torch's functions, by name, those whose numbers decide only values.
_ELEMENTWISE = {
    *(f"__{name}__" for name in _COMPARISONS),
    *(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r", "i")),
    *("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "pow"),
    *("add_", "sub_", "mul_", "div_", "remainder_", "fill_", "masked_fill", "masked_fill_"),
    *(*_COMPARISONS, "where", "clamp", "clamp_", "maximum", "minimum", "logical_and"),
}

_DIVIDING = (operator.floordiv, operator.mod, operator.truediv)
for _name, _fn in {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "truediv": operator.truediv,
}.items():
    setattr(Number, f"__{_name}__", _computing(_fn, swapped=False))
    setattr(Number, f"__r{_name}__", _computing(_fn, swapped=True))
for _fn in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
    setattr(Number, f"__{_fn.__name__}__", _comparing(_fn))
for _name in ("pow", "divmod", "lshift", "rshift", "and", "or", "xor"):
    setattr(Number, f"__{_name}__", _plainly(f"__{_name}__"))
    setattr(Number, f"__r{_name}__", _plainly(f"__r{_name}__"))
for _name in ("__round__", "__invert__", "__floor__", "__ceil__"):
    setattr(Number, _name, _plainly(_name))
