"""embedding, embedding_bag, linear and matmul with a sharded matrix: each rank's own input gives
what the plain matrix would, values and gradients, whatever the layout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import RANKS, specs
from plain import block, check_gradient, check_same, cut, numbers

import fcoll
from fcoll import sharded
from fcoll.sharded.errors import BadLookup, BadProduct, LayoutsDiffer, NoShardedOp


def own(rank, *shape, of=None):
    """A rank's own numbers: ids below ``of``, or floats."""
    generator = torch.Generator().manual_seed(rank)
    if of is not None:
        return torch.randint(0, of, shape, generator=generator)
    return torch.randn(*shape, generator=generator)


def looked_up_by_all(ids):
    """The ids of all ranks."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ids.flatten().tolist())
    return torch.tensor(sorted({i for mine in everyone for i in mine}), dtype=torch.int64)


def check_lookup(func, ids, size, spec, max_norm=None, norm_type=2.0, **options):
    plain = (numbers(size) / size[0]).requires_grad_()
    table = cut(plain.detach(), spec, requires_grad=True)
    if max_norm is not None:
        options |= {"max_norm": max_norm, "norm_type": norm_type}
        all_ids = looked_up_by_all(ids)
        if len(all_ids):
            F.embedding(all_ids, plain, max_norm=max_norm, norm_type=norm_type)
    made = func(ids, table, **options)
    expected = func(ids, plain, **options)
    assert max_norm is not None or func is not F.embedding or torch.equal(made, expected)
    check_same(made, expected)
    check_same(table, plain.detach())
    made.square().sum().backward()
    expected.square().sum().backward()
    check_gradient(table, plain.grad)


NORMS = st.sampled_from([None, None, (0.5, 2.0), (0.7, 1.0), (0.3, math.inf)])


@st.composite
def tables(draw):
    size = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    return size, draw(specs(size))


def norms(data):
    norm = data.draw(NORMS)
    return {} if norm is None else {"max_norm": norm[0], "norm_type": norm[1]}


@given(st.data())
@settings(max_examples=60)
def test_embedding(data):
    size, spec = data.draw(tables())
    shapes = st.lists(st.integers(0, 3), max_size=3)
    given = [data.draw(shapes) for _ in range(RANKS)]
    options = norms(data)
    options["padding_idx"] = data.draw(st.none() | st.integers(-size[0], size[0] - 1))
    fcoll.simulate_ranks(
        lambda rank: check_lookup(
            F.embedding, own(rank, *given[rank], of=size[0]), size, spec, **options
        ),
        RANKS,
    )


@given(st.data())
@settings(max_examples=60)
def test_embedding_bag(data):
    size, spec = data.draw(tables())
    mode = data.draw(st.sampled_from(["sum", "mean", "max"]))
    options = norms(data)
    options["padding_idx"] = data.draw(st.none() | st.integers(0, size[0] - 1))
    weighted = mode == "sum" and data.draw(st.booleans())
    flat, last = data.draw(st.booleans()), data.draw(st.booleans())
    lengths = [data.draw(st.integers(1, 6)) for _ in range(RANKS)]

    def check(rank):
        ids = own(rank, lengths[rank], *([] if flat else [2]), of=size[0])
        mine = {"mode": mode, **options}
        if weighted:
            mine["per_sample_weights"] = own(rank, *ids.shape)
        if flat:
            ends = [0, lengths[rank] // 2, *([lengths[rank]] * last)]
            mine |= {"offsets": torch.tensor(ends), "include_last_offset": last}
        check_lookup(F.embedding_bag, ids, size, spec, **mine)

    fcoll.simulate_ranks(check, RANKS)


def test_rows_are_scaled_to_torchs_last_bit():
    """Else the largest of two rows that were scaled to the same norm is another one."""

    def check(rank):
        plain = numbers((9, 6)) / 9
        table, ids = cut(plain, sharded.chunk(1, RANKS)), torch.arange(9)
        F.embedding(ids, table, max_norm=0.3, norm_type=math.inf)
        F.embedding(ids, plain, max_norm=0.3, norm_type=math.inf)
        assert torch.equal(table.all_gather(), plain)

    fcoll.simulate_ranks(check, RANKS)


def check_product(func, x, size, spec, requires_grad=True):
    plain = numbers(size).requires_grad_()
    matrix = cut(plain.detach(), spec, requires_grad=True)
    mine, theirs = (x.clone().requires_grad_(requires_grad) for _ in range(2))
    made, expected = func(mine, matrix), func(theirs, plain)
    check_same(made, expected)
    made.square().sum().backward()
    expected.square().sum().backward()
    check_gradient(matrix, plain.grad)
    assert not requires_grad or torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-3)


@given(st.data())
@settings(max_examples=50)
def test_linear_and_matmul(data):
    size, spec = data.draw(tables())
    with_bias = data.draw(st.booleans())
    transposed = data.draw(st.booleans())
    lead = [data.draw(st.lists(st.integers(0, 3), max_size=2)) for _ in range(RANKS)]
    wants = [data.draw(st.booleans()) for _ in range(RANKS)]
    bias = torch.arange(float(size[0])) if with_bias else None

    def linear(x, matrix):
        return F.linear(x, matrix, bias)

    def check(rank):
        x = own(rank, *lead[rank], size[0] if transposed else size[1])
        check_product(torch.matmul if transposed else linear, x, size, spec, wants[rank])

    fcoll.simulate_ranks(check, RANKS)


def fixed(rank):
    """A few of each, for real ranks: rows, columns in another order, a grid on three of them."""
    for spec in (
        sharded.chunk(0, 4),
        sharded.chunk(1, [2, 3, 0, 1]),
        sharded.grid((3, 1), [2, 0, 1]),
    ):
        ids = own(rank, 5, rank, of=9)
        check_lookup(F.embedding, ids, (9, 6), spec, padding_idx=3)
        check_lookup(F.embedding, ids, (9, 6), spec, max_norm=0.5)
        ids, offsets = own(rank, 7, of=9), torch.tensor([0, 2, 2, 5])
        weights = own(rank, 7)
        bags = {"offsets": offsets, "mode": "sum", "per_sample_weights": weights}
        check_lookup(F.embedding_bag, ids, (9, 6), spec, **bags)
        for mode in ("mean", "max"):
            ids = own(rank, 4, 3, of=9)
            check_lookup(F.embedding_bag, ids, (9, 6), spec, mode=mode, padding_idx=2)
        check_product(F.linear, own(rank, 2, rank, 6), (9, 6), spec, rank != 1)
        check_product(torch.matmul, own(rank, 9), (9, 6), spec)


def test_on_real_ranks(ranks4):
    ranks4.run(fixed, timeout=120)


def test_a_wrong_input_on_one_rank_is_an_error_on_all_and_the_next_call_works():
    def check(rank):
        table = cut(numbers((5, 4)), sharded.chunk(0, 4))
        with pytest.raises(BadLookup, match="on rank 2: Index out of range in Input") as raised:
            F.embedding(torch.tensor([0, 5 if rank == 2 else 4]), table)
        assert ("the table has 5 rows" in str(raised.value)) == (rank == 2)
        assert raised.value.rank == 2
        with pytest.raises(BadLookup, match="on rank 1") as raised:
            F.embedding(torch.tensor([0], dtype=(torch.long, torch.float)[rank == 1]), table)
        assert ("an integer dtype, got torch.float32" in str(raised.value)) == (rank == 1)
        with pytest.raises(BadLookup, match=r"on rank [01]: max_norm is"):
            F.embedding(torch.tensor([0]), table, max_norm=None if rank == 1 else 1.0)
        with pytest.raises(BadProduct, match="on rank 3") as raised:
            F.linear(torch.ones(2, 13 if rank == 3 else 4), table)
        words = "Input dim: 13 does not match appropriate weight dim: 4"
        assert (words in str(raised.value)) == (rank == 3)
        with pytest.raises(BadProduct, match="on rank 0"):
            F.linear(torch.ones(4, dtype=torch.float64 if rank == 0 else torch.float32), table)
        assert torch.equal(
            F.embedding(torch.tensor([rank]), table), numbers((5, 4))[rank : rank + 1]
        )

    fcoll.simulate_ranks(check, 4)


def test_what_lookups_do_not_take():
    def check(rank):
        table = cut(numbers((5, 4)), sharded.chunk(0, 4))
        ids = torch.tensor([1, 2])
        for flag in ("scale_grad_by_freq", "sparse"):
            with pytest.raises(RuntimeError, match=f'flag on "{flag}" not supported!'):
                F.embedding(ids, table, **{flag: True})
        with pytest.raises(ValueError, match='"max_norm" must be larger than zero!'):
            F.embedding_bag(ids, table, torch.tensor([0]), max_norm=-1.0)
        with pytest.raises(ValueError, match="Padding_idx must be within num_embeddings"):
            F.embedding(ids, table, padding_idx=5)
        with pytest.raises(ValueError, match="Weight needs to have exactly 2 dims"):
            F.embedding(ids, cut(numbers((4, 2, 2)), sharded.chunk(0, 4)))
        with pytest.raises(NoShardedOp):
            F.embedding(sharded.zeros(sharded.chunk(0, 4), 4, dtype=torch.int64), table)

    fcoll.simulate_ranks(check, 4)


def test_a_sharded_input_keeps_its_rows():
    """Rows times a plain or a sharded matrix, and batches that lie together."""

    def check(rank):
        rows, matrix = sharded.chunk(0, [3, 1, 0]), numbers((4, 6), seed=1)
        x = numbers((7, 4))
        for weight in (matrix.t().contiguous(), cut(matrix.t().contiguous(), sharded.chunk(1, 4))):
            made = F.linear(cut(x, rows), weight, torch.ones(6))
            check_same(made, x @ matrix + 1)
            assert made.sharding_spec() == rows
        check_same(cut(x, rows) @ matrix, x @ matrix)
        batches = cut(numbers((7, 2, 3)), rows), cut(numbers((7, 3, 5)), rows)
        check_same(torch.bmm(*batches), torch.bmm(numbers((7, 2, 3)), numbers((7, 3, 5))))
        with pytest.raises(LayoutsDiffer, match="same placements for bmm"):
            torch.bmm(batches[0], cut(numbers((7, 3, 5)), sharded.chunk(0, 4)))
        with pytest.raises(NotImplementedError, match=r"cut along .1.*reshard"):
            cut(x, sharded.chunk(1, 4)) @ matrix

    fcoll.simulate_ranks(check, 4)


def test_training_a_sharded_table_is_training_the_plain_one():
    """Three steps of SGD on a module whose weight is sharded; ranks have batches of their own."""

    def check(rank):
        plain = torch.nn.EmbeddingBag.from_pretrained(numbers((6, 4)), freeze=False, mode="sum")
        module = torch.nn.EmbeddingBag(6, 4, mode="sum", _weight=numbers((6, 4)))
        del module.weight
        module.weight = table = cut(numbers((6, 4)), sharded.grid((2, 2), 4), requires_grad=True)
        tensors = [shard.tensor for shard in table.local_shards()]
        optimizers = [torch.optim.SGD(tensors, 0.01), torch.optim.SGD(plain.parameters(), 0.01)]
        for step in range(3):
            ids = own(10 * step + rank, 3, 2, of=6)
            for model, optimizer in zip((module, plain), optimizers, strict=True):
                optimizer.zero_grad()
                model(ids).square().sum().backward()
                if model is plain:
                    dist.all_reduce(plain.weight.grad)
                optimizer.step()
        for shard in table.local_shards():
            torch.testing.assert_close(shard.tensor, block(plain.weight, shard))

    fcoll.simulate_ranks(check, 4)
