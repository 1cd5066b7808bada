"""Numbers of Python's that stand for elements are moved, and nothing is computed with them."""

from __future__ import annotations

import math

import pytest
import torch

from fcoll.proving.algebra import NotExact
from fcoll.proving.constants import primes
from fcoll.proving.ring import Ring
from fcoll.proving.tokens import place_of, token, tokens_in


def test_moved():
    assert [place_of(token(k)) for k in (0, 1, 2**40)] == [(0, False), (1, False), (2**40, False)]
    assert place_of(-token(7)) == (7, True)
    held = torch.tensor([1.0, token(3), math.nan, math.inf, -token(3)], dtype=torch.float64)
    assert tokens_in(held).tolist() == [False, True, False, False, True]
    assert place_of(held[1].item()) == (3, False)


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: x * 2, lambda x: 1 / x, math.cos])
def test_computed_with(change):
    assert place_of(change(token(5))) is None
    assert place_of(math.nan) is None and place_of(math.inf) is None and place_of(1.5) is None


def test_elements_of_a_ring():
    ring = Ring(primes()[0], 7)
    x = ring.draw("x", 2)
    numbers = [ring.token(element) for element in x]
    assert ring.number(numbers[1]) == x[1] and ring.number(-numbers[0]) == ring.neg(x[0])
    lifted = ring.lift(torch.tensor([0.5, *numbers], dtype=torch.float64))
    assert torch.equal(lifted, torch.cat([ring.number(0.5).view(1), x]))
    with pytest.raises(NotExact, match="no op sees it"):
        ring.number(numbers[0] * 2)
