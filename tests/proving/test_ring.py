"""The ring's arithmetic against Python's integers and fractions."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from fcoll.proving.algebra import NotExact, Unlucky
from fcoll.proving.constants import primes, rational
from fcoll.proving.degrees import Degrees, degree_of
from fcoll.proving.ring import Ring

P = max(primes())
RING = Ring(P, 7)
N, DRAW = RING.N, random.Random(0)
EDGES = [0, 1, 2, P - 1, P, P + 1, P * P - 1, P * P, N - 1, N // 2, (N + 1) // 2]
XS = EDGES + [DRAW.randrange(N) for _ in range(200)]
YS = XS[::-1]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def ints(x):
    return [int(v) for v in x.flatten().tolist()]


def test_primes_fit_and_have_roots_of_small_numbers():
    assert len(primes()) >= 8
    for p in primes():
        assert 2**16 < p < 2**17 and all(p % k for k in range(2, 363))
        assert p**3 < 2**51
        for k in (2, 3, 5):
            assert pow(k, (p - 1) // 4, p) == 1


@pytest.mark.parametrize(
    ("name", "of"),
    {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
    }.items(),
)
def test_two_elements(name, of):
    got = getattr(RING, name)(tensor(XS), tensor(YS))
    assert ints(got) == [of(x, y) % N for x, y in zip(XS, YS, strict=True)]


def test_digits_and_negation():
    d0, d1, d2 = map(ints, RING.digits(tensor(XS)))
    assert [a + b * P + c * P * P for a, b, c in zip(d0, d1, d2, strict=True)] == XS
    assert ints(RING.neg(tensor(XS))) == [-x % N for x in XS]


def test_products_of_matrices_and_long_sums():
    x, y = (torch.tensor([DRAW.randrange(N) for _ in range(6 * 40)]).double() for _ in range(2))
    a, b = x.view(6, 40), y.view(40, 6)
    want = [
        sum(int(a[i, k]) * int(b[k, j]) for k in range(40)) % N for i in range(6) for j in range(6)
    ]
    assert ints(RING.bilinear(torch.mm, a, b, 40)) == want
    assert ints(RING.total(a, [1])) == [sum(map(int, row.tolist())) % N for row in a]
    most = tensor([N - 1]).expand(100_000).contiguous()  # the largest digits, in the longest sums
    assert ints(RING.total(most, [])) == [(N - 1) * 100_000 % N]
    assert ints(RING.bilinear(torch.dot, most, most, 100_000)) == [100_000]
    with pytest.raises(NotExact):
        RING.bilinear(torch.dot, most, most, 2**17 + 1)


def test_inverse():
    units = [x for x in XS if x % P]
    assert ints(RING.inverse(tensor(units))) == [pow(x, -1, N) for x in units]
    for x in (0, P):
        with pytest.raises(Unlucky):
            RING.inverse(tensor([x]))


def test_few_elements_without_an_inverse():
    """As many as there are by chance are uninterpreted; a divisor that always is one is not."""
    ring, x = Ring(P, 1), torch.arange(1.0, 2 * P + 1, dtype=torch.float64)
    done = ring.inverse(x)
    poles = x % P == 0
    assert ring.poles == int(poles.sum()) == 2
    rest = x[~poles][::1000]
    assert ints(done[~poles][::1000]) == [pow(v, -1, N) for v in ints(rest)]
    assert torch.equal(done[poles], ring.inverse(x)[poles]), "a function of the element"
    assert len(set(ints(done[poles]))) == 2
    with pytest.raises(Unlucky):
        for _ in range(30):
            ring.inverse(tensor([P]))


def test_floats_are_dyadic_rationals():
    values = [0.0, 1.0, -1.0, 0.5, 0.1, -3.75, 1e-8, 1e30, 5e-324, 3.0e38, -(2.0**-60)]
    got = RING.lift(tensor(values))
    want = [Fraction(v).numerator * pow(Fraction(v).denominator, -1, N) % N for v in values]
    assert ints(got) == want
    assert ints(RING.lift(torch.tensor([3, -3, 0]))) == [3, N - 3, 0]
    assert RING.lift(torch.tensor([float("-inf")])).item() == float("-inf")
    narrow = torch.tensor([0.1], dtype=torch.float32)
    assert ints(RING.lift(narrow)) == ints(RING.lift(narrow.double()))


def test_constants_are_what_is_meant():
    for value, meant in {
        0.1: Fraction(1, 10),
        1 - 0.999: Fraction(1, 1000),
        1e-8: Fraction(1, 10**8),
        1 / 3: Fraction(1, 3),
        -2.5: Fraction(-5, 2),
    }.items():
        assert rational(value) == meant
        assert RING.residue(value) == meant.numerator * pow(meant.denominator, -1, N) % N
    for value, square in {2**0.5: 2, 8**-0.5: Fraction(1, 8), -(3**0.5): 3}.items():
        square = Fraction(square)
        assert RING.residue(value) ** 2 % N == square.numerator * pow(square.denominator, -1, N) % N
    assert RING.residue(-(3**0.5)) == N - RING.residue(3**0.5)
    assert RING.residue(8**-0.25) ** 4 % N == pow(8, -1, N)
    assert RING.residue(8**-0.25) ** 2 % N == RING.residue(8**-0.5)
    assert rational(0.7234982734987123) == Fraction(0.7234982734987123)


def test_constants_are_told_from_values():
    for a, b in [(3, 1), (-3, 1), (1, 3), (7, 12), (0, 1)]:
        x = a * pow(b, -1, N) % N
        assert RING.constant(float(x)) == a / b
    assert sum(RING.constant(float(x)) is not None for x in XS[len(EDGES) :]) == 0


def test_exp_is_a_homomorphism():
    x, y = tensor(XS), tensor(YS)
    base = 1 + P * RING.rate
    assert ints(RING.exp(x)) == [pow(base, v, N) for v in XS]
    assert ints(RING.exp(RING.add(x, y))) == ints(RING.mul(RING.exp(x), RING.exp(y)))
    assert ints(RING.exp(tensor([float("-inf")]))) == [0]


def test_log_undoes_exp_and_is_additive_modulo_p2():
    x = tensor(XS)
    assert ints(RING.log(RING.exp(x))) == [v % P**2 for v in XS]
    a, b = (tensor([v for v in values if v % P][:100]) for values in (XS, YS))
    both = RING.log(RING.mul(a, b))
    assert ints((both - RING.log(a) - RING.log(b)) % P**2) == [0] * 100
    assert RING.log(tensor([0.0])).item() == float("-inf")


def test_exp_undoes_log_also_of_sums_of_logarithms():
    ring = Ring(P, 5)
    a, b = tensor(XS[-100:]), tensor(XS[-200:-100])
    x, y = ring.log(a), ring.log(b)
    assert ints(ring.exp(x)) == ints(a)
    plain = Ring(P, 5).exp(x)  # has not seen the logarithm: the root of unity is missing
    assert ints(plain) == [v * pow(pow(v, P * P, N), -1, N) % N for v in ints(a)]
    assert ints(ring.exp(ring.add(x, y))) == ints(ring.mul(a, b))
    assert ints(ring.exp(ring.sub(x, y))) == ints(ring.div(a, b))
    total = [v + w for v, w in zip(ints(a), ints(b), strict=True)]
    some = tensor([i for i, v in enumerate(total) if v % P]).long()
    x, y, a, b = x[some], y[some], a[some], b[some]
    share = ring.sigmoid(ring.sub(x, y))  # a / (a + b)
    assert ints(share) == ints(ring.div(a, ring.add(a, b)))
    assert ring.took_sigmoid_of_log
    assert ints(ring.sigmoid(b)) == ints(ring.opaque("sigmoid", b))  # of no logarithm


def test_cuts_are_undone_and_made_once():
    ring = Ring(P, 6)
    x = tensor(XS)
    cut = ring.cut(x)
    small = [v < 2**12 or N - v < 2**12 for v in XS]
    assert [c == v for c, v in zip(ints(cut), XS, strict=True)] == small
    ring.log(tensor([3]))  # what comes between them changes nothing
    assert ints(ring.cut(cut)) == ints(cut) and ints(ring.uncut(cut)) == XS


def test_small_integers_keep_their_order():
    counts = tensor([-4000, -1, 0, 1, 2, 4000])
    keys = RING.key(RING.lift(counts))
    assert bool((keys[1:] > keys[:-1]).all())
    known, numbers = RING.counts(RING.lift(counts))
    assert bool(known.all()) and torch.equal(numbers, counts)
    assert not bool(RING.counts(tensor(XS[len(EDGES) :]))[0].any())


def test_the_order_has_signs():
    """-x lies as far on the other side of 0; sizes, and what is made of them, are above it; some
    below 1 and some above."""
    ring = Ring(P, 11)
    x = ring.draw("x", 500)
    zero, one = (ring.key(ring.number(k)) for k in (0, 1))
    assert torch.equal(ring.key(ring.neg(x)), -ring.key(x))
    assert 150 < int((ring.key(x) > zero).sum()) < 350
    size = ring.absolute(x)
    assert bool((ring.key(size) > zero).all()) and torch.equal(ring.absolute(ring.neg(x)), size)
    assert 150 < int((ring.key(size) > one).sum()) < 350
    decayed = ring.product(size, ring.number(0.999))
    made = ring.add(ring.add(size, ring.number(1e-8)), ring.product(decayed, size))
    assert bool((ring.key(made) > zero).all())
    other = ring.add(size, x)  # x has either sign
    assert not bool((ring.key(ring.sub(other, ring.number(3))) > zero).all())


def test_the_square_of_a_root():
    ring = Ring(P, 3)
    x = tensor(XS)
    root = ring.root(x)
    assert ints(ring.square(root)) == XS and ints(root) != XS
    assert ints(ring.square(x)) == [v * v % N for v in XS]  # no root
    assert ints(ring.root(tensor([0, 1, 4, 81]))) == [0, 1, 2, 9]
    third = ring.number(1 / 3)
    scaled = ring.product(root[7:9], third)  # norms are scaled, then squared
    assert ints(ring.square(scaled)) == [v * pow(9, -1, N) % N for v in XS[7:9]]


def test_uninterpreted_functions_and_order_depend_on_the_value_alone():
    x = tensor(XS)
    first = RING.opaque("f", x)
    assert torch.equal(first.flip(0), RING.opaque("f", x.flip(0)))
    assert bool((first >= 0).all()) and bool((first < N).all())
    assert len(set(ints(first))) == len(set(XS))
    assert not torch.equal(first, RING.opaque("g", x))
    assert not torch.equal(first, Ring(P, 8).opaque("f", x))
    assert len(set(RING.key(x).tolist())) == len(set(XS))
    above = RING.key(x) > RING.key(tensor([0.0]))
    assert 5 < int(above.sum()) < 205  # by residues all would be above 0
    far = RING.key(tensor([float("-inf"), 5.0, float("inf")]))
    assert far[0] < far[1] < far[2]


def test_what_is_no_residue_is_refused():
    for value in (0.5, -1.0, float(N), float("nan"), float("inf")):
        with pytest.raises(NotExact):
            RING.mul(tensor([value]), tensor([1.0]))


def test_degrees():
    d = Degrees()
    x, y = d.draw("x", 1), d.draw("y", 1)
    assert degree_of(d.mul(d.mul(x, y), x)) == 3
    assert degree_of(d.add(d.mul(x, y), x)) == 2
    over = d.div(x, d.mul(y, y))
    assert degree_of(over) == 2
    other = d.div(x, d.mul(y, y))
    assert degree_of(d.add(over, other)) == 4  # x/y^2 + z/w^2 has denominator y^2 w^2
    assert degree_of(d.total(d.div(x, d.draw("y", 5)), [0])) == 5
    assert degree_of(d.exp(d.mul(x, y))) == 6
    assert degree_of(d.opaque("f", d.mul(x, y))) == 1 and d.deepest == 2
    assert degree_of(d.bilinear(torch.mm, x.view(1, 1), y.view(1, 1), 1)) == 2
    assert degree_of(d.pick(torch.tensor([False]), d.mul(x, y), x)) == 2
    assert degree_of(d.number(3)) == degree_of(d.lift(torch.ones(2))) == 0


def test_degrees_of_fractions_that_share_a_denominator():
    d = Degrees()
    x, y, w = d.draw("x", 6).view(2, 3), d.draw("y", 6).view(2, 3), d.draw("w", 3)
    rows = d.div(x, d.total(x, [1], True))  # each row has one
    assert degree_of(d.add(rows, rows)) == 1
    assert degree_of(d.total(rows, [1])) == 1
    assert degree_of(d.total(rows, [0])) == 2  # of two rows
    assert degree_of(d.total(d.add(rows, d.div(y, d.total(y, [1], True))), [1])) == 2
    assert degree_of(d.bilinear(torch.mv, rows, w, 3)) == 2
    assert degree_of(d.bilinear(lambda a, b: a @ b.t(), rows, rows, 3)) == 2
    assert degree_of(d.bilinear(lambda a, b: a.t() @ b, rows, rows, 2)) == 4
    assert degree_of(d.bilinear(torch.mul, rows, d.inverse(w))) == 2
    assert degree_of(d.add(d.mul(rows, rows), rows)) == 3  # x^2/s^2 + x/s, not known to be over s^2


def test_degrees_that_are_found_again_keep_denominators_apart():
    """What makes a new denominator makes another one each time; what makes none is kept."""
    d = Degrees()
    runs = []

    def apply(name, rule, *args):
        return d.applied(lambda a, *x: runs.append(name) or rule(a, *x), name, args, {})

    x = d.draw("x", 4)
    first, second = (apply("reciprocal", lambda a, x: a.inverse(x), x) for _ in range(2))
    assert degree_of(d.add(first, first)) == 1 and degree_of(d.add(first, second)) == 2
    for _ in range(2):
        assert degree_of(apply("mul", lambda a, x, y: a.mul(x, y), x, x)) == 2
        assert degree_of(apply("sum", lambda a, x: a.total(x, [0]), first)) == 4
    assert runs.count("reciprocal") == runs.count("sum") == 2 and runs.count("mul") == 1


def test_degrees_know_of_logarithms_that_are_met_later():
    met = Ring(P, 1)
    d = Degrees([met])
    x = d.mul(d.draw("x", 1), d.draw("y", 1))
    sigmoid = lambda: degree_of(d.applied(lambda a, x: a.sigmoid(x), "sigmoid", (x,), {}))  # noqa: E731
    assert sigmoid() == 1
    met.took_sigmoid_of_log = True
    assert sigmoid() == 6


def test_degrees_of_exponentials_and_roots():
    d = Degrees()
    x, y = d.draw("x", 1), d.draw("y", 1)
    weights = d.add(d.exp(x), d.exp(d.mul(x, y)))  # 2 modulo p: its inverse has no denominator
    assert degree_of(weights) == 6 and degree_of(d.inverse(weights)) == 6
    assert degree_of(d.total(d.inverse(weights).expand(5), [0])) == 6
    assert degree_of(d.total(d.inverse(d.add(weights, x).expand(5)), [0])) == 30
    assert degree_of(d.inverse_root(d.mul(x, y))) == 2
    assert degree_of(d.square(d.root(d.exp(x)))) >= degree_of(d.exp(x))
    assert degree_of(d.log(weights)) == 6
    assert degree_of(d.sigmoid(weights)) == 1
    met = Ring(P, 1)
    met.took_sigmoid_of_log = True
    assert degree_of(Degrees([met]).sigmoid(weights)) == 14
