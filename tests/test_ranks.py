"""The harness itself: what ranks return, raise and get stuck in reaches the test."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from rank_worker import Unpicklable
from ranks import RankError, RankPool, launch


def scaled(rank, factor):
    return rank * factor


def world_sum(rank):
    x = torch.tensor([1.0, rank])
    dist.all_reduce(x)
    return x


def process_id(rank):
    return os.getpid()


def raises_on(rank, ranks, error):
    if rank in ranks:
        print(f"rank {rank} is about to raise")
        raise error


def raises_and_leaves_peers_waiting(rank):
    raises_on(rank, [0], ValueError("no sum from me"))
    return world_sum(rank)


def raises_in_a_broken_world(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError("out of step")


class WithLock(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def raises_with_lock(rank):
    raise WithLock


def returns_lock(rank):
    return threading.Lock()


def stuck_on(rank, stuck):
    if rank == stuck:
        waits_for_ever()


def waits_for_ever():
    threading.Event().wait()


def killed_on(rank, killed):
    if rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)


def test_values_come_back_in_rank_order(ranks):
    assert ranks.run(scaled, 10) == [10 * rank for rank in range(ranks.world_size)]


def test_ranks_share_a_world(ranks):
    n = ranks.world_size
    for x in ranks.run(world_sum):
        assert x.tolist() == [n, n * (n - 1) / 2]


def test_processes_are_kept(ranks2):
    assert ranks2.run(process_id) == ranks2.run(process_id)


def test_an_exception_is_reported_with_its_traceback(ranks2):
    with pytest.raises(RankError) as caught:
        ranks2.run(raises_on, [1], KeyError("which"))
    message = str(caught.value)
    assert message.startswith("1 of 2 ranks failed in test_ranks.raises_on")
    assert "rank 1 raised\nTraceback" in message
    assert "in raises_on\n    raise error\nKeyError: 'which'" in message
    assert "rank 1 is about to raise" in message
    assert isinstance(caught.value.errors[1], KeyError) and list(caught.value.errors) == [1]
    assert ranks2.run(world_sum)[0].tolist() == [2, 1]


def test_same_exception_on_all_ranks_is_told_once(ranks2):
    before = ranks2.run(process_id)
    with pytest.raises(RankError, match="rank 0, 1 raised") as caught:
        ranks2.run(raises_with_lock)
    assert str(caught.value).count("WithLock: holds a lock") == 1
    assert isinstance(caught.value.errors[0], Unpicklable)
    assert ranks2.run(process_id) == before  # all failed alike, so the world is intact


def test_peers_of_a_failed_rank_are_not_waited_for(ranks2):
    ranks2.run(process_id)  # starting the processes is not what is timed
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks2.run(raises_and_leaves_peers_waiting)
    assert time.monotonic() - start < 20  # gloo's own timeout is 30 s
    assert isinstance(caught.value.errors[0], ValueError)
    assert isinstance(caught.value.errors[1], TimeoutError)
    assert "in world_sum" in str(caught.value)
    assert ranks2.run(world_sum)[0].tolist() == [2, 1]


def test_ranks_out_of_step_are_replaced(ranks2):
    errors = ranks2.run_expecting(raises_in_a_broken_world)
    assert [str(error) for error in errors] == ["out of step"] * 2
    assert ranks2.run(world_sum)[0].tolist() == [2, 1]


def test_run_expecting_gives_each_rank_its_exception_or_none(ranks2):
    before = ranks2.run(process_id)
    none, error = ranks2.run_expecting(raises_on, [1], ValueError("me"))
    assert none is None
    assert isinstance(error, ValueError) and str(error) == "me"
    assert not set(before) & set(ranks2.run(process_id))  # ranks that part ways are replaced


def test_a_result_that_cannot_be_pickled_is_an_error(ranks2):
    with pytest.raises(RankError, match=r"cannot pickle '_thread\.lock' object"):
        ranks2.run(returns_lock)


def test_a_stuck_rank_is_reported_with_its_stack(ranks2):
    ranks2.run(process_id)  # starting the processes is not what is timed
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0 did not answer in time") as caught:
        ranks2.run(stuck_on, 0, timeout=1)
    assert time.monotonic() - start < 10
    assert "in waits_for_ever" in str(caught.value)
    assert "in stuck_on" in str(caught.value)
    assert list(caught.value.errors) == [0]
    assert isinstance(caught.value.errors[0], TimeoutError)
    assert ranks2.run(world_sum)[0].tolist() == [2, 1]


def test_a_killed_rank_is_reported(ranks2):
    with pytest.raises(RankError, match=r"rank 1 died \(SIGKILL\)") as caught:
        ranks2.run(killed_on, 1)
    assert isinstance(caught.value.errors[1], ChildProcessError)
    assert ranks2.run(world_sum)[0].tolist() == [2, 1]


def warns(rank):
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_ranks_have_the_warning_filters_of_the_test(ranks2):
    assert [str(error) for error in ranks2.run_expecting(warns)] == ["careful"] * 2
    with warnings.catch_warnings(action="ignore"):
        ranks2.run(warns)


def random_number(rank):
    return torch.rand(()).item()


def test_random_numbers_do_not_depend_on_earlier_functions(ranks2):
    first = ranks2.run(random_number)
    assert ranks2.run(random_number) == first
    assert first[0] != first[1]


def subgroup(rank):
    dist.new_group([0, 1])
    return len(os.listdir("/proc/self/fd"))


def test_groups_end_with_the_function_that_made_them(ranks2):
    assert ranks2.run(subgroup) == ranks2.run(subgroup)


def leaves_the_world(rank):
    dist.destroy_process_group()


def test_the_world_of_a_pool_is_not_for_functions_to_destroy(ranks2):
    with pytest.raises(RankError, match="replaced the pool's process group"):
        ranks2.run(leaves_the_world)
    assert ranks2.run(world_sum)[0].tolist() == [2, 1]


def test_a_closed_pool_leaves_no_process():
    pool = RankPool(1)
    (pid,) = pool.run(process_id)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def ends_differently(rank, word):
    if rank == 0:
        print(os.environ["WORD"], file=sys.stderr)
        return [rank, word]
    if rank == 1:
        raise ValueError(word)
    os.kill(os.getpid(), signal.SIGKILL)


def test_launch_reports_how_each_process_ended():
    # without a process group: gloo may abort at exit when peers have died
    seen = launch(ends_differently, 3, "no", env={"WORD": "hello"}, init=False)
    assert seen.results == [[0, "no"], None, None]
    assert seen.exitcodes == [0, 1, -signal.SIGKILL]
    assert isinstance(seen.errors[1], ValueError) and seen.errors[::2] == [None, None]
    assert seen.stderr[0] == "hello\n" and seen.stderr[1].endswith("ValueError: no\n")
    assert seen.stdout == ["", "", ""]


def joins_by_itself(rank):
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    x = world_sum(rank)
    dist.destroy_process_group()
    return x.tolist()


def test_launch_leaves_joining_to_the_function():
    seen = launch(joins_by_itself, 2, init=False)
    assert seen.results == [[2, 1], [2, 1]]
    assert seen.exitcodes == [0, 0] and seen.stderr == ["", ""]


def test_launch_reports_a_stuck_rank():
    with pytest.raises(RankError, match="rank 1 did not answer in time") as caught:
        launch(stuck_on, 2, 1, timeout=5)  # enough to get there on a busy machine
    assert "in waits_for_ever" in str(caught.value)


def test_solo_is_a_world_of_one(solo):
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert world_sum(0).tolist() == [1, 0]


def test_no_process_group_is_left_by_the_test_before():
    assert not dist.is_initialized()
