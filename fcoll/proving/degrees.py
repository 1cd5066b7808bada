"""How far can two different functions agree by chance?

A polynomial of degree d that is not zero is zero at no more than d/p of the points (Schwartz and
Zippel). A run of the program on degrees, instead of values, bounds d. An element has 17 bits each
of the degree of its numerator, that of its denominator, and which denominator that is: of a sum of
fractions it counts once if they share it, as all parts of x / |x| do. Parameters have degree 1,
uninterpreted functions give new variables, exp(x) = 1 + x p r + x (x - 1) / 2 (p r)^2 has twice
that of x r. Elements that are numbers modulo p have 2^51 more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.proving.algebra import Algebra
from fcoll.proving.known_results import KnownResults
from fcoll.proving.ring import Ring

_BITS = 2.0**17
_MOST = _BITS - 1  # of either degree: more than any p
_NUMBER = 2.0**51


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Degrees of numerator and denominator, and which denominator it is: 0 if it is 1."""
    x = torch.where(x.isfinite(), x, 0.0)
    x = torch.where(x >= _NUMBER, x - _NUMBER, x)
    which = (x / _BITS**2).floor()
    x = x - which * _BITS**2
    over = (x / _BITS).floor()
    return x - over * _BITS, over, which


def _made(top: Tensor, over: Tensor, which: Tensor) -> Tensor:
    """Denominators are multiplied by adding their numbers."""
    which = torch.where(over > 0, which % _BITS, 0.0)
    return top.clamp(max=_MOST) + over.clamp(max=_MOST) * _BITS + which * _BITS**2


def _is_number(x: Tensor) -> Tensor:
    """Modulo p: sums and products of exponentials, which are 1, and of constants. Their first
    digit, then, has half of the degree, so that the inverse has no higher one and no denominator:
    1 / (1 + p a + p^2 b) = 1 - p a + p^2 (a^2 - b)."""
    return (x >= _NUMBER) | (x == 0) | ~x.isfinite()


def _marked(x: Tensor, number: Tensor) -> Tensor:
    return torch.where(number & (x > 0), x + _NUMBER, x)


