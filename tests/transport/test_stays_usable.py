"""Shared memory under stress from outside: signals, exits, forks, limits on memory and files."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from ranks import launch

import fcoll
from fcoll import errors
from fcoll.transport.native import build

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.usefixtures("compiled"),
]
NATIVE = {"FCOLL_NATIVE": "1"}
WORLD = "0"  # the default group's name


def count_lines(path: str, text: str) -> int:
    return sum(text in line for line in Path(path).read_text().splitlines())


def open_files(text: str) -> int:
    """The open files of this process whose target has the text."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(text in target for target in targets)


# -- Ctrl-C --


def eager(group):
    return fcoll.all_reduce(torch.ones(2_000_000), "sum", group)  # too large to be started only


def later(group):
    return fcoll.all_reduce(torch.ones(4), "sum", group) + 1


def by_op(group):
    return torch.ops.fcoll.all_to_all_single(
        torch.ones(2), [1, 1], [1, 1], fcoll.groups.resolve(group).name
    )


CALLS = {"eager": eager, "later": later, "by_op": by_op}


def interrupt_soon():
    # torch imports it at the first op on a tensor subclass: not where the interrupt may come
    importlib.import_module("torch.distributed.tensor")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # test ranks ignore it
    # from another process: torch's barrier keeps the GIL, and with it all threads of this one
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {os.getpid()}"])


