"""How far can two different functions agree by chance?

A polynomial of degree d that is not zero is zero at no more than d/p of the points (Schwartz and
Zippel). A run of the program on degrees, instead of values, bounds d: an element is the degree of
its numerator and 2^26 times that of its denominator. Parameters have degree 1, uninterpreted
functions give new variables, exp(x) = 1 + x p r + x (x - 1) / 2 (p r)^2 has twice that of x r.
Elements that are numbers modulo p have 2^52 more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fcoll.proving.algebra import Algebra
from fcoll.proving.ring import Ring

_OVER = 2.0**26
_MOST = 2.0**25  # of either degree: beyond it nothing is bounded
_NUMBER = 2.0**52


def _pair(x: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.where(x.isfinite(), x, 0.0)
    x = torch.where(x >= _NUMBER, x - _NUMBER, x)
    over = (x / _OVER).floor()
    return x - over * _OVER, over


def _made(top: Tensor, over: Tensor) -> Tensor:
    return top.clamp(max=_MOST) + over.clamp(max=_MOST) * _OVER


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

    def number(self, value: complex) -> Tensor:
        infinite = isinstance(value, float) and value in (float("inf"), float("-inf"))
        return torch.tensor(value if infinite else 0.0, dtype=torch.float64)

    def lift(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=torch.float64)

    def draw(self, name: str, count: int) -> Tensor:
        return torch.ones(count, dtype=torch.float64)

    def constant(self, x: float) -> float | None:
        return 1.0 if x == 0 else None

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        (a, b), (c, d) = _pair(x), _pair(y)
        done = _made(torch.maximum(a + d, c + b), b + d)
        return _marked(done, _is_number(x) & _is_number(y))

    def neg(self, x: Tensor) -> Tensor:
        return x

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        (a, b), (c, d) = _pair(x), _pair(y)
        return _marked(_made(a + c, b + d), _is_number(x) & _is_number(y))

    def square(self, x: Tensor) -> Tensor:
        return self.mul(x, x)

    def inverse(self, x: Tensor) -> Tensor:
        top, over = _pair(x)
        return torch.where(_is_number(x), x, _made(over, top))

    def bilinear(
        self, fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, terms: int = 1
    ) -> Tensor:
        out = fn(torch.zeros_like(x), torch.zeros_like(y))
        return self._sum(self.mul(_largest(x), _largest(y)), terms).expand(out.shape).clone()

    def linear(self, fn: Callable[[Tensor], Tensor], x: Tensor, terms: int = 1) -> Tensor:
        return self._sum(_largest(x), terms).expand(fn(torch.zeros_like(x)).shape).clone()

    def _sum(self, x: Tensor, terms: int) -> Tensor:
        """Of so many fractions, each with a denominator of its own."""
        top, over = _pair(x)
        return _marked(_made(top + (terms - 1) * over, terms * over), _is_number(x))

    def exp(self, x: Tensor) -> Tensor:
        top, over = _pair(x)
        done = _made(2 * top + 2, 2 * over)
        return _marked(done, done > 0)

    def log(self, x: Tensor) -> Tensor:
        self._note(x)
        top, over = _pair(x)
        return _made(top.clamp(min=1), over)  # its exponential is x

    def of_logs(self, x: Tensor) -> Tensor:
        """All, if a trial has met one: the degree is then no lower than that of those."""
        found = any(ring.took_sigmoid_of_log for ring in self.rings)
        return torch.full(x.shape, found) | (x == 0)

    def root(self, x: Tensor) -> Tensor:
        """A new variable, whose square is x. It and its inverse count for 2: of powers from -m to n
        there are m + n, no more than twice the larger."""
        self._note(x)
        top, over = _pair(x)
        return _made((top / 2).ceil().clamp(min=2), (over / 2).ceil())

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
        self._note(x)
        return x

    def cut(self, x: Tensor) -> Tensor:
        self._note(x)
        return torch.where(x == 0, x, 1.0)

    def uncut(self, x: Tensor) -> Tensor:
        return x

    def counts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x == 0, torch.ones_like(x)  # which one is not known

    def pick(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        (a, b), (c, d) = _pair(x), _pair(y)
        out = _made(torch.maximum(a, c), torch.maximum(b, d))
        out = _marked(out, _is_number(x) & _is_number(y))
        return torch.broadcast_tensors(out, condition)[0].clone()


def _largest(x: Tensor) -> Tensor:
    top, over = _pair(x)
    if not x.numel():
        return torch.zeros((), dtype=torch.float64)
    return _marked(_made(top.max(), over.max()), _is_number(x).all())


def degree_of(x: Tensor) -> float:
    """The largest degree of numerator or denominator among the elements."""
    top, over = _pair(x)
    return float(torch.maximum(top, over).max()) if x.numel() else 0.0
