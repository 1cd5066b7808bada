"""Copies, devices and dtypes, comparing, and initialisers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import RANKS, sizes, specs
from plain import check_gradient, check_same, cut, numbers
from torch import nn

import fcoll
from fcoll import sharded
from fcoll.sharded import ShardedTensor
from fcoll.sharded.errors import BadMove, GroupsDiffer, LayoutsDiffer, NotBothSharded


@given(st.data())
@settings(max_examples=40)
def test_copies_are_the_plain_ones(data):
    size = data.draw(sizes())
    spec = data.draw(specs(size))

    def check(rank):
        whole = numbers(size)
        tensor = cut(whole, spec, requires_grad=True)
        assert tensor.requires_grad and all(s.tensor.is_leaf for s in tensor.local_shards())
        cloned, detached = tensor.clone(), tensor.detach()
        check_same(cloned, whole)
        assert cloned.requires_grad and not detached.requires_grad
        assert cloned.sharding_spec() == detached.sharding_spec() == spec
        for mine, copy, shared in zip(
            tensor.local_shards(), cloned.local_shards(), detached.local_shards(), strict=True
        ):
            assert shared.tensor.data_ptr() == mine.tensor.data_ptr()
            assert not mine.tensor.numel() or copy.tensor.data_ptr() != mine.tensor.data_ptr()
        (cloned.to(torch.float64) * 2).sum().backward()
        check_gradient(tensor, torch.full(size, 2.0))
        detached.copy_(cut(whole + 1, spec))
        check_same(tensor, whole + 1)
        other = sharded.zeros(spec, size, dtype=torch.float64)
        check_same(other.copy_(detached), (whole + 1).double())
        assert isinstance(nn.Parameter(tensor), ShardedTensor)

    fcoll.simulate_ranks(check, RANKS)


def moves(rank):
    spec = sharded.chunk(0, [3, 0, 1])
    tensor = cut(numbers((7, 2)), spec)
    assert tensor.cpu() is tensor and tensor.to("cpu") is tensor
    assert tensor.to(torch.float32) is tensor.to(tensor.dtype, copy=False) is tensor
    assert tensor.float() is tensor and tensor.type_as(torch.ones(1)) is tensor
    copied = tensor.to(torch.float32, copy=True)
    assert copied is not tensor
    check_same(copied, numbers((7, 2)))
    for half in (tensor.half(), tensor.to("cpu", torch.float16), tensor.to(torch.zeros(1).half())):
        check_same(half, numbers((7, 2)).half())
    check_same(tensor.type_as(half), numbers((7, 2)).half())
    nowhere = tensor.to("meta")
    assert [str(p.device()) for p in nowhere.sharding_spec().placements] == ["meta"] * 3
    assert all(str(s.placement.device()) == "meta" for s in nowhere.metadata().shards_metadata)
    assert nowhere.is_meta or not nowhere.local_shards()
    assert nowhere.sharding_spec().dim == 0 and not tensor.is_meta and tensor.is_cpu
    group = dist.new_group([0, 1, 2, 3])
    assert tensor.to(torch.float64, process_group=group)._process_group is group
    for wrong in (lambda: tensor.to(3.5), lambda: tensor.to(size=3)):
        with pytest.raises(BadMove, match="wrong arguments"):
            wrong()
    with pytest.raises(RuntimeError, match=r"Only `torch.contiguous_format` or"):
        tensor.cpu(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match=r"Only support torch.preserve_format"):
        tensor.clone(memory_format=torch.channels_last)


def compares(rank):
    """torch.equal is of the metadata too, and the same answer on every rank."""
    rows, other = sharded.chunk(0, 4), sharded.chunk(0, [1, 0, 3, 2])
    a, b = cut(numbers((10, 3)), rows), cut(numbers((10, 3)), rows)
    assert torch.equal(a, b) and torch.allclose(a, b + 1e-7) and a.allclose(b, 0, 1e-6)
    torch.testing.assert_close(a, b)
    if rank == 2:
        b.local_tensor()[0, 0] += 1e-3
    assert not torch.equal(a, b) and not torch.allclose(a, b)
    assert torch.allclose(a, b, atol=0.01) and a.allclose(b, 0.0, 0.01)
    for different in (
        cut(numbers((10, 3)), other),
        cut(numbers((10, 3)), rows).requires_grad_(),
        a.double(),
        sharded.ones(rows, 10, 2),
    ):
        assert not torch.equal(a, different) and not torch.allclose(a, different)
    with pytest.raises(NotBothSharded, match=r"torch.equal need to be of type ShardedTensor"):
        torch.equal(a, numbers((10, 3)))
    group = dist.new_group([0, 1, 2, 3])
    with pytest.raises(GroupsDiffer, match="should use the same ProcessGroup"):
        torch.equal(a, sharded.ones(rows, 10, 3, process_group=group))
    with pytest.raises(LayoutsDiffer, match="ShardedTensor with same metadata"):
        a.copy_(cut(numbers((10, 3)), other))


def initializes(rank):
    """Each rank's shards get what nn.init gives a tensor of their size; fans are the whole's."""
    columns = sharded.chunk(1, 4)
    for spec, fill in (
        (sharded.chunk(0, 4), lambda x: nn.init.uniform_(x, 10, 20)),
        (columns, lambda x: nn.init.normal_(x, mean=10, std=5)),
        (columns, lambda x: nn.init.constant_(x, 3.5)),
        (columns, nn.init.zeros_),
        (sharded.chunk(0, 4), lambda x: nn.init.kaiming_uniform_(x, a=0, mode="fan_in")),
        (columns, lambda x: nn.init.kaiming_uniform_(x, mode="fan_out", nonlinearity="relu")),
        (columns, lambda x: nn.init.trunc_normal_(x, std=0.1) if x is None else x.fill_(2)),
    ):
        tensor = sharded.empty(spec, 8, 12, dtype=torch.float64, requires_grad=spec is columns)
        local = tensor.local_tensor().detach().clone()
        with torch.no_grad():
            torch.manual_seed(7 + rank)
            assert fill(tensor) is tensor
            torch.manual_seed(7 + rank)
            fill(local)
        assert torch.equal(tensor.local_tensor(), local)
    table = sharded.empty(columns, 400, 8)
    nn.init.kaiming_uniform_(table)  # a shard's own fan_in would be 2: a bound of 1.73
    bound = (2 * 3 / 8) ** 0.5 / 2**0.5 * 2**0.5
    assert 0.95 * bound < table.abs().max() <= bound
    nn.init.xavier_uniform_(table)
    bound = (6 / 408) ** 0.5
    assert 0.95 * bound < table.abs().max() <= bound
    with pytest.raises(ValueError, match="param: val shouldn't be None!"):
        nn.init.constant_(table, None)


@pytest.mark.parametrize("check", [moves, compares, initializes])
def test_on_simulated_ranks(check):
    fcoll.simulate_ranks(check, 4)


def all_of_it(rank):
    for check in (moves, compares, initializes):
        check(rank)


def test_on_real_ranks(ranks4):
    ranks4.run(all_of_it, timeout=120)


def test_a_rank_outside_the_group_has_nothing_to_compare():
    def check(rank):
        group = dist.new_group([0, 1])
        a, b = (sharded.full(sharded.chunk(0, 2), (4,), v, process_group=group) for v in (1.0, 2.0))
        assert torch.equal(a, b) == (rank >= 2)

    fcoll.simulate_ranks(check, 4)
