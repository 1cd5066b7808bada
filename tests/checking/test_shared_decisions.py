"""Decisions by values that a collective over all ranks has made equal: all ranks take the same way,
and each way is proved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll.errors import CollectiveMismatch, DataDependent


def total(x):
    return fcoll.all_reduce(x.sum(), "sum")


def a_loss(x, mesh):
    loss = total(x)
    if (loss / 2).item() * 3 > 1.5:
        loss = fcoll.all_reduce(loss * 2, "sum")
    return loss


def in_place_flag(x, mesh):
    bad = torch.isinf(x).any().float()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return x if bad else fcoll.all_reduce(x, "sum")


def broadcast_count(x, mesh):
    n = torch.full((1,), 3)
    dist.broadcast(n, 0)
    return fcoll.all_reduce(x, "sum") if n.item() > 2 else x


def gathered(x, mesh):
    losses = fcoll.all_gather_into_tensor(x[:1])
    return fcoll.all_reduce(x, "sum") if (losses.max() > 3).item() else x


def two(x, mesh):
    x = fcoll.all_reduce(x, "sum") if total(x).item() > 1 else x
    return fcoll.all_reduce(x, "max") if total(x).item() > 2 else x


FOLLOWED = a_loss, in_place_flag, broadcast_count, gathered, two


def built(program):
    return lambda mesh: ((lambda x: program(x, mesh)), (torch.ones(4),))


@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 32}], ids=str)
@pytest.mark.parametrize("program", FOLLOWED, ids=lambda p: p.__name__)
def test_both_ways_are_proved(program, axes):
    found = fcoll.check(built(program), axes)
    assert found.ok and found.all_ranks
    assert "decides by a value that all ranks share: proved for both ways" in str(found)
    assert "not followed" not in str(found)


@pytest.mark.parametrize("until", [False, True])
def test_a_loop_is_followed_for_some_rounds_and_it_is_said(until):
    def program(x, mesh):
        x = total(x)
        while not (x.item() < 0) if until else x.item() > 0:
            x = fcoll.all_reduce(x, "sum")
        return x

    found = fcoll.check(built(program), {"dp": 2})
    assert found.ok and "not followed: runs with more than 4 such decisions" in str(found)


def only_one_rank_decides(x, mesh):
    loss = total(x)
    return fcoll.all_reduce(x, "sum") if dist.get_rank() == 1 and loss.item() > 3 else loss


def by_another_number_on_each_rank(x, mesh):
    loss = total(x)
    return fcoll.all_reduce(x, "sum") if loss.item() > dist.get_rank() else loss


@pytest.mark.parametrize(
    "program", [only_one_rank_decides, by_another_number_on_each_rank], ids=lambda p: p.__name__
)
def test_a_mismatch_on_one_of_the_ways_is_found(program):
    with pytest.raises(CollectiveMismatch) as caught:
        fcoll.check(built(program), {"dp": 2})
    assert "which ranks share, is True" in str(caught.value.__notes__)


def its_own(x, mesh):
    return fcoll.all_reduce(x, "sum") if x.sum().item() > 3 else x


def of_a_part_of_the_ranks(x, mesh):
    loss = fcoll.all_reduce(x.sum(), "sum", mesh["dp"])
    return fcoll.all_reduce(x, "sum", mesh["tp"]) if loss.item() > 3 else x


def written_through_a_view(x, mesh):
    flag = fcoll.all_reduce(torch.ones(1), "sum").clone()
    flag.view(-1).add_(x[:1])
    return fcoll.all_reduce(x, "sum") if flag.item() > 3 else x


def with_random_numbers(x, mesh):
    loss = total(x) + torch.rand(())
    return fcoll.all_reduce(x, "sum") if loss.item() > 3 else x


@pytest.mark.parametrize(
    "program",
    [its_own, of_a_part_of_the_ranks, written_through_a_view, with_random_numbers],
    ids=lambda p: p.__name__,
)
def test_what_may_differ_is_not_taken_to_be_equal(program):
    with pytest.raises(DataDependent):
        fcoll.check(built(program), {"dp": 2, "tp": 2})


def test_a_trace_says_that_check_follows_both():
    with fcoll.fake_world(dp=2), pytest.raises(DataDependent, match=r"fcoll\.check follows both"):
        fcoll.trace(a_loss, torch.ones(4), None)
