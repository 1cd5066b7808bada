"""Shared memory between the processes of a host: which groups have it, and how it fails."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import launch

import fcoll
from fcoll import errors

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.usefixtures("compiled"),
]
NATIVE = {"FCOLL_NATIVE": "1"}


def say_status(rank, groups):
    return [str(fcoll.symm_mem.status(g)) for g in groups if g is None or rank in g]


def test_status_says_which_way_and_why(shared2, ranks2, solo):
    assert all(
        s[0].startswith("shared memory: 2 ranks on ") for s in shared2.run(say_status, [None])
    )
    assert all("process group: FCOLL_NATIVE=0" in s[0] for s in ranks2.run(say_status, [None]))
    assert str(fcoll.symm_mem.status()) == (
        "process group: it has 1 ranks; shared memory serves 2 to 64"
    )


def test_sub_groups_have_their_own(shared4):
    answers = shared4.run(say_status, [None, (0, 1), (2, 3), (0, 2), (3, 1)])
    assert all(s.startswith("shared memory: ") for answer in answers for s in answer)


def one_without(rank):
    os.environ["FCOLL_NATIVE"] = "0" if rank == 1 else "1"
    value = fcoll.all_reduce(torch.ones(3)).tolist()
    return str(fcoll.symm_mem.status()), value


def test_if_one_rank_cannot_all_use_the_process_group():
    done = launch(one_without, 2)
    assert [r[1] for r in done.results] == [[2.0] * 3] * 2
    assert done.results[0][0] == "process group: rank 1: FCOLL_NATIVE=0 switches it off"


def no_compiler(rank, folder):
    os.environ.update(FCOLL_CACHE_DIR=folder, CXX="no-such-compiler", FCOLL_NATIVE="1")
    with pytest.warns(UserWarning, match="there is no C\\+\\+ compiler"):
        value = fcoll.all_reduce(torch.ones(3)).tolist()
    return str(fcoll.symm_mem.status()), value


def test_without_a_compiler_process_groups_serve(tmp_path):
    for status, value in launch(no_compiler, 2, str(tmp_path)).results:
        assert value == [2.0] * 3
        assert "there is no C++ compiler" in status


# -- sizes --

HUGE = 2**31 + 4098  # bytes: more than an int counts


PERIOD = 251  # no power of two: an offset that wrapped around shows
ROW = 8 * PERIOD  # bytes: whole periods in whole words, each of which takes as long as a byte


def few_numbers(n, start, add):
    return (torch.arange(start, start + n) % PERIOD + add).to(torch.uint8)


def numbers(n, add):
    """(i modulo 251) + add for n numbers i, in one pass over the memory, as holds takes one."""
    x = torch.empty(n, dtype=torch.uint8)
    whole = n // ROW * ROW
    x[:whole].view(torch.int64).view(-1, PERIOD).copy_(few_numbers(ROW, 0, add).view(torch.int64))
    x[whole:] = few_numbers(n - whole, 0, add)
    return x


def holds(x, start, add):
    """Are these the numbers from start on?"""
    head = min(-x.storage_offset() % 8, x.numel())
    end = head + (x.numel() - head) // ROW * ROW
    rows = x[head:end].view(torch.int64).view(-1, PERIOD)
    row = few_numbers(ROW, start + head, add).view(torch.int64)
    return (
        torch.equal(x[:head], few_numbers(head, start, add))
        and torch.equal(rows, row.expand_as(rows))
        and torch.equal(x[end:], few_numbers(x.numel() - end, start + end, add))
    )


def test_numbers_that_differ_are_seen():
    x = numbers(10_000, 3)
    assert x.tolist() == [i % 251 + 3 for i in range(10_000)]
    assert holds(x, 0, 3) and holds(x[300:], 300, 3) and holds(x[301:9999], 301, 3)
    assert not holds(x, 0, 4) and not holds(x[300:], 301, 3)
    for wrong in (0, 500, 5000, 9999):
        x[wrong] += 1
        assert not holds(x, 0, 3)
        assert wrong < 301 or not holds(x[301:], 301, 3)
        x[wrong] -= 1


def huge_results(rank):
    """Which collectives of more than 2 GiB are wrong. Rank r has numbers(HUGE, r)."""
    x, half, other = numbers(HUGE, rank), HUGE // 2, 1 - rank
    sent = [HUGE if r == other else 0 for r in range(2)]
    right = {}
    got = fcoll.wait_tensor(fcoll.all_to_all_single(x, None, sent, sent))  # one part of > 2 GiB
    right["all_to_all_single"] = holds(got, 0, other)
    del got
    got = fcoll.wait_tensor(fcoll.all_gather_into_tensor(x[:half]))
    right["all_gather_into_tensor"] = all(holds(got[r * half :][:half], 0, r) for r in range(2))
    del got
    got = fcoll.wait_tensor(fcoll.reduce_scatter_tensor(x, "max"))
    right["reduce_scatter_tensor"] = got.numel() == half and holds(got, rank * half, 1)
    return [name for name, is_right in right.items() if not is_right]


def available_bytes():
    with open("/proc/meminfo") as file:
        return {k: int(v.split()[0]) << 10 for k, v in (line.split(":") for line in file)}[
            "MemAvailable"
        ]


@pytest.mark.slow
@pytest.mark.timeout(600)  # 20 s on a quiet machine
def test_more_than_2_gib():
    if available_bytes() < 14 * 2**30:
        pytest.skip("needs 14 GiB of free memory")
    huge_pages = {"THP_MEM_ALLOC_ENABLE": "1"}  # torch's setting: fewer page faults
    assert launch(huge_results, 2, env=NATIVE | huge_pages, timeout=580).results == [[], []]


# -- never hang, never corrupt --


def mismatched(rank):
    fcoll.all_reduce(torch.ones(2)).tolist()
    if rank == 0:
        fcoll.all_reduce(torch.ones(4)).tolist()
    else:
        fcoll.all_gather_into_tensor(torch.ones(4)).tolist()


def test_mismatch_names_both_calls():
    for rank, error in enumerate(launch(mismatched, 2, env=NATIVE).errors):
        assert isinstance(error, errors.CollectiveMismatch), error
        assert "all_reduce(float32 [4], sum)" in str(error), error
        assert "all_gather_into_tensor(float32 [4], dim 0)" in str(error), error
        assert (
            f"test_symm_mem.py:{mismatched.__code__.co_firstlineno + (3 if rank == 0 else 5)}"
            in (str(error))
        )


def crossed_splits(rank):
    """Rank 0 sends 3 rows to rank 1, which expects 2."""
    outs, ins = ([1, 2], [1, 3]) if rank == 0 else ([2, 2], [2, 2])
    fcoll.wait_tensor(fcoll.all_to_all_single(torch.ones(4), None, outs, ins))
    fcoll.barrier()  # rank 0 got what it expected: it learns of the mismatch here


def test_splits_that_do_not_meet_are_a_mismatch_not_wrong_data():
    for error in launch(crossed_splits, 2, env=NATIVE).errors:
        assert isinstance(error, errors.CollectiveMismatch), error
        assert "rank 0 sends 12 bytes to rank 1, whose output_splits expect 8" in str(error)


def bad_splits_for_torch(rank):
    c10d, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    with fcoll.accelerate_c10d():
        for outs, ins in (([1, 1], [9, 9]), ([1] * 9, [1] * 9), ([-1, 3], [1, 1])):
            with pytest.raises((RuntimeError, ValueError)):
                c10d.wait_tensor(c10d.all_to_all_single(torch.ones(2), outs, ins, name))
    return fcoll.all_reduce(torch.ones(1)).item()


def test_accelerated_ops_leave_bad_splits_to_torch():
    assert launch(bad_splits_for_torch, 2, env=NATIVE).results == [2.0, 2.0]


def dies(rank, victim):
    fcoll.all_reduce(torch.ones(2)).tolist()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(3):
            fcoll.all_reduce(torch.ones(2)).tolist()
    except errors.PeerDied as error:
        waited = time.monotonic() - start
        with pytest.raises(errors.GroupClosed, match="closed by an earlier error"):
            fcoll.all_reduce(torch.ones(2)).tolist()
        return error.rank, waited
    return None


@pytest.mark.parametrize("n, victim", [(2, 1), (4, 2)])
def test_a_dead_peer_is_an_error_that_names_it(n, victim):
    done = launch(dies, n, victim, env=NATIVE)
    assert done.exitcodes[victim] == -signal.SIGKILL
    for rank, result in enumerate(done.results):
        if rank != victim:
            assert result is not None, (rank, done.errors, done.stderr)
            assert result[0] == victim
            assert result[1] < 0.5


def short_timeout(rank):
    from datetime import timedelta

    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    fcoll.all_reduce(torch.ones(2), "sum", group).tolist()
    if rank == 0:
        with pytest.raises(
            errors.CollectiveTimeout, match="for rank 1, which has not made the call"
        ):
            fcoll.all_reduce(torch.ones(2), "sum", group).tolist()
    dist.barrier()  # rank 1 is alive all the while


def test_timeout_of_the_process_group(shared2):
    shared2.run(short_timeout)


def forks(rank):
    fcoll.all_reduce(torch.ones(2)).tolist()
    child = os.fork()
    if child == 0:
        try:
            torch.ops.fcoll_native.barrier(fcoll.symm_mem.status().handle)
            os._exit(1)
        except RuntimeError as error:
            os._exit(0 if "GroupForked" in str(error) else 2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, fcoll.all_reduce(torch.ones(2)).tolist()


def test_after_a_fork_the_child_gets_an_error_and_the_parent_goes_on():
    assert launch(forks, 2, env=NATIVE).results == [(0, [2.0, 2.0])] * 2


def threads(rank, count):
    groups = [dist.new_group([0, 1]) for _ in range(count)]
    for g in groups:
        fcoll.all_reduce(torch.ones(1), "sum", g)
    wrong = []

    def work(k):
        for i in range(200):
            y = fcoll.all_reduce(torch.full((i + 1,), float(rank + k)), "sum", groups[k])
            if not torch.equal(fcoll.wait_tensor(y), torch.full((i + 1,), 1.0 + 2 * k)):
                wrong.append((k, i))

    started = [threading.Thread(target=work, args=(k,)) for k in range(count)]
    for t in started:
        t.start()
    for t in started:
        t.join()
    return wrong


def test_threads_on_groups_of_their_own(shared2):
    assert shared2.run(threads, 4) == [[], []]


def many_in_flight(rank):
    outs = [fcoll.all_reduce(torch.full((1000,), float(i + rank))) for i in range(100)]
    outs += [
        fcoll.all_gather_into_tensor(torch.full((70_000,), float(i + rank))) for i in range(10)
    ]
    for i, y in reversed(list(enumerate(outs[:100]))):
        assert torch.equal(y + 0, torch.full((1000,), 2.0 * i + 1))
    for i, y in enumerate(outs[100:]):
        assert y.view(2, -1)[:, -1].tolist() == [float(i), i + 1.0]


def test_many_in_flight_waited_in_any_order(shared2):
    shared2.run(many_in_flight)


def input_changed(rank):
    x = torch.full((100_000,), float(rank))
    if rank == 1:  # be late, so that rank 0's call returns before this one
        dist.recv(torch.empty(1), 0)
    y = fcoll.all_reduce(x)
    if rank == 0:
        assert isinstance(y, fcoll.AsyncCollectiveTensor)
        x.fill_(77)
        dist.send(torch.ones(1), 1)
    return y.sum().item()


def test_the_input_may_change_while_its_sum_is_under_way(shared2):
    assert shared2.run(input_changed) == [100_000.0] * 2


def big(rank):
    x = torch.arange(3_000_000, dtype=torch.float32) % 1000 + rank
    y = fcoll.all_reduce(x)
    assert torch.equal(
        y + 0,
        torch.arange(3_000_000) % 1000 * dist.get_world_size() + sum(range(dist.get_world_size())),
    )
    parts = fcoll.reduce_scatter_tensor(x)
    assert torch.equal(fcoll.all_gather_into_tensor(parts) + 0, y + 0)
    return float(y.double().sum())


def test_messages_of_many_slots(shared2, shared4):
    for pool in (shared2, shared4):
        assert len(set(pool.run(big))) == 1


def bf16_is_rounded_once(rank):
    torch.manual_seed(0)
    xs = torch.randn(dist.get_world_size(), 5000).bfloat16()
    y = fcoll.all_reduce(xs[rank]) + 0
    expected = xs.float()[0]
    for x in xs.float()[1:]:
        expected = expected + x
    assert torch.equal(y, expected.bfloat16())
    return y.view(torch.int16).tolist()


def test_bf16_accumulates_in_f32_and_every_rank_has_the_same_bits(shared4):
    results = shared4.run(bf16_is_rounded_once)
    assert all(r == results[0] for r in results)


def new_world(rank):
    port = int(os.environ["MASTER_PORT"])
    values = []
    for k in range(3):
        values.append(fcoll.all_reduce(torch.ones(2) * (k + 1)).tolist())
        values.append(str(fcoll.symm_mem.status())[:13])
        dist.barrier()
        dist.destroy_process_group()
        store = dist.PrefixStore(str(k), dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return values, len(os.listdir("/proc/self/fd"))


def test_a_destroyed_group_lets_go_of_its_memory_and_its_name():
    (values, fds), _ = launch(new_world, 2, env=NATIVE).results
    assert values == [
        [2.0, 2.0],
        "shared memory",
        [4.0, 4.0],
        "shared memory",
        [6.0, 6.0],
        "shared memory",
    ]
    assert fds < 100


# -- torch's own functional collectives --


def dtensor_program(rank, accelerate):
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    seen = []
    undo = fcoll.accelerate_c10d() if accelerate else None
    d = DTensor.from_local(x * (rank + 1), mesh, [Shard(0)])
    seen.append(d.full_tensor())
    seen.append(d.redistribute(mesh, [Shard(1)]).to_local())
    w = DTensor.from_local(torch.randn(4, 3), mesh, [Replicate()])
    seen.append((d.redistribute(mesh, [Shard(1)]) @ w.redistribute(mesh, [Shard(0)])).full_tensor())
    c10d, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    seen.append(
        c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "avg", 2, name))
        if accelerate
        else (c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 2, name)) / 2)
    )
    seen.append(c10d.wait_tensor(c10d.broadcast(x * rank, 1, name)))
    seen.append(
        c10d.wait_tensor(c10d.all_to_all_single(x, [1, 5], [1, 5], name))
        if rank == 0
        else (c10d.wait_tensor(c10d.all_to_all_single(x, [5, 1], [5, 1], name)))
    )
    seen.append(c10d.wait_tensor(c10d.all_reduce_(x.clone(), "max", name)))
    out = torch.empty(12, 4)
    seen.append(c10d.wait_tensor(c10d.all_gather_into_tensor_out(x, 2, name, out=out)))
    kernel = "CPU: registered" in torch._C._dispatch_dump("_c10d_functional::all_reduce")
    if undo:
        undo.undo()
    after = "CPU: registered" in torch._C._dispatch_dump("_c10d_functional::all_reduce")
    return [fcoll.wait_tensor(t) for t in seen], kernel, after


def test_accelerate_c10d_serves_dtensor_and_can_be_undone(shared2):
    for (fast, kernel, after), (slow, _, _) in zip(
        shared2.run(dtensor_program, True), shared2.run(dtensor_program, False), strict=True
    ):
        assert kernel and not after
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b)
