"""Creators, gather and reshard are the plain tensor, whatever the layouts: on simulated ranks at
random, on real ones a few of each kind."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import RANKS, check_local, holders, plain, sizes, specs, two_layouts

import fcoll
from fcoll import sharded
from fcoll.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.complex64]


def check_reshard(rank, size, old, new, group=None):
    """From one layout to another, both ways of it, and what it was stays."""
    whole = plain(size)
    tensor = sharded.arange(old, size, dtype=torch.float32, process_group=group)
    check_local(tensor, old, size, rank)
    assert torch.equal(tensor.all_gather(), whole)
    other = sharded.reshard(tensor, new)
    check_local(other, new, size, rank)
    check_local(tensor, old, size, rank)
    assert other.sharding_spec() == new and other.shape == size
    assert torch.equal(other.all_gather(), whole)
    assert tensor.reshard(new) is tensor
    check_local(tensor, new, size, rank)
    for dst in (0, tensor.group.n - 1):
        mine = tensor.group.rank == dst
        out = torch.full(size, -1.0) if mine else None
        tensor.gather(dst, out)
        assert not mine or torch.equal(out, whole)


@given(two_layouts())
@settings(max_examples=60)
def test_any_layout_to_any_other(layouts):
    fcoll.simulate_ranks(lambda rank: check_reshard(rank, *layouts), RANKS)


def all_pairs():
    """Chunks of both dims, forwards, backwards and on some ranks; grids; blocks of any shape."""
    uneven = [
        ShardMetadata([0, 0], [2, 4], "rank:0/cpu"),
        ShardMetadata([0, 4], [4, 2], "rank:1/cpu"),
        ShardMetadata([2, 0], [4, 4], "rank:2/cpu"),
        ShardMetadata([4, 4], [2, 2], "rank:3/cpu"),
    ]
    kinds = [
        sharded.chunk(0, 4),
        sharded.chunk(0, [3, 1, 0, 2]),
        sharded.chunk(-1, 4),
        sharded.chunk(1, [2, 1]),
        sharded.chunk(0, [1, 1, 3, 0, 3, 1, 2]),
        sharded.grid((2, 2), 4),
        sharded.grid((3, 2), [0, 1, 2, 3, 2, 1]),
        EnumerableShardingSpec(uneven),
    ]
    return [(old, new) for old in kinds for new in kinds]


def every_pair(rank):
    for old, new in all_pairs():
        check_reshard(rank, (6, 6), old, new)


def test_every_pair_on_real_ranks(ranks4):
    ranks4.run(every_pair, timeout=120)


def test_every_pair_on_shared_memory(shared4):
    shared4.run(every_pair, timeout=120)


def on_a_part_of_the_ranks(rank):
    """The group's ranks are 3, 1, 2 in this order; placements name ranks of the world."""
    if rank == 0:
        return
    for old, new in [
        (sharded.chunk(0, [1, 2, 3]), sharded.chunk(1, [3, 2])),
        (sharded.grid((1, 3), [3, 1, 2]), sharded.chunk(0, [2])),
    ]:
        check_reshard(rank, (5, 7), old, new, group=[3, 1, 2])


def test_on_a_part_of_the_ranks(ranks4):
    ranks4.run(on_a_part_of_the_ranks)
    fcoll.simulate_ranks(on_a_part_of_the_ranks, 4)


@given(st.data())
@settings(max_examples=40)
def test_creators_are_the_plain_ones(data):
    size = data.draw(sizes())
    spec = data.draw(specs(size))
    dtype = data.draw(st.sampled_from(DTYPES))
    value = data.draw(st.sampled_from([7, 2.5, True]))

    def check(rank):
        for make, same in (
            (sharded.zeros, torch.zeros),
            (sharded.ones, torch.ones),
        ):
            got = make(spec, *size, dtype=dtype)
            assert got.dtype == dtype
            assert torch.equal(got.all_gather(), same(*size, dtype=dtype))
        assert sharded.empty(spec, size).all_gather().shape == size
        full = sharded.full(spec, size, value)
        assert torch.equal(full.all_gather(), torch.full(size, value))
        numbers = sharded.arange(spec, *size, start=3, step=2)
        assert torch.equal(numbers.all_gather(), torch.arange(full.numel()).view(size) * 2 + 3)
        mean, spread = sharded.rand(spec, *size), sharded.randn(spec, list(size))
        assert ((mean.all_gather() >= 0) & (mean.all_gather() < 1)).all()
        assert spread.dtype == torch.float32 and spread.shape == size

    fcoll.simulate_ranks(check, RANKS)


def test_values_by_index_need_no_communication():
    def value(rank):
        spec = sharded.chunk(1, [0, 2])
        made = sharded.from_function(spec, (2, 3), lambda i, j: 10.0 * i + j)
        assert (made.dtype == torch.float32 and made.local_shards()) or rank in (1, 3)
        return [shard.tensor.tolist() for shard in made.local_shards()]

    nothing = []
    left, right = [[0.0, 1.0], [10.0, 11.0]], [[2.0], [12.0]]
    assert fcoll.simulate_ranks(value, 4) == [[left], nothing, [right], nothing]


def test_random_numbers_are_those_of_each_rank_s_generator():
    def draw(rank):
        torch.manual_seed(rank)
        expected = torch.rand(2, 3), torch.randn(2, 3)
        torch.manual_seed(rank)
        spec = sharded.chunk(0, 4)
        drawn = sharded.rand(spec, 8, 3), sharded.randn(spec, 8, 3)
        assert all(torch.equal(a, b.local_tensor()) for a, b in zip(expected, drawn, strict=True))

    fcoll.simulate_ranks(draw, 4)


def test_gather_sends_as_another_dtype():
    def gathered(rank):
        tensor = sharded.full(sharded.chunk(0, 4), (4, 2), 1 / 3)
        out = torch.empty(4, 2, dtype=torch.float64) if rank == 2 else None
        tensor.gather(2, out, dtype=torch.bfloat16)
        return None if out is None else out[3, 1].item()

    assert fcoll.simulate_ranks(gathered, 4)[2] == torch.tensor(1 / 3).bfloat16().item()


def test_what_stays_is_not_sent_and_the_rest_once(monkeypatch):
    """The bytes that all_to_all_single is called with are those that must move."""
    sent = []
    call = fcoll.functions.all_to_all_single

    def counted(x, group, outs, ins):
        me = dist.get_rank()
        assert ins[me] == outs[me], "what stays goes along where that saves a copy, and is not sent"
        sent.append(x.numel() - ins[me])
        return call(x, group, outs, ins)

    monkeypatch.setattr(fcoll.functions, "all_to_all_single", counted)
    for old, new in all_pairs():
        sent.clear()

        def once(rank, old=old, new=new):
            sharded.reshard(sharded.arange(old, 6, 6), new)

        fcoll.simulate_ranks(once, 4)
        least = (holders(old, (6, 6)) != holders(new, (6, 6))).sum()
        assert sum(sent) == least
        assert least or not sent, "nothing moves, so no collective"


def test_the_same_spec_is_the_same_tensor():
    def same(rank):
        tensor = sharded.ones(sharded.chunk(0, 4), 8, 2)
        shards = tensor.local_shards()
        assert tensor.reshard(ChunkShardingSpec(0, sharded.chunk(0, 4).placements)) is tensor
        assert tensor.local_shards() is shards

    fcoll.simulate_ranks(same, 4)
