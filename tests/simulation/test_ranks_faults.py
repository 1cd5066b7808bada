"""Faults in a simulation, and all the orders in which messages may come."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll import faults
from fcoll.errors import BadOption, CollectiveTimeout, Deadlock, PeerDied, RankFailed


def tensor(value):
    return torch.tensor([float(value)])


# -- faults ---


def test_a_killed_rank_is_a_dead_peer_to_the_others():
    def fn(rank):
        seen = []
        for _ in range(3):
            y = tensor(1)
            try:
                dist.all_reduce(y)
                seen.append(y.item())
            except PeerDied as error:
                assert error.rank == 1
                seen.append("died")
        return seen

    kill = faults.Kill(rank=1, at=2)
    assert fcoll.simulate_ranks(fn, 3, faults=[kill]) == [
        [3.0, "died", "died"],
        kill,
        [3.0, "died", "died"],
    ]


def test_a_killed_rank_ends_messages():
    def fn(rank):
        if rank == 0:
            with pytest.raises(PeerDied, match='rank 1 of "world" died'):
                dist.recv(tensor(0), 1)
            with pytest.raises(PeerDied):
                dist.send(tensor(0), 1)
        else:
            dist.send(tensor(0), 0)

    fcoll.simulate_ranks(fn, 2, faults=[faults.Kill(1)])


def test_a_killed_rank_unwinds_quietly():
    unwound = []

    def fn(rank):
        try:
            dist.barrier()
        finally:
            unwound.append(rank)
            if rank == 1:
                dist.barrier()

    with pytest.raises(PeerDied, match=r"^rank 0: "):
        fcoll.simulate_ranks(fn, 2, faults=[faults.Kill(1)])
    assert sorted(unwound) == [0, 1]


def any_two(rank):
    if rank:
        dist.send(tensor(rank), 0)
        return None
    y = tensor(0)
    return [dist.recv(y) for _ in range(2)]


def test_a_late_rank_comes_last():
    assert fcoll.simulate_ranks(any_two, 3)[0] == [1, 2]
    late = [faults.Delay(1, seconds=5.0)]
    assert fcoll.simulate_ranks(any_two, 3, faults=late)[0] == [2, 1]


def test_a_rank_that_is_too_late_is_a_timeout():
    def fn(rank):
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        dist.barrier()
        with pytest.raises(
            CollectiveTimeout, match=r"waited 60 s in barrier.* for rank 2"
        ) as caught:
            dist.barrier()
        return caught.value.rank

    late = [faults.Delay(2, seconds=61.0, at=3)]
    assert fcoll.simulate_ranks(fn, 3, faults=late) == [2, 2, 2]
    with pytest.raises(RankFailed, match="DID NOT RAISE"):
        fcoll.simulate_ranks(fn, 3, faults=[faults.Delay(2, seconds=59.0, at=3)])


def test_a_lost_message_is_named():
    def fn(rank):
        if rank == 0:
            for _ in range(2):
                dist.send(tensor(0), 1)
        else:
            for _ in range(2):
                dist.recv(tensor(0), 0)

    with pytest.raises(Deadlock, match="message 2 from rank 0 to 1 was lost"):
        fcoll.simulate_ranks(fn, 2, faults=[faults.Drop(0, 1, at=2)])


def two_messages(rank):
    if rank == 0:
        works = [dist.isend(tensor(i), 1) for i in range(3)]
        for work in works:
            work.wait()
        return None
    found = []
    for _ in range(3):
        y = tensor(-1)
        dist.recv(y, 0)
        found.append(y.item())
    return found


def test_a_message_overtakes_another():
    assert fcoll.simulate_ranks(two_messages, 2)[1] == [0.0, 1.0, 2.0]
    overtaken = [faults.Reorder(0, 1, at=2)]
    assert fcoll.simulate_ranks(two_messages, 2, faults=overtaken)[1] == [0.0, 2.0, 1.0]
    # nothing overtakes the last
    assert fcoll.simulate_ranks(two_messages, 2, faults=[faults.Reorder(0, 1, at=3)])[1][2] == 2.0


def test_random_faults_are_those_of_the_seed():
    drawn = {faults.random(4, seed=seed, count=2) for seed in range(50)}
    assert len(drawn) > 40
    assert {type(f) for found in drawn for f in found} == set(faults.Fault.__args__)
    assert faults.random(4, seed=1, count=2) == faults.random(4, seed=1, count=2)
    for seed in range(20):  # whatever they are, the run ends
        with suppress(Deadlock, PeerDied):
            fcoll.simulate_ranks(any_two, 3, faults=faults.random(3, seed=seed, calls=2))


# -- exploration ---


def test_every_order_of_arrival_is_tried():
    def fn(rank):
        if rank:
            dist.send(tensor(rank), 0)
            return None
        return tuple(dist.recv(tensor(0)) for _ in range(3))

    explored = fcoll.explore(fn, 4)
    assert explored.complete and explored.runs == 6
    assert len({results[0] for results in explored.results.values()}) == 6


def test_a_receive_behind_one_from_any_rank_waits_its_turn():
    def fn(rank):
        if rank:
            dist.send(tensor(rank), 0)
            if rank == 1:
                dist.send(tensor(rank), 0)
            return None
        works = [dist.irecv(y := tensor(0)), dist.irecv(tensor(0), 1), dist.irecv(tensor(0))]
        for work in works:
            work.wait()
        return y.item()

    explored = fcoll.explore(fn, 3)
    assert {results[0] for results in explored.results.values()} == {1.0, 2.0}
    assert not explored.failures


def test_a_message_that_another_match_makes_possible_is_tried():
    """Rank 3's receive lets rank 2 go on and send to rank 0."""

    def fn(rank):
        if rank == 0:
            return dist.recv(tensor(0)), dist.recv(tensor(0))
        if rank == 1:
            dist.send(tensor(1), 0)
        if rank == 2:
            dist.send(tensor(2), 3)
            dist.send(tensor(2), 0)
        if rank == 3:
            dist.recv(tensor(0))
        return None

    explored = fcoll.explore(fn, 4)
    assert {results[0] for results in explored.results.values()} == {(1, 2), (2, 1)}


