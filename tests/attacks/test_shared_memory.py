"""Programs that once hung, leaked or got wrong numbers on shared memory, as people write them."""

from __future__ import annotations

import gc
import os
import re
import resource
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import launch

import fcoll
from fcoll.errors import CollectiveMismatch, GroupClosed, PeerDied

ON_SHARED_MEMORY = {"FCOLL_NATIVE": "1"}


def new_group(seconds: float = 30) -> dist.ProcessGroup:
    return dist.new_group(timeout=timedelta(seconds=seconds))


# -- splits ---


def splits_disagree(rank, sent, expected):
    g = new_group()
    fcoll.all_reduce(torch.ones(1), group=g)
    n = dist.get_world_size()
    rows, columns = [1] * n, [1] * n
    if rank == 0:
        rows[1] = sent
    if rank == 1:
        columns[0] = expected
    fcoll.all_to_all_single(torch.ones(sum(rows), 2), g, columns, rows)


@pytest.mark.parametrize("sent, expected", [(2, 1), (1, 2), (0, 1), (3, 2)])
def test_splits_that_disagree_in_one_direction_raise_on_all(shared2, sent, expected):
    errors = shared2.run_expecting(splits_disagree, sent, expected)
    assert all(isinstance(e, CollectiveMismatch) for e in errors), errors


def test_splits_that_two_of_four_disagree_on_raise_on_all(shared4):
    errors = shared4.run_expecting(splits_disagree, 2, 1)
    assert all(isinstance(e, CollectiveMismatch) for e in errors), errors
    assert all("rank 0 sends 16 bytes to rank 1" in str(e) for e in errors), errors


# -- a process that becomes another program ---


def becomes_another_program(rank):
    pids = fcoll.all_gather_into_tensor(torch.tensor([os.getpid()])).tolist()
    if rank == 1:
        os.execvp("sleep", ["sleep", "10"])
    with pytest.raises(PeerDied, match="rank 1"):
        fcoll.all_reduce(torch.ones(1)).sum()
    return Path(f"/proc/{pids[1]}/stat").read_text().split()[1:3]


def test_a_peer_that_calls_exec_is_noticed():
    seen = launch(becomes_another_program, 2, timeout=60, env=ON_SHARED_MEMORY)
    program, state = seen.results[0]
    assert program == "(sleep)" and state in "SRD", seen.stderr  # while it still runs


# -- results that nobody waits for ---


