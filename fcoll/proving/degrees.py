"""How far can two different functions agree by chance?

A polynomial of degree d that is not zero is zero at no more than d/p of the points (Schwartz and
Zippel). A run of the program on degrees, instead of values, bounds d: an element is the degree of
its numerator and 2^26 times that of its denominator. Parameters have degree 1, uninterpreted
functions give new variables, exp(x) = 1 + x p r + x (x - 1) / 2 (p r)^2 has twice that of x r.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fcoll.proving.algebra import Algebra

_OVER = 2.0**26
_MOST = 2.0**25  # of either degree: beyond it nothing is bounded


def _pair(x: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.where(x.isfinite(), x, 0.0)
    over = (x / _OVER).floor()
    return x - over * _OVER, over


def _made(top: Tensor, over: Tensor) -> Tensor:
    return top.clamp(max=_MOST) + over.clamp(max=_MOST) * _OVER


class Degrees(Algebra):
    """Elements are degrees."""

    def __init__(self) -> None:
        super().__init__()
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
        return _made(torch.maximum(a + d, c + b), b + d)

    def neg(self, x: Tensor) -> Tensor:
        return x

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        (a, b), (c, d) = _pair(x), _pair(y)
        return _made(a + c, b + d)

    def square(self, x: Tensor) -> Tensor:
        return self.mul(x, x)

    def inverse(self, x: Tensor) -> Tensor:
        top, over = _pair(x)
        return _made(over, top)

    def inverse_of_sum(self, x: Tensor) -> Tensor:
        """exp(x) is 1 modulo p, so that a sum of them is a number: digits of its inverse are
        polynomials of those of the sum, of no higher degree."""
        return x

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
        return _made(top + (terms - 1) * over, terms * over)

    def exp(self, x: Tensor) -> Tensor:
        top, over = _pair(x)
        return _made(2 * top + 2, 2 * over)

    def log(self, x: Tensor) -> Tensor:
        return self.opaque("log", x)

    def root(self, x: Tensor) -> Tensor:
        self._note(x)
        top, over = _pair(x)
        return _made(top.clamp(min=1), over)  # its square is x

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

    def pick(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        (a, b), (c, d) = _pair(x), _pair(y)
        out = _made(torch.maximum(a, c), torch.maximum(b, d))
        return torch.broadcast_tensors(out, condition)[0].clone()


def _largest(x: Tensor) -> Tensor:
    top, over = _pair(x)
    if not x.numel():
        return torch.zeros((), dtype=torch.float64)
    return _made(top.max(), over.max())


def degree_of(x: Tensor) -> float:
    """The largest degree of numerator or denominator among the elements."""
    top, over = _pair(x)
    return float(torch.maximum(top, over).max()) if x.numel() else 0.0
