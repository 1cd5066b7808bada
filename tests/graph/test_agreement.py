"""Ranks that compare what they are about to issue: the error, the retry, who does not come."""

from __future__ import annotations

import contextlib
import datetime
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import launch

import fcoll
from fcoll import _torch
from fcoll.errors import CollectiveTimeout, OtherGraph, PeerDied, PlanMismatch
from fcoll.graph.call_agreement import calls_by_group, compare, compared, turn_away
from fcoll.groups import Group, by_name, lobby_of, resolve


def calls(
    ops: list[str], shape: tuple[int, ...] = (4,), how: str = "", reduce=fcoll.all_reduce
) -> list:
    """As a graph of some all-reduces has them."""

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [reduce(x, op) for op in ops]

    found = fcoll.trace(f, torch.ones(shape)).collectives
    ((_, listed),) = calls_by_group(found, {c.start: how for c in found}).items()
    return listed


def torchs_all_reduce(x: torch.Tensor, op: str) -> torch.Tensor:
    return torch.ops._c10d_functional.all_reduce(x, op, dist.group.WORLD.group_name)


def new_group(seconds: float = 60) -> Group:
    """One that has agreed on nothing yet."""
    made = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    return by_name(made.group_name)


def mismatch(rank: int, mine: list, settings: list[str]) -> None:
    compare(new_group(), mine[rank], settings[rank])


def of_ranks(pool, mine: list, settings: list[str] | None = None) -> list:
    return pool.run_expecting(mismatch, mine, settings or [""] * pool.world_size)


@pytest.fixture(scope="module")
def lists() -> dict[str, list]:
    with fcoll.fake_world(tp=2):
        return {
            "sum max": calls(["sum", "max"]),
            "sum min": calls(["sum", "min"]),
            "sum": calls(["sum"]),
            "larger": calls(["sum", "max"], (8,)),
            "in place": calls(["sum", "max"], how="read in place"),
            "identity": calls(["sum", "max"], reduce=partial(fcoll.all_reduce, grad="identity")),
            "torch's": calls(["sum", "max"], reduce=torchs_all_reduce),
        }


def test_the_same_calls_agree(ranks2, lists):
    assert of_ranks(ranks2, [lists["sum max"]] * 2) == [None, None]


def test_torchs_op_agrees_with_grad_as_it_is_by_default(ranks2, lists):
    assert of_ranks(ranks2, [lists["sum max"], lists["torch's"]]) == [None, None]
    for error in of_ranks(ranks2, [lists["identity"], lists["torch's"]]):
        assert isinstance(error, PlanMismatch)


@pytest.mark.parametrize(
    ("other", "step", "said"),
    [
        ("sum min", 1, "all_reduce(min)"),
        ("sum", 1, "makes no more calls"),
        ("larger", 0, "(8,)"),
        ("in place", 0, "all_reduce(sum)"),
        ("identity", 0, "all_reduce(sum, grad=identity)"),
    ],
)
def test_the_first_difference_is_named_on_every_rank(ranks2, lists, other, step, said):
    errors = of_ranks(ranks2, [lists["sum max"], lists[other]])
    for error in errors:
        assert isinstance(error, PlanMismatch)
        assert (error.step, error.ranks) == (step, (1,))
        assert f"number {step + 1} is\n  rank" in str(error) and said in str(error)
        assert "test_agreement.py" in str(error) and "look for a branch" in str(error)


def test_other_settings_are_said(ranks2, lists):
    for error in of_ranks(ranks2, [lists["sum"], lists["sum min"]], ["h100", "a100"]):
        assert "Their settings differ" in str(error)


def test_four_ranks_of_which_two_differ(ranks4, lists):
    a, b = lists["sum max"], lists["sum min"]
    for error in of_ranks(ranks4, [a, b, a, b]):
        assert error.ranks == (1, 3)
        assert "ranks 0, 2: all_reduce(max)" in str(error)
        assert "ranks 1, 3: all_reduce(min)" in str(error)


