"""Programs that real ranks would hang in, or get wrong: each is reported with ranks and lines."""

from __future__ import annotations

import inspect
import os
import re
import signal
import threading
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fcoll
from fcoll.errors import (
    BadOutput,
    CollectiveMismatch,
    CollectiveTimeout,
    Deadlock,
    MismatchedLists,
    RankFailed,
    RanksTimeout,
)

X = (4,)


def x(*shape, dtype=torch.float32):
    return torch.zeros(shape or X, dtype=dtype)


# Each is a program for 3 ranks; "# 0" marks the lines that a report must name, with the rank that
# is there.


def recv_from_each_other(rank):
    dist.recv(x(), (rank + 1) % 3)  # 0 1 2


def send_to_each_other(rank):
    dist.send(x(), (rank + 1) % 3)  # 0 1 2
    dist.recv(x(), (rank - 1) % 3)


def a_rank_skips_a_collective(rank):
    if rank != 1:
        dist.all_reduce(x())  # 0 2


def a_rank_skips_a_barrier(rank):
    if rank:
        dist.barrier()  # 1 2


def one_more_iteration(rank):
    for _ in range(3 if rank == 2 else 2):
        dist.all_reduce(x())  # 2


def wrong_tag(rank):
    if rank == 0:
        dist.send(x(), 1, tag=1)  # 0
    if rank == 1:
        dist.recv(x(), 0, tag=2)  # 1


def wrong_peer(rank):
    if rank == 0:
        dist.send(x(), 2)  # 0
    if rank == 1:
        dist.recv(x(), 0)  # 1


def groups_in_another_order(rank):
    left, right = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        dist.barrier(group=left)  # 0
        dist.barrier(group=right)
    if rank == 1:
        dist.barrier(group=right)  # 1
        dist.barrier(group=left)


def a_group_that_one_rank_does_not_make(rank):
    if rank != 1:
        dist.new_group([0, 1, 2])  # 0 2


def a_collective_against_a_message(rank):
    if rank == 0:
        dist.broadcast(x(), 0)  # 0
    else:
        dist.recv(x(), 0)  # 1 2


def async_results_waited_for_in_a_ring(rank):
    work = dist.irecv(x(), (rank + 1) % 3)
    work.wait()  # 0 1 2
    dist.send(x(), (rank - 1) % 3)


def a_key_that_nobody_sets(rank):
    store = dist.distributed_c10d._get_default_store()
    store.set(f"key{rank}", "1")
    store.get(f"key{rank + 1}")  # 2


def a_mesh_axis_that_one_rank_leaves_out(rank):
    mesh = init_device_mesh("cpu", (3,))
    if rank:
        fcoll.all_reduce(x(), "sum", mesh).sum()  # 1 2


def polls_for_ever(rank):
    if rank == 0:
        work = dist.irecv(x(), 1)
        while not work.is_completed():  # 0
            pass


def a_pipeline_that_sends_first(rank):
    following = [rank + 1] if rank < 2 else []
    for peer in following:
        dist.send(x(), peer)  # 0 1
    if rank == 2:
        dist.send(x(), 0)  # 2
    dist.recv(x(), (rank - 1) % 3)


def ops_differ(rank):
    if rank == 1:
        dist.all_reduce(x())  # 1
    else:
        dist.broadcast(x(), 0)  # 0


def groups_made_in_another_order(rank):
    for ranks in [[0, 1], [1, 2]] if rank != 1 else [[1, 2], [0, 1]]:
        dist.new_group(ranks)  # 0 1


def orders_differ(rank):
    y = x()
    if rank:
        dist.barrier()  # 1
        dist.all_reduce(y)
    else:
        dist.all_reduce(y)  # 0
        dist.barrier()


def sizes_differ(rank):
    dist.all_reduce(x(4 + (rank == 2)))  # 0 2


def dtypes_differ(rank):
    dist.all_reduce(x(dtype=torch.float64 if rank == 1 else torch.float32))  # 0 1


def reduce_ops_differ(rank):
    dist.all_reduce(x(), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)  # 0 1


def roots_differ(rank):
    dist.broadcast(x(), src=rank % 2)  # 0 1


def splits_differ(rank):
    sizes = [1, 2, 3]
    outs = [3, 2, 1] if rank == 1 else [sizes[rank]] * 3
    dist.all_to_all_single(x(sum(outs)), x(6), outs, sizes)  # 0 1


def a_message_of_another_length(rank):
    if rank == 0:
        dist.send(x(4), 1)  # 0
    if rank == 1:
        dist.recv(x(5), 0)  # 1


