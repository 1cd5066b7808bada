"""Groups that ranks make in different orders: reported on simulated ranks and by fcoll.check, where
four real processes on gloo hang or get the wrong values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, launch
from torch.distributed.device_mesh import init_device_mesh

import fcoll
from fcoll.errors import CheckMismatch, CollectiveMismatch, GroupMismatch


def total(groups):
    """The sum of ranks over the first group that this rank is in."""
    mine = [g for g in groups if g not in (None, dist.GroupMember.NON_GROUP_MEMBER)]
    x = torch.tensor([float(dist.get_rank())])
    if mine:
        dist.all_reduce(x, group=mine[0])
    return x


def made(*lists, local=False):
    return [dist.new_group(x, use_local_synchronization=local) for x in lists]


def halves_swapped_on_some_ranks(rank):
    return total(made([0, 1], [2, 3]) if rank < 2 else made([2, 3], [0, 1]))


def only_the_own_half(rank):
    return total(made([0, 1] if rank < 2 else [2, 3]))


def one_that_others_do_not_make(rank):
    return total([*(made([0, 1]) if rank < 2 else ()), *made([0, 1, 2, 3])][-1:])


def a_large_one_first(rank):
    return total(made([0, 1, 2, 3], [0, 1]) if rank < 2 else made([0, 1], [0, 1, 2, 3]))


def members_only_in_a_circle(rank):
    lists = {0: ([0, 1], [0, 2]), 1: ([1, 2], [0, 1]), 2: ([0, 2], [1, 2]), 3: ()}[rank]
    return total(made(*lists, local=True))


def pairs_after_another(rank):
    if rank < 2:
        pairs, _ = dist.new_subgroups(2)
        return total([pairs, *made([0, 2])])
    return total([*made([0, 2]), dist.new_subgroups(2)[0]])


def members_only(rank):
    return total(made([0, 1] if rank < 2 else [2, 3], local=True))


def of_one_rank_each(rank):
    return total(made([rank]))


def of_one_rank_where_others_make_one_of_three(rank):  # it runs now and then
    return total(made([0] if rank == 0 else [1, 2, 3]))


def swapped_where_in_neither(rank):
    return total((made([0, 1], [1, 2]) if rank < 3 else made([1, 2], [0, 1]))[:1])


WRONG = (
    *(halves_swapped_on_some_ranks, only_the_own_half, one_that_others_do_not_make),
    *(a_large_one_first, members_only_in_a_circle, pairs_after_another),
    of_one_rank_where_others_make_one_of_three,
)
RIGHT = members_only, of_one_rank_each, swapped_where_in_neither


def in_turn(rank, programs):
    return [program(rank).item() for program in programs]


@pytest.mark.timeout(90)
def test_what_real_ranks_run_simulated_ones_do(ranks4):
    assert ranks4.run(in_turn, RIGHT) == fcoll.simulate_ranks(lambda r: in_turn(r, RIGHT), 4)


@pytest.mark.timeout(90)
def test_real_ranks_do_not_run_it():
    """The group of four has another name on ranks 0 and 1, which wait for the others' addresses."""
    with pytest.raises(RankError):
        launch(in_turn, 4, [one_that_others_do_not_make], timeout=5)


@pytest.mark.parametrize("program", WRONG, ids=lambda p: p.__name__)
def test_simulated_ranks_report_it(program):
    with pytest.raises(CollectiveMismatch) as caught:
        fcoll.simulate_ranks(program, 4)
    assert "test_simulated_groups.py:" in str(caught.value)


@pytest.mark.parametrize("where", ["build", "step"])
@pytest.mark.parametrize("program", WRONG, ids=lambda p: p.__name__)
def test_check_reports_it(program, where):
    with pytest.raises(GroupMismatch) as caught:
        fcoll.check(_built(program, where), {"dp": 4})
    assert len(caught.value.ranks) == 2 and "test_simulated_groups.py:" in str(caught.value)


@pytest.mark.parametrize("where", ["build", "step"])
@pytest.mark.parametrize("program", RIGHT, ids=lambda p: p.__name__)
def test_check_proves_what_runs(program, where):
    assert fcoll.check(_built(program, where), {"dp": 4}).ok


def _built(program, where):
    def build(mesh):
        rank = dist.get_rank()
        if where == "build":
            program(rank)
            return (lambda x: x), (torch.ones(1),)
        return (lambda x: x + program(rank)), (torch.ones(1),)

    return build


def test_of_many_ranks_the_one_that_makes_groups_in_another_order_is_named():
    def build(mesh):
        lists = [[0, 1], [20, 21]]
        for ranks in lists[::-1] if dist.get_rank() == 21 else lists:
            dist.new_group(ranks)
        return (lambda x: fcoll.all_reduce(x, "sum", mesh)), (torch.ones(1),)

    with pytest.raises(GroupMismatch) as caught:
        fcoll.check(build, {"dp": 32})
    assert 21 in caught.value.ranks


def test_meshes_made_in_another_order_and_worlds_made_again():
    def meshes(rank):
        shapes = [(2, 2), (4,)] if rank != 3 else [(4,), (2, 2)]
        for shape in shapes:
            init_device_mesh("cpu", shape)

    fcoll.simulate_ranks(meshes, 4)  # one over all ranks is the world's own group
    with pytest.raises(CheckMismatch):
        fcoll.simulate_ranks(lambda rank: init_device_mesh("cpu", (2, 2) if rank else (4, 1)), 4)

    def again(rank):
        for ranks in ([0, 1], [1, 2]):
            dist.init_process_group("gloo")
            dist.new_group(ranks)
            dist.destroy_process_group()

    fcoll.simulate_ranks(again, 3)