def interrupted(rank, call):
    """Rank 0 is interrupted in the call; rank 1 makes it afterwards. How long, and what is next."""
    group = dist.new_group([0, 1])
    fcoll.all_reduce(torch.ones(1), "sum", group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"])
        with pytest.raises(errors.GroupClosed, match="rank 0 was interrupted"):
            for _ in range(2):  # the first has all parts: it may still be complete
                CALLS[call](group)
        return 0.0
    interrupt_soon()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        CALLS[call](group)
    took = time.monotonic() - start
    store.set("interrupted", "1")
    with pytest.raises(errors.GroupClosed, match="interrupted"):
        CALLS[call](group)
    return took


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_ends_a_wait(call):
    done = launch(interrupted, 2, call, env=NATIVE)
    assert done.errors == [None, None], done.stderr
    assert done.results[0] < 5  # the group's timeout is half an hour


def interrupted_barrier(rank):
    assert build.load() == ""
    x = symm_mem.empty(4, device="cpu")
    handle = symm_mem.rendezvous(x, WORLD)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            handle.barrier()
        store.set("interrupted", "1")
    store.wait(["interrupted"])
    with pytest.raises(RuntimeError, match="rank 0 was interrupted in barrier on channel 0"):
        handle.barrier()
    symm_mem.rendezvous(x, WORLD).barrier()  # made anew, it works


def test_an_interrupt_ends_a_barrier_of_symmetric_memory():
    assert launch(interrupted_barrier, 2, env=NATIVE).errors == [None, None]


# -- ranks that go --

LARGE = 16 << 20


def exchanged(group, rank):
    """Ranks 0 and 1 exchange much, the third nothing."""
    sizes = [LARGE if r == 1 - rank else 0 for r in range(3)] if rank < 2 else [0] * 3
    x = torch.full((sum(sizes),), rank, dtype=torch.uint8)
    return fcoll.all_to_all_single(x, group, sizes, sizes)


def gathered(group, rank):
    sizes = [LARGE, LARGE, 0]
    x = torch.full((sizes[min(rank, 2)],), rank, dtype=torch.uint8)
    return fcoll.all_gather_into_tensor(x, group, sizes=sizes)


def permuted(group, rank):
    x = torch.full((LARGE,), rank, dtype=torch.uint8)
    return fcoll.permute(x, [1, 0, 2], group)


def bystanders(rank):
    """Rank 2 + i is in the i-th call only, and exits when it has done its part of it."""
    calls = [exchanged, gathered, permuted]
    groups = [dist.new_group([0, 1, 2 + i]) for i in range(3)]
    for i, group in enumerate(groups):
        if rank in (0, 1, 2 + i):
            fcoll.barrier(group)
    dist.barrier()
    for i, call in enumerate(calls):
        if rank not in (0, 1, 2 + i):
            continue
        y = fcoll.wait_tensor(call(groups[i], min(rank, 2)))
        if rank == 2 + i:
            os._exit(0)
        assert (y == 1 - rank).sum() >= LARGE


def test_who_has_done_its_part_may_exit():
    done = launch(bystanders, 5, env=NATIVE)
    assert done.errors == [None] * 5 and done.exitcodes == [0] * 5, done.stderr


# -- forks --


def forked(rank):
    """The child of a process, one of whose threads is in a collective, gets an error."""
    group = dist.new_group([0, 1])
    fcoll.barrier(group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["forked"])
        fcoll.barrier(group)
        return 0
    waiting = threading.Thread(target=fcoll.barrier, args=(group,))
    waiting.start()
    time.sleep(0.2)  # not needed for the result: it is in the collective, or about to be
    child = os.fork()
    if child == 0:
        try:
            fcoll.barrier(group)
        except errors.GroupForked:
            os._exit(17)
        os._exit(1)
    ended, deadline = 0, time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    store.set("forked", "1")
    waiting.join()
    return os.waitstatus_to_exitcode(status) if ended else "the child hung"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_beside_a_collective():
    done = launch(forked, 2, env=NATIVE)
    assert done.results == [17, 0], done.stderr


# -- files and memory --


def many_groups(rank):
    pids, before = open_files("pidfd"), open_files("memfd:fcoll")
    for _ in range(8):
        fcoll.barrier(dist.new_group([0, 1]))
    return open_files("pidfd") - pids, open_files("memfd:fcoll") - before


def test_groups_share_what_they_watch(shared2):
    for pidfds, memfds in shared2.run(many_groups):
        assert pidfds <= 1  # one a peer, not one a group and peer
        assert memfds <= 8


def met(name, lane, x):
    """The sum of the ranks' parts, as a compiled graph makes it."""
    own = torch.ops.fcoll_native.claim(
        name, lane, list(x.shape), list(x.stride()), x.dtype, x.device
    )
    own.copy_(x)
    parts = torch.ops.fcoll_native.meet(own, "all_reduce", "sum", name, -1)
    return sum(part.clone() for part in parts)


def announced(name, lane, x):
    own = torch.ops.fcoll_native.claim(
        name, lane, list(x.shape), list(x.stride()), x.dtype, x.device
    )
    own.copy_(x)
    token = torch.ops.fcoll_native.announce(own, "all_reduce", "sum", name, -1)
    return sum(p.clone() for p in torch.ops.fcoll_native.collect(token, own, "all_reduce", name))


def wrong_sums(name, sizes):
    rank, wrong = dist.get_rank(), []
    for i, (size, way) in enumerate((s, w) for s in sizes for w in (met, announced)):
        for turn in range(3):
            x = torch.full((size,), float(rank + turn))
            y = way(name, i % 7, x)
            if not torch.equal(y, torch.full((size,), 1.0 + 2 * turn)):
                wrong.append((size, way.__name__, turn))
    return wrong


def little_address_space(rank, who):
    group = dist.new_group([0, 1])
    fcoll.barrier(group)
    if rank in who:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * 4096 + (500 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    return wrong_sums(group.group_name, [1, 100, 30_000, 1_000_000, 2_500_000])


@pytest.mark.parametrize("who", [[0], [1], [0, 1]], ids=str)
def test_compiled_collectives_with_little_address_space(who):
    done = launch(little_address_space, 2, who, env=NATIVE)
    assert done.results == [[], []], done.stderr


def few_files(rank):
    group = dist.new_group([0, 1])
    fcoll.barrier(group)
    if rank == 1:
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return wrong_sums(group.group_name, [1, 30_000])


def test_if_one_rank_has_no_arena_all_use_the_ring():
    done = launch(few_files, 2, env=NATIVE)
    assert done.results == [[], []], done.stderr


def mapped_after(rank):
    """What a group takes with compiled collectives, and what is left of it when it is destroyed."""
    gc.collect()
    before = count_lines("/proc/self/maps", "memfd:fcoll"), open_files("memfd:fcoll")
    size = int(Path("/proc/self/statm").read_text().split()[0])
    group = dist.new_group([0, 1])
    fcoll.barrier(group)
    wrong = wrong_sums(group.group_name, [1, 30_000])
    grown = int(Path("/proc/self/statm").read_text().split()[0]) - size
    dist.destroy_process_group(group)
    del group
    gc.collect()
    after = count_lines("/proc/self/maps", "memfd:fcoll"), open_files("memfd:fcoll")
    return wrong, grown * 4096, all(x <= y for x, y in zip(after, before, strict=True))


def test_a_destroyed_group_leaves_nothing_mapped(shared2):
    for wrong, grown, clean in shared2.run(mapped_after):
        assert not wrong and clean
        assert grown < 1 << 30  # of address space