def gathered_parts_of_another_size(rank):
    outs = [x(2) for _ in range(3)]
    dist.all_gather(outs, x(3 if rank == 2 else 2))  # 0 2


def shapes_of_functional_calls_differ(rank):
    fcoll.all_reduce(x(2, 2) if rank else x(4)).sum()  # 0 1


def dims_of_functional_calls_differ(rank):
    fcoll.all_gather_into_tensor(x(3, 3), dim=rank % 2).sum()  # 0 1


def torchs_functional_calls_differ(rank):
    name = dist.group.WORLD.group_name
    op = "max" if rank == 2 else "sum"
    torch.ops._c10d_functional.all_reduce(x(), op, name)  # 0 2


def redistributed_by_some(rank):
    mesh = init_device_mesh("cpu", (3,))
    d = distribute_tensor(torch.ones(3, 3), mesh, [Shard(0)])
    if rank != 1:
        d.redistribute(mesh, [Replicate()]).to_local()
    else:
        dist.barrier(mesh.get_group())  # 1


def ddp_with_another_backward(rank):
    net = DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = net(torch.ones(1, 2)).sum()
    if rank != 2:
        loss.backward()  # 0
    else:
        dist.broadcast(x(), 0)  # 2


PROGRAMS = [
    value
    for value in dict(globals()).values()
    if inspect.isfunction(value)
    and value.__module__ == __name__
    and list(inspect.signature(value).parameters) == ["rank"]
]
MISMATCHES = PROGRAMS[PROGRAMS.index(ops_differ) :]


def marks(program):
    """(line, rank) of each mark in a program."""
    lines, first = inspect.getsourcelines(program)
    for at, text in enumerate(lines):
        if found := re.search(r"# ([\d ]+)$", text):
            yield from ((first + at, int(rank)) for rank in found[1].split())


def test_there_are_enough():
    assert len(PROGRAMS) >= 25


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_every_one_is_reported(program):
    kind = CollectiveMismatch if program in MISMATCHES else Deadlock
    with pytest.raises(kind) as caught:
        fcoll.simulate_ranks(program, 3, timeout=30)
    message = str(caught.value)
    assert list(marks(program))
    for line, rank in marks(program):
        assert re.search(rf"\brank {rank}\b", message), message
        assert f"test_ranks_errors.py:{line}" in message, message
    assert kind is Deadlock or isinstance(caught.value, RankFailed)
    assert fcoll.simulate_ranks(lambda rank: rank, 2) == [0, 1]


def test_the_group_is_usable_after_a_mismatch():
    def fn(rank):
        with pytest.raises(CollectiveMismatch):
            dist.all_reduce(x(2 + rank))
        y = torch.ones(2)
        dist.all_reduce(y)
        return y.tolist()

    assert fcoll.simulate_ranks(fn, 3) == [[3.0, 3.0]] * 3


def test_a_wait_with_a_timeout_ends():
    def fn(rank):
        if rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"rank 0 waited 5 s in monitored_barrier"):
                dist.monitored_barrier(timeout=timedelta(seconds=5))
            with pytest.raises(CollectiveTimeout, match=r"waited 2 s in recv.* for rank 1"):
                dist.irecv(x(), 1).wait(timedelta(seconds=2))
            store = dist.distributed_c10d._get_default_store()
            with pytest.raises(CollectiveTimeout, match="waited 3 s in store"):
                store.wait(["key"], timedelta(seconds=3))
        return rank

    assert fcoll.simulate_ranks(fn, 2) == [0, 1]


def test_results_that_nobody_waited_for_are_reported():
    def fn(rank):
        dist.all_reduce(x(), async_op=True)
        if rank == 0:
            fcoll.isend(x(), 1)

    with pytest.warns(RuntimeWarning, match="nobody waited") as caught:
        fcoll.simulate_ranks(fn, 2)
    (found,) = caught
    assert found.filename == __file__
    message = str(found.message)
    assert re.search(r'all_reduce\(sum, 4 float32\) on "world" at .*:\d+, by ranks 0, 1', message)
    assert re.search(r"send\(4 float32\) to rank 1 .*, by rank 0; not called by rank 1", message)


def test_what_is_waited_for_is_not_reported():
    def fn(rank):
        fcoll.all_reduce(x()).sum()
        dist.all_reduce(x(), async_op=True).wait()
        dist.all_reduce(x(), async_op=True).get_future().wait()
        return fcoll.all_gather_into_tensor(x())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fcoll.simulate_ranks(fn, 2)


