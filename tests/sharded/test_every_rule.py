"""Every elementwise function that has a rule, and every creator of given data: as on the plain
tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import RANKS, blocks, check_local, plain, sizes, specs
from torch import Tensor

import fcoll
from fcoll import sharded
from fcoll.sharded import Shard
from fcoll.sharded.ops.rules import _elementwise, name_of

SIZE = (5, 6)
LAYOUTS = [sharded.chunk(0, [2, 0]), sharded.grid((2, 3), [0, 1, 2, 3, 1, 0])]
RANDOM = {
    *("bernoulli", "bernoulli_", "dropout", "dropout_", "alpha_dropout", "alpha_dropout_"),
    *("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"),
}
NUMBERS = torch.linspace(0.05, 0.9, 30).view(SIZE)  # where all functions are defined
COUNTS = torch.arange(1, 31).view(SIZE) % 7
TRUTHS = COUNTS > 3
#: arguments to try, in this order: the first that the plain function takes
TRIED = [
    (NUMBERS,),
    (NUMBERS + 1,),  # acosh
    (NUMBERS + 1j * NUMBERS,),
    (TRUTHS,),
    (COUNTS,),
    (NUMBERS, NUMBERS * 2),
    (NUMBERS, 2.0),
    (COUNTS, COUNTS + 1),
    (TRUTHS, TRUTHS),
    (NUMBERS, TRUTHS, 7.0),
    (NUMBERS, NUMBERS * 2, 0.5),
    (NUMBERS, NUMBERS * 2, NUMBERS * 3),
    (TRUTHS, NUMBERS, NUMBERS * 2),
    (NUMBERS, 0.3, 0.5),
]


def fitting(func):
    """Arguments that the plain function takes and gives a tensor of their size for, and that."""
    for args in TRIED:
        given = [x.clone() if isinstance(x, Tensor) else x for x in args]
        try:
            result = func(*given)
        except (TypeError, RuntimeError, IndexError, ValueError):
            continue
        if isinstance(result, Tensor) and result.shape == SIZE and not result.isnan().any():
            return args, result
    return None


def check_all(rank):
    """All functions on all layouts. The names of those that take no arguments of the list."""
    unfit = []
    for func in sorted(_elementwise, key=lambda f: (name_of(f), str(f))):
        name = name_of(func)
        if name in RANDOM:
            continue
        found = fitting(func)
        if found is None:
            unfit.append(name)
            continue
        args, want = found
        for spec in LAYOUTS:
            given = [cut(x, spec) if isinstance(x, Tensor) else x for x in args]
            got = func(*given)
            assert isinstance(got, sharded.ShardedTensor), name
            assert got.dtype == want.dtype and got.sharding_spec() == spec, name
            torch.testing.assert_close(got.all_gather(), want, msg=name)
    return unfit


def cut(x, spec):
    """A plain tensor that all ranks have, in shards."""
    made = sharded.empty(spec, *x.shape, dtype=x.dtype)
    for shard in made.local_shards():
        place = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        shard.tensor.copy_(x[tuple(slice(a, a + n) for a, n in place)])
    return made


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
def test_every_elementwise_function():
    names = {name_of(func) for func in _elementwise}
    assert len(names) > 200
    unfit = fcoll.simulate_ranks(check_all, 4)[0]
    assert len(unfit) < 5, unfit


def _drawn(func, x):
    """The function with as many arguments as it needs."""
    for args in ((), (0.5,), (0.5, True)):
        try:
            func(NUMBERS.clone(), *args)
        except TypeError:
            continue
        return func(x, *args)
    raise AssertionError(func)


def test_random_ones_keep_the_layout():
    def check(rank):
        for func in sorted(_elementwise, key=str):
            if name_of(func) in RANDOM:
                x = cut(NUMBERS, LAYOUTS[0])
                assert _drawn(func, x).sharding_spec() == LAYOUTS[0]

    fcoll.simulate_ranks(check, 4)


# -- creators of given data ---


@given(st.data())
@settings(max_examples=30)
def test_shards_that_ranks_have(data):
    size = data.draw(sizes())
    spec = data.draw(specs(size))

    def check(rank):
        whole = plain(size)
        scattered = sharded.shard_tensor(whole if rank == 2 else whole * 0, spec, src_rank=2)
        check_local(scattered, spec, size, rank)
        layout = scattered.metadata()
        mine = [s for s in scattered.local_shards() if s.tensor.numel()]
        known = sharded.init_from_local_shards_and_global_metadata(
            scattered.local_shards(), layout, sharding_spec=spec
        )
        check_local(known, spec, size, rank)
        assert len(mine) == sum(owner == rank for owner, _, _ in blocks(spec, size))
        if whole.numel():
            shards = [Shard(s.tensor.clone(), s.metadata) for s in mine]
            told = sharded.init_from_local_shards(shards, *size)
            assert torch.equal(told.all_gather(), whole)

    fcoll.simulate_ranks(check, RANKS)


def test_a_tensor_of_each_rank_is_its_shard():
    def check(rank):
        for dim, size in ((0, (7, 3)), (1, (2, 9)), (0, (4, 2))):
            spec = sharded.chunk(dim, [3, 1, 0, 2])
            place = [3, 1, 0, 2].index(rank)
            mine = plain(size).chunk(4, dim)
            if len(mine) < 4:  # a rank has none: torch.chunk gives fewer
                continue
            st = sharded.from_local_tensor(mine[place].contiguous(), spec, *size)
            check_local(st, spec, size, rank)
            assert torch.equal(F.relu(st).all_gather(), plain(size))

    fcoll.simulate_ranks(check, 4)
