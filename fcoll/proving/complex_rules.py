"""The rules of ops on complex numbers: pairs of elements, the two floats of a complex128.

Views and moves of them run as they are; a conjugate that torch has only marked is made before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fcoll.proving.algebra import Algebra, NotExact
from fcoll.proving.elementwise_rules import Rule, element
from fcoll.proving.tensor_rules import RULES

COMPLEX_RULES: dict[str, Rule] = {}


def parts(a: Algebra, x: Any) -> tuple[Tensor, Tensor]:
    """Real and imaginary."""
    if isinstance(x, Tensor) and x.is_complex():
        real, imaginary = torch.view_as_real(x).unbind(-1)
        return real, imaginary
    if isinstance(x, complex):
        return a.number(x.real), a.number(x.imag)
    real = element(a, x)
    return real, torch.zeros_like(real)


def packed(real: Tensor, imaginary: Tensor) -> Tensor:
    pair = torch.stack(torch.broadcast_tensors(real, imaginary), -1)
    return torch.view_as_complex(pair.contiguous())


def resolved(a: Algebra, x: Tensor) -> Tensor:
    """Without torch's marks, by which x is the conjugate or the negative of what it holds."""
    if x.is_neg():
        return a.neg(torch._neg_view(x))
    if not x.is_conj():
        return x
    real, imaginary = parts(a, x.conj())
    return packed(real, a.neg(imaginary))


def _linear(name: str, a: Algebra, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    return packed(*(RULES[name](a, part, *args, **kwargs) for part in parts(a, x)))


def _linear_in_two(name: str, a: Algebra, x: Any, y: Any, alpha: Any = 1) -> Tensor:
    if isinstance(alpha, complex):
        raise NotExact("alpha is a complex number")
    pairs = zip(parts(a, x), parts(a, y), strict=True)
    return packed(*(RULES[name](a, *pair, alpha=alpha) for pair in pairs))


def _product(name: str, a: Algebra, x: Any, y: Any) -> Tensor:
    """(a + b i) (c + d i) = a c - b d + (a d + b c) i"""
    of: Callable[[Tensor, Tensor], Tensor] = partial(RULES[name], a)
    (p, q), (r, s) = parts(a, x), parts(a, y)
    return packed(a.sub(of(p, r), of(q, s)), a.add(of(p, s), of(q, r)))


def _squared(a: Algebra, x: Any) -> Tensor:
    real, imaginary = parts(a, x)
    return a.add(a.square(real), a.square(imaginary))


def _inverse(a: Algebra, x: Any) -> Tensor:
    real, imaginary = parts(a, x)
    over = a.inverse(_squared(a, x))
    return packed(a.mul(real, over), a.neg(a.mul(imaginary, over)))


def _polar(a: Algebra, size: Any, angle: Any) -> Tensor:
    size, angle = element(a, size), element(a, angle)
    return packed(a.mul(size, a.opaque("cos", angle)), a.mul(size, a.opaque("sin", angle)))


def _exp(a: Algebra, x: Any) -> Tensor:
    real, imaginary = parts(a, x)
    return _polar(a, a.exp(real), imaginary)


def _where(a: Algebra, condition: Tensor, x: Any, y: Any) -> Tensor:
    pairs = zip(parts(a, x), parts(a, y), strict=True)
    return packed(*(a.pick(condition, *pair) for pair in pairs))


COMPLEX_RULES |= {name: partial(_linear, name) for name in ("neg", "sum", "mean", "cumsum")}
COMPLEX_RULES |= {name: partial(_linear_in_two, name) for name in ("add", "sub")}
COMPLEX_RULES |= {name: partial(_product, name) for name in ("mul", "mm", "bmm", "mv", "dot")}
COMPLEX_RULES |= {
    "div": lambda a, x, y: _product("mul", a, x, _inverse(a, y)),
    "reciprocal": _inverse,
    "exp": _exp,
    "abs": lambda a, x: a.root(_squared(a, x)),
    "_conj_physical": lambda a, x: packed(parts(a, x)[0], a.neg(parts(a, x)[1])),
    "polar": _polar,
    "complex": lambda a, x, y: packed(element(a, x), element(a, y)),
    "where": _where,
    "ones_like": lambda a, x, **_: packed(*parts(a, RULES["ones_like"](a, x.real))),
}