def again(rank: int, right: list, wrong: list) -> None:
    g = new_group()
    with pytest.raises(PlanMismatch):
        compare(g, wrong if rank else right)
    compare(g, right)
    if rank == 0:  # a rank that compiles once more need not find the others there
        compare(g, right)
    assert fcoll.all_reduce(torch.ones(1)) == dist.get_world_size()


def test_a_retry_and_a_second_time(ranks2, lists):
    ranks2.run(again, lists["sum max"], lists["sum min"])


def with_unknown_sizes(rank: int, known: list) -> None:
    ((kind, dtypes, _, args, how), text) = known[0]
    mine = [((kind, dtypes, [["?"]], args, how), text)] if rank else known[:1]
    compare(new_group(), mine)


def test_a_size_that_only_a_run_knows_fits_any(ranks2, lists):
    ranks2.run(with_unknown_sizes, lists["sum"])


def one_does_not_come(rank: int, mine: list) -> str:
    g = new_group(seconds=2)
    if rank:
        dist.barrier()  # the other one has given up
    with pytest.raises(CollectiveTimeout) as caught:
        compare(g, mine)
    if not rank:
        dist.barrier()
    compare(g, mine)  # both are here now
    return str(caught.value)


def test_a_rank_that_comes_late(ranks2, lists):
    for message in ranks2.run(one_does_not_come, lists["sum"]):
        assert "rank 0 waited 2 s for rank 1 to compare what it is about to issue" in message


def others_are_past(rank: int, old: list, new: list) -> str:
    """Rank 0 comes with a new list; the others run the agreed one once more, and say so."""
    g = new_group()
    compare(g, old)
    compared(g).begun += 1
    if rank:
        _until_waited_for(g)
        assert turn_away(g, "the first one") == ""  # on its way: it has begun no more than rank 0
        compared(g).begun += 1
        said = turn_away(g, "the old one, at model.py:3")
    else:
        with pytest.raises(OtherGraph) as caught:
            compare(g, new)
        assert caught.value.rank > 0
        said = str(caught.value)
    dist.barrier()
    with pytest.raises(OtherGraph) if rank else contextlib.nullcontext():
        compare(g, new if rank else old)  # a rank that comes late reads what was said
    compare(g, new)  # from here on they are together again
    return said


def _until_waited_for(g: Group) -> None:
    lobby = lobby_of(g, _torch.group_store(g.pg), "/compare/2")
    while 0 not in lobby.present():
        pass


def test_ranks_that_run_another_list_say_so(ranks4, lists):
    for said in ranks4.run(others_are_past, lists["sum max"], lists["larger"]):
        assert "runs the old one, at model.py:3" in said
        assert "rank 0 has a new graph, which begins with all_reduce(sum)" in said
        assert "test_agreement.py" in said


def one_dies(rank: int, mine: list) -> str:
    fcoll.all_reduce(torch.ones(1))  # the ranks know one another's processes
    if rank == 1:
        os._exit(3)
    with pytest.raises((PeerDied, CollectiveTimeout)) as caught:
        compare(resolve(None), mine)
    return type(caught.value).__name__


def test_a_rank_that_died(lists):
    done = launch(one_dies, 2, lists["sum"], timeout=120)
    assert done.results[0] == "PeerDied", done.errors


def test_nothing_to_compare(lists):
    with fcoll.fake_world(tp=2):
        compare(resolve(None), lists["sum"])  # a fake group moves no bytes


def plans(rank: int, wrong: bool) -> None:
    group = new_group().name

    def f(x: torch.Tensor) -> torch.Tensor:
        first, second = ("max", "sum") if wrong and rank else ("sum", "max")
        return fcoll.all_reduce(x, first, group) + fcoll.all_reduce(x @ x, second, group)

    plan = fcoll.schedule(fcoll.trace(f, torch.ones(4, 4)), machine="cpu", scheduler="original")
    plan.compare()
    plan.compare(group)


def test_plans_compare_themselves(ranks2):
    assert ranks2.run_expecting(plans, False) == [None, None]
    for error in ranks2.run_expecting(plans, True):
        assert isinstance(error, PlanMismatch) and error.step == 0