def test_an_exit_is_an_end():
    def fn(rank):
        if rank == 1:
            raise SystemExit(0)
        return rank

    assert fcoll.simulate_ranks(fn, 2) == [0, None]


def test_ranks_that_swallow_the_end_are_ended_at_their_next_call():
    calls = []

    def fn(rank):
        if rank == 2:
            raise ValueError("no")
        for _ in range(3):
            try:
                dist.barrier()
            except BaseException as error:
                calls.append((rank, type(error).__name__))

    with pytest.raises(RankFailed, match="rank 2: ValueError: no, at tests"):
        fcoll.simulate_ranks(fn, 3)
    assert calls == [(0, "RankStopped")] * 3 + [(1, "RankStopped")] * 3


def test_a_timeout_says_where_the_rank_is():

    def program(rank):
        count = 0
        while rank == 1:
            count += 1
        dist.barrier()

    _, first = inspect.getsourcelines(program)
    lines = f"({first + 2}|{first + 3})"
    with pytest.raises(RanksTimeout, match=rf"rank 1 was running, at .*py:{lines}\."):
        fcoll.simulate_ranks(program, 2, timeout=0.2)


@pytest.fixture
def interrupts():
    """As in a terminal: what a shell starts in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_ranks_that_pass_the_baton_on(interrupts, capfd):
    """Whoever has it when the interrupt arrives; none prints a traceback or is left."""

    def program(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            dist.barrier()

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            fcoll.simulate_ranks(program, 4)
        left = [t for t in threading.enumerate() if t.name.startswith("rank ")]
        for thread in left:  # they end by themselves, once they have passed the baton on
            thread.join(5)
        assert not any(thread.is_alive() for thread in left)
    assert "Traceback" not in capfd.readouterr().err
    assert fcoll.simulate_ranks(lambda rank: dist.get_rank(), 2) == [0, 1]


# -- mistakes that a program may go on after ---


@pytest.mark.parametrize(
    "call",
    [
        lambda x: dist.broadcast(x, 99),
        lambda x: dist.reduce(x, -5),
        lambda x: dist.send(x, 99),
        lambda x: dist.recv(x, 7),
    ],
)
def test_a_rank_outside_the_group_is_an_error_at_once(call: Any) -> None:
    def program(rank: int) -> float:
        x = torch.ones(1)
        with pytest.raises(fcoll.errors.RankOutOfGroup, match="outside the group of 3 ranks"):
            call(x)
        dist.all_reduce(x)
        return x.item()

    assert fcoll.simulate_ranks(program, 3) == [3.0] * 3


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda x: dist.all_gather_into_tensor(x.new_zeros(7), x), "7 of .* 3 x 4 elements"),
        (lambda x: dist.all_gather_into_tensor(x.int().repeat(3), x), "12 of torch.int32"),
        (lambda x: dist.reduce_scatter_tensor(x.new_zeros(2), x), "4 of .* 3 x 2 elements"),
        (lambda x: dist.all_gather([x, x], x), "there are 2 tensors, and .* needs 3"),
        (lambda x: dist.all_to_all([x], [x]), "there are 1 tensors, and .* needs 3"),
        (lambda x: dist.all_to_all_single(x, x), r"splits \[1, 1, 1\] do not add up to its 4 rows"),
        (lambda x: dist.all_to_all_single(x, x, [4, 0, 0], [1, 1, 1]), "the input splits"),
        (lambda x: dist.group.WORLD.scatter([x], [], dist.get_rank()), "scatter_list is empty"),
        (lambda x: dist.group.WORLD.gather([], [x], dist.get_rank()), "gather_list is empty"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error_at_once(call: Any, why: str) -> None:
    def program(rank: int) -> float:
        x = torch.ones(4)
        with pytest.raises((BadOutput, MismatchedLists), match=why):
            call(x)
        dist.all_reduce(x)
        return x[0].item()

    assert fcoll.simulate_ranks(program, 3) == [3.0] * 3


def test_a_world_that_was_destroyed_is_made_again() -> None:
    def program(rank: int) -> list[float]:
        found = []
        for _ in range(2):
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            x = torch.ones(1)
            dist.all_reduce(x)
            found.append(x.item())
            dist.destroy_process_group()
        return found

    assert fcoll.simulate_ranks(program, 2) == [[2.0, 2.0]] * 2


def test_a_batched_simulation_has_ranks_of_its_own() -> None:
    def program(rank: int) -> Any:
        return fcoll.simulate(lambda x: x, world_size=2)(torch.ones(2))

    with pytest.raises(fcoll.FcollError, match=r"fcoll\.simulate does not work on simulated ranks"):
        fcoll.simulate_ranks(program, 2)
