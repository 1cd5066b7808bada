"""Exact arithmetic on float64 tensors: residues modulo N = p^3 of an odd prime p below 2^17.

N is below 2^51, so a residue is an integer that float64 holds. It is also three digits to the base
p, each below 2^17: products and long sums of digits stay below 2^53, which float64 (and its BLAS)
adds without rounding. Few and small products are made in int64, which wraps around, less the
multiple of N that floats tell nearly: a third of the ops. Numbers of a program become residues by
their meaning as rationals; odd p makes 0.5 and 1/n exact.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from fcoll.proving.algebra import Algebra, NotExact, Unlucky
from fcoll.proving.constants import perfect, rational, root_mod
from fcoll.proving.known_results import KnownResults
from fcoll.proving.known_values import KnownValues

MOST_TERMS = 2**17  # of a sum of products: 3 x 2^17 x 2^34 < 2^53
_WRAPPING = {torch.mul, torch.mm, torch.bmm, torch.mv, torch.dot}  # int64 has them
_FEW_TERMS = 64  # floats tell the quotient to 64^2 / 4, so that the rest is below 2^10 x 2^51
_MANY_PRODUCTS = 2**15  # from there on BLAS is faster than int64
_FEW_ADDENDS = 2**11  # of residues, in an int64
_FEW = 2**12  # elements: below, an op's call costs more than what it computes
_SMALL = 2**12  # numerators and denominators of values that are taken for constants
_MOST_POLES = 8  # times as many as there are by chance
_WORD = 2**64
NO_ELEMENT = "a value that is not finite, or was not made by the step's own ops"


class Ring(Algebra):
    """The residues modulo p^3, with a key for all that is drawn at random."""

    def __init__(self, p: int, seed: int) -> None:
        super().__init__()
        self.p, self.seed = p, seed
        self.p2, self.N = p * p, p**3
        self.rate = random.Random(f"{seed}/rate").randrange(1, p)  # r of exp(x) = (1 + p r)^x
        self._roots = KnownValues()  # of each its square
        self._logs = KnownValues()  # of each the root of unity that exp restores
        self._cuts = KnownValues()  # of each what it was
        self._above = KnownValues()  # 0: absolute values, and sums and products of them
        self._positive: set[float] = set()  # residues of the program's numbers
        self._numbers: dict[float, float] = {}  # what elements of constants stand for
        self._results = KnownResults()  # of rules: ranks hold copies
        self._residues: dict[float, float] = {}  # of the program's numbers
        self.took_log = self.took_sigmoid_of_log = False
        self.poles = self._inverted = 0  # elements that have no inverse, of so many

    @property
    def modulus(self) -> int:
        """What values are compared by: a logarithm is known modulo p^2 only."""
        return self.p2 if self.took_log else self.N

    def applied(self, rule: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        return self._results.of(name, args, kwargs, lambda: rule(self, *args, **kwargs))

    # -- digits ---

    def digits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x = d0 + d1 p + d2 p^2"""
        d0 = _mod(x, self.p)
        rest = (x - d0) / self.p
        d1 = _mod(rest, self.p)
        d2 = (rest - d1) / self.p
        wrong = (d0 != d0.floor()) | (d2 < 0) | (d2 >= self.p) | (d2 != d2.floor())
        if bool(wrong.any()):
            raise NotExact(NO_ELEMENT)
        return d0, d1, d2

    def _whole(self, c0: Tensor, c1: Tensor, c2: Tensor) -> Tensor:
        """c0 + c1 p + c2 p^2 of integers below 2^53."""
        low = _mod(c0, self.N) + self.p * _mod(c1, self.p2)
        return _mod(low + self.p2 * _mod(c2, self.p), self.N)

    # -- numbers of the program ---

    def number(self, value: complex) -> Tensor:
        if isinstance(value, complex):
            raise NotExact("a complex number")
        if math.isnan(value):
            return self.of_token(value)
        if value not in self._residues:
            done = self.residue(value) if math.isfinite(value) else value
            self._residues[value] = float(done)
            if value > 0:
                self._positive.add(float(done))
        return torch.tensor(self._residues[value], dtype=torch.float64)

    def residue(self, value: float) -> int:
        meant = rational(value)
        root = 1
        if isinstance(meant, tuple):
            meant, root = meant
        done = meant.numerator * pow(meant.denominator, -1, self.N) % self.N
        if root > 1:
            found = self._root_of_constant(done, root)
            exact = Fraction(value)
            done = found if found is not None else self.residue_of(exact)
            if found is not None and value < 0:
                done = self.N - done
        return done

    def residue_of(self, value: Fraction) -> int:
        return value.numerator * pow(value.denominator, -1, self.N) % self.N

    def _root_of_constant(self, square: int, root: int) -> int | None:
        """The canonical second or fourth root of a constant, if it has one."""
        if root == 4:
            half = self._root_of_constant(square, 2)
            return None if half is None else self._root_of_constant(half, 2)
        if small := perfect(square):
            return small
        found = root_mod(square % self.p, self.p)
        if not found:
            return None
        for _ in range(2):  # Newton: the digits that are right double
            found = (found + square * pow(found, -1, self.N)) * pow(2, -1, self.N) % self.N
        other = self.N - found
        # of the two that one which has a root itself, so that a fourth root is a root of the root
        return found if pow(found, (self.p - 1) // 2, self.p) == 1 else other

    def lift(self, x: Tensor) -> Tensor:
        """Floats and integers as the dyadic rationals that they are."""
        if not x.is_floating_point():
            return _mod_signed(x.to(torch.int64), self.N).to(torch.float64)
        if (done := self.of_tokens(x)) is not None:
            return done
        x = x.to(torch.float64)
        mantissa, exponent = torch.frexp(torch.where(x.isfinite(), x, 0.0))
        whole = mantissa * 2.0**53  # an integer below 2^53
        size = _mod(whole.abs(), self.N)
        size = torch.where((whole < 0) & (size > 0), self.N - size, size)
        powers = self._powers_of_two[(exponent.to(torch.int64) - 53) + 1200]
        return torch.where(x.isfinite(), self.mul(size, powers), x)

    @cached_property
    def _powers_of_two(self) -> Tensor:
        half, values = pow(2, -1, self.N), [1]
        for _ in range(1200):
            values.append(values[-1] * half % self.N)
        up = [pow(2, k, self.N) for k in range(1, 1101)]
        return torch.tensor(values[::-1] + up, dtype=torch.float64)

    def constant(self, x: float) -> float | None:
        """The simple rational that a residue is, if it is one: by chance 1 residue in 2^26 is."""
        if not math.isfinite(x) or x in self._numbers:
            return self._numbers.get(x, x)
        old, new, s_old, s_new = self.N, int(x), 0, 1
        while new >= _SMALL**2:  # Euclid's steps until the numerator is small
            q = old // new
            old, new, s_old, s_new = new, old - q * new, s_new, s_old - q * s_new
        if abs(s_new) > _SMALL:
            return None
        return new / s_new

    def note(self, x: float, value: float) -> None:
        self._numbers[x] = value

    def draw(self, name: str, count: int) -> Tensor:
        """Values of a parameter: uniform, by its name and index."""
        return self._hash(f"parameter {name}", torch.arange(count, dtype=torch.float64))

    # -- arithmetic ---

    def sub(self, x: Tensor, y: Tensor) -> Tensor:
        if self._logs:
            return super().sub(x, y)
        rest = x - y
        return _finite_or_infinite(torch.where(rest < 0, rest + self.N, rest))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        total = self._add(x, y)
        if self._above:
            self._note_if_above(total, x, y)
        if self._logs:
            (x_known, x_unit), (y_known, y_unit) = self._logs.find(x), self._logs.find(y)
            if bool(x_known.any()) or bool(y_known.any()):
                units = torch.where(x_known, x_unit, 1.0), torch.where(y_known, y_unit, 1.0)
                self._note_log(total, x_known | y_known, self.mul(*units))
        return total

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        return _finite_or_infinite(torch.where(total >= self.N, total - self.N, total))

    def neg(self, x: Tensor) -> Tensor:
        done = self._neg(x)
        if self._logs:
            known, unit = self._logs.find(x)
            if bool(known.any()):
                self._note_log(done, known, self.inverse(unit))
        return done

    def _neg(self, x: Tensor) -> Tensor:
        return torch.where(x == 0, x, self.N - x)

    def _note_log(self, x: Tensor, known: Tensor, unit: Tensor) -> None:
        """Sums and differences of logarithms are logarithms; a small integer is anybody's."""
        if bool((known := known & x.isfinite() & ~self.counts(x)[0]).any()):
            self._logs.add(x[known], unit.expand(x.shape)[known])

    def bilinear(
        self, fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, terms: int = 1
    ) -> Tensor:
        """fn(x, y), where fn is linear in each, and its elements are sums of so many products."""
        if terms > MOST_TERMS:
            raise NotExact(f"a sum of {terms} products, more than {MOST_TERMS}")
        if fn in _WRAPPING and terms <= _FEW_TERMS and _products(fn, x, y) < _MANY_PRODUCTS:
            return self._wrapping(fn, x, y)
        x0, x1, x2 = self.digits(x)
        y0, y1, y2 = self.digits(y)
        c1 = fn(x0, y1) + fn(x1, y0)
        return self._whole(fn(x0, y0), c1, fn(x0, y2) + fn(x1, y1) + fn(x2, y0))

    def _wrapping(self, fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """fn(x, y) - N q modulo 2^64, where q is the quotient but for an error that is small."""
        quotient = (fn(x, y) / self.N).to(torch.int64)
        rest = fn(self._integers(x), self._integers(y)).sub_(quotient, alpha=self.N)
        return rest.remainder_(self.N).to(torch.float64)

    def _integers(self, x: Tensor) -> Tensor:
        whole = x.to(torch.int64)
        if not torch.equal(whole.remainder(self.N).to(torch.float64), x):
            raise NotExact(NO_ELEMENT)
        return whole

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bilinear(torch.mul, x, y)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """A root times a number is the root of another: DTensor's norms are such."""
        done = super().product(x, y)
        if self._above:
            self._note_if_above(done, x, y)
        if not self._roots:
            return done
        if x.numel() != y.numel() and 1 in (x.numel(), y.numel()):
            many, number = (x, y) if y.numel() == 1 else (y, x)
            self._remember_scaled(many, number, done)
        elif x.numel() == 1:
            self._remember_scaled(x, y, done)
            self._remember_scaled(y, x, done)
        return done

    def _remember_scaled(self, x: Tensor, number: Tensor, product: Tensor) -> None:
        is_root, squares = self._roots.find(x)
        if bool(is_root.any()):
            scaled = self.mul(squares, self.square(number))
            self._roots.add(
                product.flatten()[is_root.flatten()], scaled.flatten()[is_root.flatten()]
            )

    def square(self, x: Tensor) -> Tensor:
        """x * x, which of a root is what it is the root of."""
        product = self.mul(x, x)
        if not self._roots:
            return product
        return torch.where(*self._roots.find(x), product)

    def linear(
        self, fn: Callable[[Tensor], Tensor], x: Tensor, terms: int = 1, wraps: bool = False
    ) -> Tensor:
        """fn(x), where fn adds up elements; ``wraps``: int64 has it, too."""
        if not bool(x.isfinite().all()):
            raise NotExact("a sum with an infinite element")
        if wraps and terms <= _FEW_ADDENDS:
            return torch.remainder(fn(self._integers(x)), self.N).to(torch.float64)
        c0, c1, c2 = map(fn, self.digits(x))
        return self._whole(c0, c1, c2)

    def inverse(self, x: Tensor) -> Tensor:
        """Uninterpreted of the few elements that are multiples of p by chance."""
        if bool((x == 0).any()):
            raise Unlucky("a division by zero")
        x0 = _mod(x, self.p)
        self._inverted += x.numel()
        if has_poles := bool((is_pole := x0 == 0).any()):
            self._note_poles(int(is_pole.sum()))
        y = _inverses(self.p)[x0.to(torch.int64)]
        rest = self._add(self.number(1), self._neg(self.mul(x, y)))  # a multiple of p
        done = self.mul(y, self._add(self.number(1), self._add(rest, self.mul(rest, rest))))
        return (
            torch.where(is_pole, self._hash("1 / a multiple of p", x), done) if has_poles else done
        )

    def _note_poles(self, count: int) -> None:
        """One of p elements is a multiple of p by chance; where many more are, by the program."""
        self.poles += count
        if self.poles * self.p > _MOST_POLES * self._inverted:
            raise Unlucky("a division by a multiple of p")

    # -- functions ---

    def exp(self, x: Tensor) -> Tensor:
        """(1 + p r)^x = 1 + x p r + x (x - 1) / 2 (p r)^2; of minus infinity 0. Of a logarithm it
        is what that was taken of."""
        gone = x == -math.inf
        x = torch.where(gone, 0.0, x)
        pr = torch.tensor(float(self.p * self.rate), dtype=torch.float64)
        half = torch.tensor(float((self.N + 1) // 2), dtype=torch.float64)
        one = torch.tensor(1.0, dtype=torch.float64)
        first = self.mul(x, pr)
        pairs = self.mul(self.mul(x, self._add(x, self._neg(one))), half)
        done = self._add(self._add(one, first), self.mul(pairs, self.mul(pr, pr)))
        if self._logs:
            known, unit = self._logs.find(x)
            done = self.mul(done, torch.where(known, unit, 1.0))
        return torch.where(gone, 0.0, done)

    def log(self, x: Tensor) -> Tensor:
        """The y below p^2 with exp(y) = x / T, T the root of unity that is x modulo p."""
        self.took_log = True
        gone = x == 0
        x = torch.where(gone, 1.0, x)
        if bool((_mod(x, self.p) == 0).any()):
            raise Unlucky("the logarithm of a multiple of p")
        power, e, root = x, self.p2, torch.ones_like(x)
        while e:
            if e & 1:
                root = self.mul(root, power)
            power, e = self.mul(power, power), e >> 1
        unit = self.mul(x, self.inverse(root))  # 1 + p u
        u = (unit - 1) / self.p  # an integer below p^2
        r = torch.tensor(float(self.rate), dtype=torch.float64)
        done = _mod(self.mul(self._log1(u), self.inverse(self._log1(r))), self.p2)
        self._note_log(done, ~gone, root)
        return torch.where(gone, -math.inf, done)

    def of_logs(self, x: Tensor) -> Tensor:
        if not self._logs:
            return x == 0
        found = self._logs.find(x)[0]
        self.took_sigmoid_of_log |= bool(found.any())
        return found | (x == 0)

    def _log1(self, u: Tensor) -> Tensor:
        """log(1 + p u) / p = u - p u^2 / 2, modulo p^2."""
        half_p = torch.tensor(float(self.p * ((self.N + 1) // 2) % self.N), dtype=torch.float64)
        return self._add(u, self._neg(self.mul(half_p, self.mul(u, u))))

    def root(self, x: Tensor) -> Tensor:
        """Uninterpreted but for its square; of the squares of small integers the integer."""
        small = x.sqrt().round()
        exact = (small * small == x) & (x < 2.0**20)
        found = torch.where(exact, small, self.opaque("sqrt", x))
        self._roots.add(found, x)
        return found

    def opaque(self, name: str, *args: Tensor) -> Tensor:
        """A function of which nothing is known: a hash of its name and arguments."""
        self.uninterpreted.add(name)
        for x in args:
            _check_whole(x)
        return self._hash(name, *args)

    def key(self, x: Tensor) -> Tensor:
        """Numbers that order the residues, in an order drawn at random, in which -x lies as far on
        the other side of 0 as x. Small integers have their own; of the others, half lie between
        -1 and 1, half beyond all integers."""
        _check_whole(x)
        known, number = self.counts(x)
        size = torch.minimum(x, self.N - x)
        mixed = self._mixed("order", size)
        key = (mixed & (2**52 - 1)).to(torch.float64)
        key = torch.where(mixed & 2**60 > 0, 2 * _SMALL + key, (key + 1) / (2**52 + 2))
        key = torch.where((mixed & 2**61 > 0) == (x == size), key, -key)
        if self._above:
            key = torch.where(self._above.find(x)[0], key.abs(), key)
        return torch.where(x.isfinite(), torch.where(known, number, key), x)

    def absolute(self, x: Tensor) -> Tensor:
        done = super().absolute(x)
        self._note_above(done)
        return done

    def _note_above(self, x: Tensor) -> None:
        x = x[~self.counts(x)[0]]
        self._above.add(x, x)

    def _note_if_above(self, done: Tensor, x: Tensor, y: Tensor) -> None:
        """Sums and products of absolute values and of the program's positive numbers."""
        mine, others = self._is_above(x), self._is_above(y)
        if mine is not None and others is not None:
            self._note_above(done[(mine & others).expand(done.shape)])

    def _is_above(self, x: Tensor) -> Tensor | None:
        """None if no element is known to be."""
        if not x.dim() and float(x) in self._positive:
            return torch.ones((), dtype=torch.bool)
        known = self._above.find(x)[0]
        return known if bool(known.any()) else None

    def cut(self, x: Tensor) -> Tensor:
        _check_whole(x)
        if not x.dim() and float(x) in self._numbers:
            return x
        kept = self.counts(x)[0]
        if self._cuts:
            kept = kept | self._cuts.find(x)[0]
        done = self._hash("cut", x)
        self._cuts.add(done[~kept], x[~kept])
        return torch.where(kept, x, done)

    def uncut(self, x: Tensor) -> Tensor:
        return torch.where(*self._cuts.find(x), x) if self._cuts else x

    def counts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        number = torch.where(x > self.N // 2, x - self.N, x)
        return number.abs() < _SMALL, number

    def pick(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition, x, y)

    def _hash(self, name: str, *args: Tensor) -> Tensor:
        return ((self._mixed(name, *args) & (2**63 - 1)) % self.N).to(torch.float64)

    def _mixed(self, name: str, *args: Tensor) -> Tensor:
        first, *rest = torch.broadcast_tensors(*args)
        mixed = self._mix(first, _key_of(self.seed, name, 0))
        for i, x in enumerate(rest, 1):
            mixed = self._mix(x, _key_of(self.seed, name, i)) ^ (
                mixed * _signed(0x9E3779B97F4A7C15)
            )
            mixed = _scramble(mixed)
        return mixed

    def _mix(self, x: Tensor, key: int) -> Tensor:
        finite = torch.nan_to_num(x, nan=2.0**60, posinf=2.0**61, neginf=2.0**62)
        return _scramble(finite.to(torch.int64) ^ key)


def _check_whole(x: Tensor) -> None:
    if bool((x != x.floor()).any()):
        raise NotExact(NO_ELEMENT)


def _scramble(x: Tensor) -> Tensor:
    """splitmix64's last steps, twice; int64 wraps around."""
    for _ in range(2):
        x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
        x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
        x = x ^ _shifted(x, 31)
    return x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, without the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - _WORD if value >= _WORD // 2 else value


@lru_cache(maxsize=4096)
def _key_of(seed: int, name: str, i: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _finite_or_infinite(x: Tensor) -> Tensor:
    if bool(x.isnan().any()):
        raise NotExact("infinity minus infinity")
    return x


def _products(fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> int:
    return 0 if fn is torch.mul else x.numel() * y.shape[-1]


def _mod(x: Tensor, m: int) -> Tensor:
    """Of integers from 0 to 2^53. The quotient is at most one too large: it was rounded."""
    if x.numel() < _FEW:
        return torch.remainder(x, m)
    rest = x - (x / m).floor() * m
    return torch.where(rest < 0, rest + m, rest)


def _mod_signed(x: Tensor, m: int) -> Tensor:
    return torch.remainder(x, m)


@lru_cache(maxsize=16)
def _inverses(p: int) -> Tensor:
    """Of 0 to p - 1 modulo p: x^(p - 2)."""
    x = torch.arange(p, dtype=torch.float64)
    done, power, e = torch.ones_like(x), x, p - 2
    while e:
        if e & 1:
            done = _mod(done * power, p)
        power, e = _mod(power * power, p), e >> 1
    return done