def wrong_if_rank_2_is_first(rank):
    """A bug that the usual order hides."""
    if rank:
        dist.send(tensor(rank), 0)
        return None
    y = tensor(0)
    first = dist.recv(y)
    if first == 2:
        dist.recv(y, 2)  # it was rank 2 that has been received
    else:
        dist.recv(y, 2)
    return first


def test_the_schedule_that_fails_is_given_and_repeats():
    assert fcoll.simulate_ranks(wrong_if_rank_2_is_first, 3)[0] == 1
    with pytest.raises(Deadlock) as caught:
        fcoll.explore(wrong_if_rank_2_is_first, 3)
    schedule = caught.value.schedule
    assert f"schedule={schedule}" in caught.value.__notes__[0]
    with pytest.raises(Deadlock):
        fcoll.simulate_ranks(wrong_if_rank_2_is_first, 3, schedule=schedule)
    explored = fcoll.explore(wrong_if_rank_2_is_first, 3, keep_going=True)
    assert [f.schedule for f in explored.failures] == [schedule]
    assert str(explored).startswith("all 2 schedules run, 1 failed")


def test_a_handle_may_not_be_complete_yet():
    def fn(rank):
        work = dist.all_reduce(tensor(1), async_op=True)
        found = work.is_completed()
        work.wait()
        return found

    seen = {results[1] for results in fcoll.explore(fn, 2).results.values()}
    assert seen == {True, False}


def test_who_comes_first_to_a_store():
    def fn(rank):
        return dist.distributed_c10d._get_default_store().add("count", 1)

    seen = {tuple(results) for results in fcoll.explore(fn, 2).results.values()}
    assert seen == {(1, 2), (2, 1)}


def test_a_limit_of_runs():
    explored = fcoll.explore(any_two, 3, max_runs=1)
    assert explored.runs == 1 and not explored.complete


def test_a_schedule_of_another_program_is_an_error():
    with pytest.raises(BadOption, match="has the program changed"):
        fcoll.simulate_ranks(any_two, 3, schedule=(7,))
