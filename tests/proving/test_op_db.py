"""Rules against torch's own samples of its ops (op_db), on rational inputs: where floats give a
rational number, the residue is that number's."""

from __future__ import annotations

import itertools
import sys
import types
import unittest
import warnings
from fractions import Fraction

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from fcoll.proving import exact_mode
from fcoll.proving.algebra import Unlucky
from fcoll.proving.constants import primes
from fcoll.proving.exact_mode import RULES, ExactMode, Refused
from fcoll.proving.ring import Ring

# What these give is no rational number, or one of too large a denominator to be told from a float
# (prod), or is by an order drawn at random; so are uninterpreted functions, which the ring tells.
_OTHERS = """
    exp expm1 log log1p xlogy logsumexp logaddexp _softmax _safe_softmax _log_softmax max min
    amax amin argmax argmin topk sort maximum minimum fmax fmin gt ge lt le abs sgn sign
    clamp clamp_min clamp_max norm linalg_vector_norm prod kthvalue median cummax cummin
    scatter_reduce index_reduce hypot _cdist_forward
"""
_COMPOSED = """
    nn.functional.linear nn.functional.bilinear nn.functional.mse_loss nn.functional.conv1d
    nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.embedding nn.functional.pad
    nn.functional.nll_loss matmul einsum tensordot addr outer inner kron vander diff trapezoid
    cumulative_trapezoid linalg.cross square true_divide hstack vstack nansum trace ger
    linalg.multi_dot linalg.matrix_power masked.mean masked.sum nn.functional.pixel_shuffle
    unfold_copy
"""
SAMPLES, ELEMENTS = 5, 800  # of each op
AGREEING = 70  # ops of torch 2.13


def operators():
    """Those with a rule of their name, and some that are made of several."""
    # torch's test helpers take their TestCase from it, and nothing that is used here
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    named = {*RULES, *_COMPOSED.split()} - {*_OTHERS.split()}
    return [op for op in op_db if op.name in named and torch.float64 in op.supported_dtypes("cpu")]


def short(x):
    """A tensor of floats with few bits: eighths, none of them 0."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    eighths = (x.detach() * 8).round().clamp(-64, 64)
    return torch.where(eighths == 0, 1.0, eighths) / 8


def residue(ring, value):
    """Of the simple fraction that a float is, or None."""
    near = Fraction(value).limit_denominator(2**20)
    return ring.residue_of(near) if abs(float(near) - value) <= 1e-14 * max(1, abs(value)) else None


def compared(op, sample, used):
    """How many elements of a sample's results are as they should be; 0 if it has no rule here."""
    args = tree_map(short, (sample.input, sample.args, sample.kwargs))
    if sum(x.numel() for x in tree_leaves(args) if isinstance(x, torch.Tensor)) > ELEMENTS:
        return 0
    ring = Ring(primes()[0], 7)
    lift = lambda x: ring.lift(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    first, rest, named = tree_map(lift, args)
    used.clear()
    try:
        with ExactMode(ring, 0):
            got = op(first, *rest, **named)
    except (Refused, Unlucky, RuntimeError):  # or the op itself, of what it takes for a float
        return 0
    if ring.uninterpreted or used & {*_OTHERS.split()}:
        return 0
    first, rest, named = args
    pairs = zip(tree_leaves(got), tree_leaves(op(first, *rest, **named)), strict=True)
    return sum(_same(ring, g, w) for g, w in pairs if isinstance(w, torch.Tensor))


def _same(ring, got, want):
    assert got.shape == want.shape
    if not want.is_floating_point():
        assert torch.equal(got, want)
        return 0
    if not bool(want.isfinite().all()):
        return 0
    found = [residue(ring, value) for value in want.flatten().tolist()]
    known = [(g, w) for g, w in zip(got.flatten().tolist(), found, strict=True) if w is not None]
    assert [int(g) for g, _ in known] == [w for _, w in known]
    return len(known)


@pytest.fixture
def used(monkeypatch):
    """The rules that were used."""
    names = set()

    class Noted(dict):
        def get(self, name, default=None):
            names.add(name)
            return super().get(name, default)

    monkeypatch.setattr(exact_mode, "RULES", Noted(RULES))
    return names


@pytest.fixture
def doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        yield
    torch.set_default_dtype(before)


def test_rules_agree_with_floats(used, doubles):
    torch.manual_seed(0)
    agreeing, wrong = {}, {}
    for op in operators():
        samples = op.sample_inputs("cpu", torch.float64, requires_grad=False)
        for sample in itertools.islice(samples, SAMPLES):
            try:
                agreeing[op.name] = agreeing.get(op.name, 0) + compared(op, sample, used)
            except AssertionError as error:
                wrong[op.name] = str(error)[:200]
    assert not wrong, wrong
    found = sorted(name for name, count in agreeing.items() if count)
    assert len(found) >= AGREEING
