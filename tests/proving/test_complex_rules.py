"""Rules of complex numbers against torch's ops on numbers that floats compute exactly."""

from __future__ import annotations

import pytest
import torch
from test_rules import X, Y, _off, exact

from fcoll.proving import exact_mode
from fcoll.proving.complex_rules import COMPLEX_RULES

MASK = torch.tensor([True, False])


def z(x):
    return torch.view_as_complex(x.reshape(2, 2, 2))


CASES = {
    "add": [lambda x, y: z(x) + z(y), lambda x, y: z(x) + 2, lambda x, y: z(x) + x[:, :2]],
    "sub": [lambda x, y: z(x) - z(y), lambda x, y: torch.sub(z(x), z(y), alpha=2)],
    "neg": [lambda x, y: -z(x)],
    "mul": [lambda x, y: z(x) * z(y), lambda x, y: z(x) * (0.5 + 2j), lambda x, y: z(x) * 3],
    "div": [lambda x, y: z(x) / (1 + 1j), lambda x, y: z(x) / 4],
    "reciprocal": [lambda x, y: (z(x) * 0 + (1 - 1j)).reciprocal()],
    "mm": [lambda x, y: z(x) @ z(y)],
    "bmm": [lambda x, y: torch.bmm(z(x)[None], z(y)[None])],
    "mv": [lambda x, y: torch.mv(z(x), z(y)[0])],
    "dot": [lambda x, y: torch.dot(z(x)[0], z(y)[0])],
    "sum": [lambda x, y: z(x).sum(), lambda x, y: z(x).sum(1, keepdim=True)],
    "mean": [lambda x, y: z(x).mean(0)],
    "cumsum": [lambda x, y: z(x).cumsum(1)],
    "_conj_physical": [
        lambda x, y: torch.conj_physical(z(x)),
        lambda x, y: z(x).conj().resolve_conj(),
        lambda x, y: z(x).conj() * z(y),
    ],
    "where": [lambda x, y: torch.where(MASK, z(x), z(y))],
    "complex": [lambda x, y: torch.complex(x, y)],
    "ones_like": [lambda x, y: torch.ones_like(z(x))],
    "abs": [lambda x, y: torch.complex(x[0, :1], x[0, 2:3]).abs()],
    "polar": [lambda x, y: torch.polar(x, y * 0) * 0 + torch.polar(x, y)
              - torch.polar(x * 2, y) + torch.polar(x, y)],
    "exp": [lambda x, y: (z(x) + z(y)).exp().sum() * 0 + torch.complex(x * 0, x).exp()
            - torch.polar(x * 0 + 1, x)],
}  # fmt: skip
VIEWS = [
    lambda x, y: z(x).real,
    lambda x, y: z(x).conj().imag,
    lambda x, y: z(x).conj().imag + 1,
    lambda x, y: torch.view_as_real(z(x).conj().resolve_conj()),
    lambda x, y: z(x).transpose(0, 1).flatten(),
    lambda x, y: (z(x).to(torch.complex64) * z(y)).to(torch.complex64),
]


def check(fn):
    ring, got = exact(fn, X, Y)
    want = fn(X.double(), Y.double())
    got, want = (x.resolve_conj().resolve_neg() if want.is_complex() else x for x in (got, want))
    assert got.shape == want.shape and got.is_complex() == want.is_complex()
    if want.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if got.is_neg():
        got = ring.neg(torch._neg_view(got))
    assert torch.equal(got, ring.lift(want.resolve_neg()))


@pytest.mark.parametrize("name", CASES)
def test_as_floats_compute_it(name):
    for fn in CASES[name]:
        check(fn)


def test_views():
    for fn in VIEWS:
        check(fn)


@pytest.mark.parametrize("name", COMPLEX_RULES)
def test_a_wrong_rule_is_found_out(name, monkeypatch):
    right = COMPLEX_RULES[name]
    off = lambda *args, **kwargs: _changed(right(*args, **kwargs))  # noqa: E731
    monkeypatch.setitem(exact_mode.COMPLEX_RULES, name, off)
    with pytest.raises(AssertionError):
        for fn in CASES[name]:
            check(fn)


def _changed(x):
    return torch.view_as_complex(_off(torch.view_as_real(x))) if x.is_complex() else _off(x)


REFUSED = {
    "angle": lambda x, y: z(x).angle(),
    "sqrt": lambda x, y: z(x).sqrt(),
    "imaginary": lambda x, y: torch.zeros(2, 2).copy_(z(x)),
    "item": lambda x, y: x * z(x).sum().item(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(exact_mode.Refused):
        exact(REFUSED[name], X, Y)
