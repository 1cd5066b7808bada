"""What a program's numbers are taken for: the primitives that the rules of torch's ops are made of.

Two kinds: ``Ring``, residues that are compared, and ``Degrees``, which counts how far two different
functions may agree by chance. Elements are float64 tensors in both, so that ops which only move
elements run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fcoll.proving.tokens import place_of, token, tokens_in
from fcoll.reductions import Reduction, fold


class NotExact(Exception):
    """What an algebra cannot do; the mode adds the op and the line."""


class Unlucky(Exception):
    """Of these random values: others may do."""

    placed = False  # does it say the op and the line?


class Algebra:
    """The primitives. Tensors are float64 and broadcast."""

    def __init__(self) -> None:
        self.uninterpreted: set[str] = set()
        self.escaped: list[float] = []  # elements that are numbers of Python's

    # -- elements as numbers of Python's, and back ---

    def token(self, x: Tensor) -> float:
        """A number for an element, of which torch takes the bits."""
        self.escaped.append(float(x))
        return token(len(self.escaped) - 1)

    def of_token(self, value: float) -> Tensor:
        """The element that a NaN stands for."""
        if (found := place_of(value)) is None:
            raise NotExact("NaN, or a value of the step that was computed with where no op sees it")
        place, negated = found
        x = torch.tensor(self.escaped[place], dtype=torch.float64)
        return self.neg(x) if negated else x

    def of_tokens(self, x: Tensor) -> Tensor | None:
        """Elements, where a tensor was made of numbers that stand for some; or None."""
        if not self.escaped or x.dtype != torch.float64 or not bool((at := tokens_in(x)).any()):
            return None
        done = self.lift(torch.where(at, 0.0, x)).clone()
        done[at] = torch.stack([self.of_token(value) for value in map(float, x[at])])
        return done

    # -- the primitives ---

    def number(self, value: complex) -> Tensor:
        raise NotImplementedError

    def lift(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def draw(self, name: str, count: int) -> Tensor:
        raise NotImplementedError

    def constant(self, x: float) -> float | None:
        raise NotImplementedError

    def note(self, x: float, value: float) -> None:
        """The element x was computed from constants alone, and stands for this one."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def neg(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def square(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def inverse(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def bilinear(
        self, fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, terms: int = 1
    ) -> Tensor:
        raise NotImplementedError

    def linear(
        self, fn: Callable[[Tensor], Tensor], x: Tensor, terms: int = 1, wraps: bool = False
    ) -> Tensor:
        raise NotImplementedError

    def exp(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def log(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def of_logs(self, x: Tensor) -> Tensor:
        """Which elements are sums of logarithms, as 0 is."""
        raise NotImplementedError

    def root(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def opaque(self, name: str, *args: Tensor) -> Tensor:
        raise NotImplementedError

    def key(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def cut(self, x: Tensor) -> Tensor:
        """Uninterpreted functions of the elements, but of small integers, or what is cut."""
        raise NotImplementedError

    def uncut(self, x: Tensor) -> Tensor:
        """The elements that were cut, as they were before."""
        raise NotImplementedError

    def counts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which elements are small integers, and which ones."""
        raise NotImplementedError

    def pick(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    # -- made of them ---

    def absolute(self, x: Tensor) -> Tensor:
        return self.larger(x, self.neg(x))

    def larger(self, x: Tensor, y: Tensor) -> Tensor:
        return self.pick(self.key(x) >= self.key(y), x, y)

    def smaller(self, x: Tensor, y: Tensor) -> Tensor:
        return self.pick(self.key(x) <= self.key(y), x, y)

    def sub(self, x: Tensor, y: Tensor) -> Tensor:
        return self.add(x, self.neg(y))

    def div(self, x: Tensor, y: Tensor) -> Tensor:
        return self.mul(x, self.inverse(y))

    def inverse_root(self, x: Tensor) -> Tensor:
        """Its square is not looked up: r^2 r must be r^3, and r is 1 / sqrt(x) in all ways."""
        return self.inverse(self.root(x))

    def sigmoid(self, x: Tensor) -> Tensor:
        """Uninterpreted, but for logarithms: a / (a + b) is that of log a - log b, by which parts
        of a softmax are put together."""
        plain, logs = self.opaque("sigmoid", x), self.of_logs(x)
        if not bool(logs.any()):
            return plain
        weights = self.exp(self.neg(torch.where(logs, x, 0.0)))
        return self.pick(logs, self.inverse(self.add(self.number(1), weights)), plain)

    def total(self, x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
        if not x.dim():
            return x.clone()
        dims = dims or list(range(x.dim()))
        terms = max(1, torch.Size([x.shape[d] for d in dims]).numel())
        return self.linear(lambda d: d.sum(dims, keepdim), x, terms, wraps=True)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """Elementwise; what is multiplied by itself is squared."""
        if x.shape == y.shape and torch.equal(x, y):
            return self.square(x)
        return self.mul(x, y)

    def applied(self, rule: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """What the rule of this name gives for an op's arguments."""
        return rule(self, *args, **kwargs)

    # -- where a collective reduces (fcoll/table/pieces.py) ---

    def fold(self, row: Reduction, parts: list[Tensor]) -> Tensor:
        """As ``reductions.fold``, on elements of this algebra."""
        if parts[0].is_complex():
            if row.name not in ("sum", "avg"):
                raise NotExact(f"a reduction of complex numbers by {row.name}")
            return torch.view_as_complex(self.fold(row, [torch.view_as_real(x) for x in parts]))
        if not parts[0].is_floating_point():
            return fold(row, parts)
        combine = {
            "sum": self.add,
            "avg": self.add,
            "product": self.mul,
            "max": self.larger,
            "min": self.smaller,
        }[row.name]
        total = parts[0].clone()
        for x in parts[1:]:
            total = combine(total, x)
        return self.div(total, self.number(len(parts))) if row.name == "avg" else total

    def scaled(self, op: str, x: Tensor, factor: float) -> Tensor:
        return self.mul(x, self.number(factor))
