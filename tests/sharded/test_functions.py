"""Elementwise functions, reductions and functions along dims are those of the plain tensor, values
and gradients, whatever the layout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import RANKS, placements, sizes, specs
from plain import check_function, check_same, cut, numbers

import fcoll
from fcoll import sharded
from fcoll.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardMetadata,
)
from fcoll.sharded.errors import CutDim, LayoutsDiffer, NoShardedOp

ELEMENTWISE = {
    "add a number": lambda x: x + 2,
    "a number less": lambda x: 3 - x,
    "a number over": lambda x: 2 / (x * x + 1),
    "true divide": lambda x: torch.div(x, 3, rounding_mode="trunc") + x / 3,
    "power": lambda x: x**2 + 1.01**x,
    "itself": lambda x: torch.sub(x * x, x, alpha=2),
    "0-dim": lambda x: x * torch.tensor(1.5) + torch.tensor(2.0),
    "gelu": F.gelu,
    "relu": lambda x: F.relu(x) + x.relu() + torch.relu(x),
    "activations": lambda x: F.silu(x) + F.leaky_relu(x, 0.2) + F.softplus(x),
    "in eval mode": lambda x: F.dropout(x, 0.5, training=False),
    "where": lambda x: torch.where(x > 0, x, x * 0.5),
    "masked": lambda x: x.masked_fill(x > 1, 7.0),
    "clamped": lambda x: x.clamp(-2, max=3),
    "another dtype": lambda x: x.double() / 3,
    "to another dtype": lambda x: x.to(torch.float64) + 1,
    "in place": lambda x: (x * 2).add_(1).mul_(x),
    "operators in place": lambda x: _in_place(x),
    "clone": lambda x: x.clone() * 2,
    "maximum": lambda x: torch.maximum(x, -x) + torch.max(x, x * 2),
}
WITHOUT_GRADIENT = {
    "compared": lambda x: (x > 1) | (x == -0.75) & ~(x <= 3),
    "integers": lambda x: x.long() // 2 % 3 ^ 1,
    "bits": lambda x: x.isnan().logical_or(x.isfinite()),
    "as another": lambda x: x.type_as(torch.tensor(1, dtype=torch.int32)),
    "like": lambda x: torch.ones_like(x) + torch.full_like(x, 2) - torch.zeros_like(x),
    "filled": lambda x: torch.empty_like(x).fill_(3).sub_(x),
    "zero": lambda x: torch.empty_like(x).zero_(),
    "any": lambda x: (x > 2).any(),
    "all": lambda x: (x > 2).all(),
}


def _in_place(x):
    y = x * 1
    y += 1
    y *= x
    y /= 2
    y -= x
    return y


@given(st.data())
@settings(max_examples=70)
def test_elementwise_functions(data):
    size = data.draw(sizes())
    spec = data.draw(specs(size))
    name = data.draw(st.sampled_from([*ELEMENTWISE, *WITHOUT_GRADIENT]))
    func = (ELEMENTWISE | WITHOUT_GRADIENT)[name]

    def check(rank):
        check_function(func, size, spec, name in ELEMENTWISE)

    fcoll.simulate_ranks(check, RANKS)


REDUCTIONS = {
    "sum": lambda x, d: x.sum(d),
    "sum kept": lambda x, d: torch.sum(x, d, keepdim=True),
    "mean": lambda x, d: x.mean(d),
    "as double": lambda x, d: torch.mean(x, dim=d, dtype=torch.float64),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: torch.amin(x, d, keepdim=True),
    "norm": lambda x, d: torch.linalg.vector_norm(x + 0.1, dim=d),
    "1-norm": lambda x, d: torch.linalg.vector_norm(x, 1, dim=d, keepdim=True),
    "largest": lambda x, d: torch.linalg.vector_norm(x, math.inf, dim=d),
}
OF_ALL = {
    "sum": lambda x: x.sum() + torch.sum(x),
    "mean": lambda x: x.mean(),
    "max": lambda x: torch.max(x) + x.min(),
    "prod": lambda x: (x / 50 + 1).prod(),
    "norm": lambda x: x.norm() + torch.norm(x, p=3),
}


@given(st.data())
@settings(max_examples=60)
def test_reductions(data):
    size = tuple(max(n, 1) for n in data.draw(sizes()))
    spec = data.draw(specs(size))
    if data.draw(st.booleans()):
        func = data.draw(st.sampled_from(list(OF_ALL.values())))
    else:
        one = data.draw(st.sampled_from(list(REDUCTIONS.values())))
        dims = data.draw(st.sets(st.integers(0, len(size) - 1), min_size=1))
        given = tuple(dims) if len(dims) > 1 else next(iter(dims)) - len(size)
        func = lambda x: one(x, given)  # noqa: E731
    fcoll.simulate_ranks(lambda rank: check_function(func, size, spec), RANKS)


@pytest.mark.parametrize(
    "func", [torch.max, torch.amax, lambda x: x.amin(x.ndim - 1), lambda x: x.max(-1)]
)
@pytest.mark.parametrize("size", [(0,), (3, 0)])
def test_an_extreme_of_nothing_is_refused_as_by_torch(func, size):
    with pytest.raises((IndexError, RuntimeError)) as torchs:
        func(torch.empty(size))

    spec = ChunkShardingSpec(dim=0, placements=placements([1]))

    def check(rank):
        with pytest.raises(type(torchs.value)) as ours:
            func(cut(torch.empty(size), spec))
        assert str(ours.value) == str(torchs.value)

    fcoll.simulate_ranks(check, RANKS)


def test_sums_of_nothing_are_zeros():
    def check(rank):
        rows = cut(numbers((4, 0)), sharded.chunk(0, 2)).sum(1)
        assert rows.local_tensor().tolist() == [0, 0] and rows.all_gather().tolist() == [0] * 4

    fcoll.simulate_ranks(check, 2)


def test_an_extreme_of_one_shard_beside_one_without_elements():
    spec = GridShardingSpec(grid=(2,), placements=placements([0, 0]))
    fcoll.simulate_ranks(lambda rank: check_function(lambda x: x.max(0), (1,), spec), RANKS)


ALONG = {
    "softmax": lambda x, d: x.softmax(d) + F.softmax(x, dim=d),
    "log_softmax": lambda x, d: F.log_softmax(x, dim=d),
    "cumsum": lambda x, d: torch.cumsum(x, d),
    "chunk": lambda x, d: torch.chunk(x, 3, dim=d),
    "split": lambda x, d: x.split(2, d),
    "max": lambda x, d: x.max(d),
    "min kept": lambda x, d: torch.min(x, dim=d, keepdim=True),
    "prod": lambda x, d: (x / 50 + 1).prod(d),
}


@given(st.data())
@settings(max_examples=50)
def test_along_a_dim(data):
    """Equal where each rank holds the dim from end to end; elsewhere an error that says so."""
    size = tuple(max(n, 1) for n in data.draw(sizes()))
    spec = data.draw(specs(size))
    name = data.draw(st.sampled_from([*ALONG, "transpose", "permute"]))
    dim = data.draw(st.integers(-len(size), len(size) - 1))
    order = data.draw(st.permutations(range(len(size))))
    func = {
        "transpose": lambda x: x.transpose(0, dim),
        "permute": lambda x: x.permute(order),
    }.get(name, lambda x: ALONG[name](x, dim))

    def check(rank):
        try:
            check_function(func, size, spec)
        except CutDim as error:
            assert name in ALONG and name != "prod"
            found = f"dim {dim % len(size)} of a tensor of {size}"
            assert found in str(error) and "reshard" in str(error)
            return False
        return True

    assert len(set(fcoll.simulate_ranks(check, RANKS))) == 1


def everything(rank):
    """A fixed set, for real ranks: rows on some of them, a grid, blocks of any shape."""
    uneven = [
        ShardMetadata([0, 0], [2, 4], "rank:0/cpu"),
        ShardMetadata([0, 4], [4, 2], "rank:1/cpu"),
        ShardMetadata([2, 0], [4, 4], "rank:2/cpu"),
        ShardMetadata([4, 4], [2, 2], "rank:3/cpu"),
    ]
    rows, blocks = sharded.chunk(0, [3, 0, 1]), EnumerableShardingSpec(uneven)
    for i, (name, func) in enumerate((ELEMENTWISE | WITHOUT_GRADIENT).items()):
        spec = (rows, blocks)[i % 2]  # nothing is sent, so ranks differ little from simulated ones
        check_function(func, (6, 6), spec, name in ELEMENTWISE)
    for spec in (rows, blocks):
        for func in [*OF_ALL.values(), lambda x: x.sum(0), lambda x: x.amax(1)]:
            check_function(func, (6, 6), spec)
    for func in ALONG.values():
        check_function(lambda x, func=func: func(x, 1), (6, 6), rows)


def test_on_real_ranks(ranks4):
    ranks4.run(everything, timeout=120)


def test_a_plain_tensor_is_broadcast_over_the_dims_that_are_cut():
    def check(rank):
        bias = torch.arange(3.0).requires_grad_()
        column = torch.arange(4.0).view(4, 1)
        rows, columns = (cut(numbers((4, 3)), sharded.chunk(d, 4)) for d in (0, 1))
        check_same(rows + bias, numbers((4, 3)) + bias)
        check_same(column * columns, column * numbers((4, 3)))
        made = rows * bias
        assert made.requires_grad
        made.all_gather().sum().backward()
        assert torch.equal(bias.grad, 4 * numbers((4, 3))[rank])  # its own rows', for four losses
        words = "not supported for ShardedTensor!$"
        for wrong in (lambda: rows + column, lambda: torch.add(rows, numbers((4, 3)))):
            with pytest.raises(NoShardedOp, match=words):
                wrong()
        for wrong in (lambda: column.add_(rows), lambda: rows + torch.ones(2, 4, 3)):
            with pytest.raises(NoShardedOp, match=words):
                wrong()
        with pytest.raises(NoShardedOp, match=r"rules for elementwise functions.* linear"):
            torch.linalg.svd(rows)
        with pytest.raises(NoShardedOp):
            torch.where(rows > 0)

    fcoll.simulate_ranks(check, 4)


def test_tensors_that_are_cut_in_two_ways():
    def check(rank):
        a, b = (cut(numbers((4, 4)), sharded.chunk(d, 4)) for d in (0, 1))
        with pytest.raises(LayoutsDiffer, match="reshard"):
            a + b
        check_same(a + sharded.reshard(b, a.sharding_spec()), 2 * numbers((4, 4)))
        # the same blocks in another order, as specs of two kinds
        same = EnumerableShardingSpec(a.metadata().shards_metadata[::-1])
        check_same(a * cut(numbers((4, 4)), same), numbers((4, 4)) ** 2)
        with pytest.raises(RuntimeError, match="Implicit broadcasting not supported"):
            a + cut(numbers((4, 1)), sharded.chunk(0, 4))

    fcoll.simulate_ranks(check, 4)


def test_random_functions_draw_what_the_shard_alone_would_draw():
    def check(rank):
        tensor = cut(numbers((8, 3)), sharded.chunk(0, 4))
        for func in (F.dropout, torch.nn.Dropout(0.8), lambda x: x.clone().normal_(2, 3)):
            torch.manual_seed(rank)
            made = func(tensor).local_tensor()
            torch.manual_seed(rank)
            assert torch.equal(made, func(tensor.local_tensor()))

    fcoll.simulate_ranks(check, 4)


@pytest.mark.parametrize("name", ["max", "min", "amax", "amin"])
def test_nothing_has_no_largest(name):
    """As torch's own, on a tensor without elements."""

    def check(rank):
        empty = sharded.ones(sharded.chunk(0, 4), 0, 4)
        with pytest.raises(RuntimeError):
            getattr(torch, name)(empty)
        with pytest.raises(RuntimeError):
            getattr(torch, name)(torch.ones(0, 4))
        assert empty.sum() == 0 and empty.prod() == 1

    fcoll.simulate_ranks(check, 4)