def only_one_rank_looks(rank, steps):
    def step():
        total = fcoll.all_reduce(torch.ones(1000))
        return total.sum().item() if rank == 0 else None

    for _ in range(steps // 4):
        step()
    gc.collect()
    registered = torch._C._distributed_c10d._get_work_registry_size
    known = registered()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(steps):
        step()
    fcoll.barrier()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return grown_kib, registered() - known


def test_results_that_one_rank_does_not_use_are_let_go_of(shared2):
    for grown_kib, registered in shared2.run(only_one_rank_looks, 4000):
        assert grown_kib < 4000  # 4,000 results of 4 kB are 16 MB
        assert registered <= 0


def the_group_goes_with_results_under_way(rank):
    g = new_group(20)
    fcoll.all_reduce(torch.ones(1), group=g)
    dist.barrier()
    if rank == 1:
        kept = fcoll.all_reduce(torch.ones(1), group=g)
        dist.destroy_process_group(g)
        del g
        gc.collect()
        dist.barrier()
        return kept is not None
    dist.barrier()
    fcoll.all_reduce(torch.ones(1), group=g).sum()  # its peer published this one before it left
    with pytest.raises(PeerDied, match="left the group"):
        fcoll.all_reduce(torch.ones(1), group=g).sum()


def test_a_group_with_results_under_way_is_left_at_once(shared2):
    shared2.run(the_group_goes_with_results_under_way, timeout=15)


def dropped_without_a_wait(rank):
    fcoll.all_reduce(torch.ones(4)).sum()
    if rank == 1:  # a rank whose peer has published already has its result at once
        dist.barrier()
    for _ in range(3):
        fcoll.all_reduce(torch.ones(4))
    if rank == 0:
        dist.barrier()
    dist.barrier()


def test_dropped_results_are_counted_by_line():
    seen = launch(dropped_without_a_wait, 2, timeout=60, env=ON_SHARED_MEMORY)
    assert "3 collectives were issued and never waited for" in seen.stderr[0], seen.stderr
    assert re.search(r"test_shared_memory.py:\d+ \(x3\)", seen.stderr[0]), seen.stderr


# -- threads ---


def two_threads_make_the_first_call(rank):
    g, h = new_group(20), new_group(20)
    outs = {}

    def use(name, group):
        outs[name] = fcoll.all_reduce(torch.full((4,), rank + 1.0), group=group).tolist()

    for groups in ([("a", g), ("b", h)], [("c", g)]):
        threads = [threading.Thread(target=use, args=(name, group)) for name, group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # both threads find out at once how the group's bytes travel
    k = new_group(20)
    barrier = threading.Barrier(2)

    def first(name):
        barrier.wait()
        outs[name] = fcoll.symm_mem.status(k).shared

    threads = [threading.Thread(target=first, args=(name,)) for name in "de"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outs["f"] = fcoll.all_reduce(torch.full((4,), rank + 1.0), group=k).tolist()
    return outs


def test_two_threads_that_make_a_groups_first_call_connect_it_once(shared2):
    for outs in shared2.run(two_threads_make_the_first_call, timeout=50):
        assert all(outs[name] == [3.0] * 4 for name in "abcf")
        assert outs["d"] and outs["e"]


# -- memory that cannot be had ---


def without_memory(rank):
    """Its files, and so its shared memory, may not be as large as a ring."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    g = new_group(20)
    total = fcoll.all_reduce(torch.ones(4), group=g).tolist()
    return total, str(fcoll.symm_mem.status(g))


def test_a_ring_that_no_memory_is_left_for_falls_back():
    seen = launch(without_memory, 2, timeout=60, env=ON_SHARED_MEMORY)
    assert seen.errors == [None, None], seen.stderr
    for total, status in seen.results:
        assert total == [2.0] * 4
        assert "process group" in status


# -- round trips ---


def round_trips(rank):
    from fcoll.groups import resolve
    from fcoll.transport import shared_memory

    fcoll.barrier()
    handle = shared_memory.handle_of(resolve(None))
    times = {}
    for a in range(4):
        for b in range(a + 1, 4):
            if rank in (a, b):
                peer = b if rank == a else a
                times[peer] = torch.ops.fcoll_native.round_trip_ns(peer, handle)
    fcoll.barrier()
    return times


def test_round_trips_with_every_peer(shared4):
    assert all(len(times) == 3 for times in shared4.run(round_trips))


def used_after_it_was_destroyed(rank):
    g = new_group(20)
    fcoll.all_reduce(torch.ones(1), group=g).sum()
    dist.barrier()
    from fcoll.groups import resolve
    from fcoll.transport import shared_memory

    handle = shared_memory.handle_of(resolve(g))
    torch.ops.fcoll_native.close(handle)
    with pytest.raises((GroupClosed, RuntimeError)):
        fcoll.all_reduce(torch.ones(1), group=g).sum()


def test_a_closed_group_raises(shared2):
    shared2.run(used_after_it_was_destroyed)


# -- a thread that uses what another one has started ---


def used_in_another_thread(rank, late):
    g = new_group()
    fcoll.barrier(g)
    if rank == late:
        dist.barrier()  # the other one has started it by then, and may be waiting for it
    y = fcoll.all_reduce(torch.full((8,), rank + 1.0), group=g)
    found = []
    thread = threading.Thread(target=lambda: found.append(fcoll.wait_tensor(y).tolist()))
    thread.start()
    if rank != late:
        dist.barrier()
    thread.join()
    return found


@pytest.mark.parametrize("pool", ["shared2", "ranks2"])
@pytest.mark.parametrize("late", [0, 1])
def test_another_thread_waits_for_a_result(pool, late, request):
    pool = request.getfixturevalue(pool)
    assert pool.run(used_in_another_thread, late) == [[[3.0] * 8]] * 2


# -- layout ---


def gathered_along_a_dim_of_one(rank):
    x = torch.arange(6.0).view(2, 1, 3) + 10 * rank
    y = fcoll.wait_tensor(fcoll.all_gather_into_tensor(x, dim=1))
    return y, y.stride()


def test_a_gather_along_a_dim_of_size_one_is_contiguous(shared2):
    x = torch.arange(6.0).view(2, 1, 3)
    for y, strides in shared2.run(gathered_along_a_dim_of_one):
        assert torch.equal(y, torch.cat([x, x + 10], dim=1))
        assert strides == (6, 3, 1)