class Degrees(Algebra):
    """Elements are degrees."""

    def __init__(self, rings: Sequence[Ring] = ()) -> None:
        super().__init__()
        self.rings = rings  # of the trials that were run
        self.deepest = 0.0  # the largest degree of an argument of an uninterpreted function
        self._random = torch.Generator().manual_seed(0)
        self._results = KnownResults()  # of rules: layers that are alike have the same degrees
        self._numbered = 0  # tensors of new denominators

    def applied(self, rule: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        numbered = self._numbered
        return self._results.of(
            f"{name}, logarithms met" if self._has_met_logs() else name,
            args,
            kwargs,
            lambda: rule(self, *args, **kwargs),
            lambda: self._numbered == numbered,
        )

    def _new(self, like: Tensor, where: Tensor) -> Tensor:
        """Numbers of denominators that nothing else has, where there are any."""
        if not bool(where.any()):
            return torch.zeros(like.shape, dtype=torch.float64)
        self._numbered += 1
        return torch.randint(1, int(_BITS), like.shape, generator=self._random).to(torch.float64)

    def number(self, value: complex) -> Tensor:
        if isinstance(value, float) and value != value:
            return self.of_token(value)
        infinite = isinstance(value, float) and value in (float("inf"), float("-inf"))
        return torch.tensor(value if infinite else 0.0, dtype=torch.float64)

    def lift(self, x: Tensor) -> Tensor:
        if (done := self.of_tokens(x)) is not None:
            return done
        return torch.zeros(x.shape, dtype=torch.float64)

    def draw(self, name: str, count: int) -> Tensor:
        return torch.ones(count, dtype=torch.float64)

    def constant(self, x: float) -> float | None:
        return 1.5 if x == 0 else None  # which is not known: 1 - x is not 0, int(x) is a first step

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        (a, b, i), (c, d, j) = _parts(x), _parts(y)
        apart = _made(torch.maximum(a + d, c + b), b + d, i + j)
        shared = (i == j) & (b == d)
        done = torch.where(shared, _made(torch.maximum(a, c), b, i), apart)
        return _marked(done, _is_number(x) & _is_number(y))

    def neg(self, x: Tensor) -> Tensor:
        return x

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        (a, b, i), (c, d, j) = _parts(x), _parts(y)
        return _marked(_made(a + c, b + d, i + j), _is_number(x) & _is_number(y))

    def square(self, x: Tensor) -> Tensor:
        return self.mul(x, x)

    def inverse(self, x: Tensor) -> Tensor:
        top, over, _ = _parts(x)
        number = _is_number(x)
        return torch.where(number, x, _made(over, top, self._new(x, (top > 0) & ~number)))

    def bilinear(
        self, fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, terms: int = 1
    ) -> Tensor:
        one_x, one_y = torch.ones_like(x), torch.ones_like(y)
        which_x, which_y = _parts(x)[2], _parts(y)[2]
        count = fn(one_x, one_y)
        x_alike = _alike(lambda i: fn(i, one_y), which_x, count)
        y_alike = _alike(lambda i: fn(one_x, i), which_y, count)
        shared = None if x_alike is None or y_alike is None else x_alike + y_alike
        return self._sum(self.mul(_largest(x), _largest(y)), terms, count, shared)

    def linear(
        self, fn: Callable[[Tensor], Tensor], x: Tensor, terms: int = 1, wraps: bool = False
    ) -> Tensor:
        count = fn(torch.ones_like(x))
        return self._sum(_largest(x), terms, count, _alike(fn, _parts(x)[2], count))

    def _sum(self, x: Tensor, terms: int, like: Tensor, shared: Tensor | None) -> Tensor:
        """Of so many fractions, each with a denominator of its own or all with one that they
        share."""
        top, over, _ = _parts(x)
        if shared is None:
            top, over, shared = top + (terms - 1) * over, terms * over, self._new(like, over > 0)
        done = _made(top.expand(like.shape), over.expand(like.shape), shared)
        return _marked(done, _is_number(x))

    def exp(self, x: Tensor) -> Tensor:
        top, over, which = _parts(x)
        done = _made(2 * top + 2, 2 * over, 2 * which)
        return _marked(done, done > 0)

    def log(self, x: Tensor) -> Tensor:
        self._note(x)
        top, over, which = _parts(x)
        return _made(top.clamp(min=1), over, which)  # its exponential is x

    def of_logs(self, x: Tensor) -> Tensor:
        """All, if a trial has met one: the degree is then no lower than that of those."""
        return torch.full(x.shape, self._has_met_logs()) | (x == 0)

    def _has_met_logs(self) -> bool:
        return any(ring.took_sigmoid_of_log for ring in self.rings)

    def root(self, x: Tensor) -> Tensor:
        """A new variable, whose square is x. It and its inverse count for 2: of powers from -m to n
        there are m + n, no more than twice the larger."""
        self._note(x)
        top, over, _ = _parts(x)
        return _made((top / 2).ceil().clamp(min=2), (over / 2).ceil(), self._new(x, over > 0))

    def inverse_root(self, x: Tensor) -> Tensor:
        self._note(x)
        return torch.full(x.shape, 2.0, dtype=torch.float64)

    def opaque(self, name: str, *args: Tensor) -> Tensor:
        self.uninterpreted.add(name)
        for x in args:
            self._note(x)
        return torch.ones(torch.broadcast_shapes(*(x.shape for x in args)), dtype=torch.float64)

    def _note(self, x: Tensor) -> None:
        if x.numel():
            self.deepest = max(self.deepest, degree_of(x))

    def key(self, x: Tensor) -> Tensor:
        """By place, alike on all ranks: by degree the first element would be the largest, and all
        tokens go to the first expert."""
        self._note(x)
        place = torch.arange(x.numel(), dtype=torch.float64).view(x.shape)
        by_place = 1 + (place * 7919) % 1009
        return torch.where((x == 0) | ~x.isfinite(), x, by_place)

    def cut(self, x: Tensor) -> Tensor:
        self._note(x)
        return torch.where(x == 0, x, 1.0)

    def uncut(self, x: Tensor) -> Tensor:
        return x

    def counts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x == 0, torch.ones_like(x)  # which one is not known

    def pick(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        (a, b, i), (c, d, j) = _parts(x), _parts(y)
        which = torch.where(i == j, i, self._new(i + j, i != j))
        out = _made(torch.maximum(a, c), torch.maximum(b, d), which)
        out = _marked(out, _is_number(x) & _is_number(y))
        return torch.broadcast_tensors(out, condition)[0].clone()


def _alike(fn: Callable[[Tensor], Tensor], which: Tensor, count: Tensor) -> Tensor | None:
    """The denominator of the terms of each sum that fn makes, if they have one each: then n times
    the sum of squares is the square of the sum. In halves of 9 bits, so that this is exact."""
    if not bool(which.any()):
        return torch.zeros_like(count)
    for half in (which % 512, (which / 512).floor()):
        if not torch.equal(count * fn(half * half), fn(half) ** 2):
            return None
    return torch.where(count > 0, fn(which) / count, 0.0)


def _largest(x: Tensor) -> Tensor:
    """The largest degrees, of no denominator in particular."""
    top, over, _ = _parts(x)
    if not x.numel():
        return torch.zeros((), dtype=torch.float64)
    done = _made(top.max(), over.max(), torch.zeros((), dtype=torch.float64))
    return _marked(done, _is_number(x).all())


def degree_of(x: Tensor) -> float:
    """The largest degree of numerator or denominator among the elements."""
    top, over, _ = _parts(x)
    return float(torch.maximum(top, over).max()) if x.numel() else 0.0
