"""The rational numbers that a program's floats stand for, and the primes that serve them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

_SHORT = 10**6  # denominators of the constants that floats stand for


@lru_cache(maxsize=4096)
def rational(value: float) -> Fraction | tuple[Fraction, int]:
    """What a constant is meant to be: 0.1 is 1/10 and 1 - 0.999 is 1/1000; (2, 4) is a fourth root.

    >>> rational(0.1), rational(1 - 0.999), rational(2**0.25)
    (Fraction(1, 10), Fraction(1, 1000), (Fraction(2, 1), 4))
    """
    exact = Fraction(value)
    if exact.denominator <= _SHORT:
        return exact
    if len(f"{value!r}".partition("e")[0].replace(".", "").strip("-0")) <= 12:
        return Fraction(repr(value))
    if (near := _near(abs(value), _SHORT)) is not None:
        return near if value > 0 else -near
    for root in (2, 4):
        if (near := _near(abs(value) ** root, 1000)) is not None:
            return near, root
    return exact


def _near(value: float, most: int) -> Fraction | None:
    near = Fraction(value).limit_denominator(most)
    return near if near and abs(near - Fraction(value)) <= 2**-50 * max(value, 2**-3) else None


def perfect(square: int) -> int:
    found = math.isqrt(square)
    return found if found * found == square and square < 2**20 else 0


def root_mod(x: int, p: int) -> int:
    """A square root modulo p = 1 mod 4, 0 if there is none (Tonelli and Shanks)."""
    if x == 0 or pow(x, (p - 1) // 2, p) != 1:
        return 0
    q, s = p - 1, 0
    while q % 2 == 0:
        q, s = q // 2, s + 1
    z = next(z for z in range(2, p) if pow(z, (p - 1) // 2, p) == p - 1)
    m, c, t, found = s, pow(z, q, p), pow(x, q, p), pow(x, (q + 1) // 2, p)
    while t != 1:
        i, power = 0, t
        while power != 1:
            power, i = power * power % p, i + 1
        b = pow(c, 1 << (m - i - 1), p)
        m, c = i, b * b % p
        t, found = t * c % p, found * b % p
    return found


@lru_cache(maxsize=1)
def primes() -> Sequence[int]:
    """Those from 2^16 to 2^17 modulo which 2, 3 and 5 have fourth roots, and -1 a root: what
    attention scales by (the root of 1 / sqrt(head size)) is then a constant that can be meant."""
    sieve = bytearray([1]) * 2**17
    for k in range(2, 363):
        if sieve[k]:
            sieve[k * k :: k] = bytes(len(range(k * k, 2**17, k)))
    fourth = lambda p: all(pow(k, (p - 1) // 4, p) == 1 for k in (2, 3, 5))  # noqa: E731
    return [p for p in range(2**16 + 1, 2**17) if sieve[p] and p % 4 == 1 and fourth(p)]
