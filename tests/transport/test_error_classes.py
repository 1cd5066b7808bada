"""Errors of shared memory under torch's own names are fcoll's classes: through torch's functional
collectives while they are accelerated, and through its symmetric memory."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from ranks import launch

import fcoll
from fcoll import errors

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
NATIVE = {"FCOLL_NATIVE": "1"}
c10d = torch.ops._c10d_functional


def new_group(seconds=20.0):
    """A group of all ranks that a test may spoil, connected."""
    n = dist.get_world_size()
    group = dist.new_group(list(range(n)), timeout=timedelta(seconds=seconds))
    assert fcoll.symm_mem.status(group).shared
    return group


def raised(cls, call, *parts):
    """The error of this class that a call raises, whose message has all the parts."""
    with pytest.raises(cls) as caught:
        call()
    assert type(caught.value) is cls and isinstance(caught.value, RuntimeError)
    for part in (*parts, "test_error_classes.py:"):
        assert part in str(caught.value), caught.value
    return caught.value


# -- torch's functional collectives, accelerated ---

CALLS = {
    "all_reduce": lambda x, g: c10d.all_reduce(x, "sum", g),
    "all_reduce_": lambda x, g: c10d.all_reduce_(x, "sum", g),
    "all_gather": lambda x, g: c10d.all_gather_into_tensor(x, 2, g),
    "reduce_scatter": lambda x, g: c10d.reduce_scatter_tensor(x, "sum", 2, g),
    "broadcast": lambda x, g: c10d.broadcast(x, 0, g),
}


def accelerated_mismatch(rank, name, as_object):
    group = new_group()
    given = group if as_object else group.group_name

    def call():
        c10d.wait_tensor(CALLS[name](torch.ones(4 + 2 * rank), given))

    with fcoll.accelerate_c10d():
        error = raised(errors.CollectiveMismatch, call, "float32 [4]", "float32 [6]")
        assert error.rank == 1 - rank
        raised(errors.GroupClosed, call, "closed by an earlier error")
    assert fcoll.all_reduce(torch.ones(1)).item() == 2  # other groups go on


@pytest.mark.parametrize("as_object", [False, True], ids=["by name", "by object"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ(shared2, name, as_object):
    shared2.run(accelerated_mismatch, name, as_object)


def accelerated_timeout(rank):
    group = new_group(seconds=1)

    def call():
        c10d.wait_tensor(c10d.all_reduce(torch.ones(2), "sum", group))

    with fcoll.accelerate_c10d():
        call()
        if rank == 0:
            assert raised(errors.CollectiveTimeout, call, "for rank 1").rank == 1
    dist.barrier()  # rank 1 is alive all the while


def test_a_call_that_one_rank_does_not_make(shared2):
    shared2.run(accelerated_timeout)


def in_a_thread(rank):
    """The error reaches a thread that Python made, and the one that waits for it."""
    group, seen = new_group(), []

    def work():
        try:
            c10d.wait_tensor(c10d.all_reduce(torch.ones(2 + rank), "sum", group))
        except errors.CollectiveMismatch as error:
            seen.append(error.rank)

    with fcoll.accelerate_c10d():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [1 - rank]


def test_an_error_in_a_thread(shared2):
    shared2.run(in_a_thread)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        mine = grad[: 1 + dist.get_rank()].contiguous()
        return c10d.wait_tensor(c10d.all_reduce(mine, "sum", ctx.group)), None


def in_backward(rank):
    x, group = torch.ones(4, requires_grad=True), new_group()
    with fcoll.accelerate_c10d():
        error = raised(errors.CollectiveMismatch, lambda: Reduce.apply(x, group).sum().backward())
    assert error.rank == 1 - rank


def test_an_error_in_backward(shared2):
    shared2.run(in_backward)


# -- torch's symmetric memory ---


def symmetric_mismatch(rank):
    group = new_group().group_name
    x, out = symm_mem.empty(4, device="cpu"), torch.empty(4)
    symm_mem.rendezvous(x, group)
    ops, mismatch = torch.ops.symm_mem, errors.CollectiveMismatch
    sizes = [x, x[:2]]
    calls = ["all_reduce(4 float32, sum)", "all_reduce(2 float32, sum)"]
    error = raised(mismatch, lambda: ops.one_shot_all_reduce(sizes[rank], "sum", group), *calls)
    assert error.rank == 1 - rank
    roots = lambda: ops.multimem_one_shot_reduce_out(x, "sum", rank, group, out)  # noqa: E731
    assert raised(mismatch, roots, "to rank 0", "to rank 1").rank == 1 - rank
    other = symm_mem.empty(4 + rank, device="cpu")
    parts = "16 bytes", "20 bytes"
    assert raised(mismatch, lambda: symm_mem.rendezvous(other, group), *parts).rank == 1 - rank
    x.fill_(rank)
    assert ops.one_shot_all_reduce(x, "sum", group).tolist() == [1] * 4  # the memory is usable


def test_symmetric_calls_that_differ(shared2):
    shared2.run(symmetric_mismatch)


def symmetric_timeout(rank):
    group = new_group(seconds=1)
    x = symm_mem.empty(4, device="cpu")
    handle = symm_mem.rendezvous(x, group)
    if rank == 0:
        timeout = errors.CollectiveTimeout
        assert raised(timeout, lambda: handle.barrier(1, 50), "barrier on channel 1").rank == 1
        assert raised(timeout, lambda: handle.wait_signal(1, 2, 50), "wait_signal").rank == 1
        late = symm_mem.empty(4, device="cpu")
        assert raised(timeout, lambda: symm_mem.rendezvous(late, group), "rendezvous").rank == 1
    dist.barrier()


def test_symmetric_memory_that_one_rank_does_not_use(shared2):
    shared2.run(symmetric_timeout)


def wrong_symmetric_calls(rank):
    wrong = errors.BadSymmetricCall
    x = symm_mem.empty(8, device="cpu")
    handle = symm_mem.rendezvous(x, "0")
    raised(wrong, lambda: handle.barrier(10**6), "channel 1000000")
    raised(wrong, lambda: handle.put_signal(7), "rank 7")
    raised(wrong, lambda: torch.ops.symm_mem.one_shot_all_reduce(torch.ones(2), "sum", "0"))
    out = torch.empty(8)
    reduce = torch.ops.symm_mem.multimem_one_shot_reduce_out
    raised(wrong, lambda: reduce(x, "sum", 2, "0", out), "no rank 2 in a group of 2")
    handle.barrier()


def test_wrong_symmetric_calls(shared2):
    shared2.run(wrong_symmetric_calls)


# -- a rank that dies ---


def killed(rank):
    group = new_group()
    x = symm_mem.empty(4, device="cpu")
    handle = symm_mem.rendezvous(x, group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def call():
        c10d.wait_tensor(c10d.all_reduce(torch.ones(2), "sum", group))

    with fcoll.accelerate_c10d():
        assert raised(errors.PeerDied, call, "rank 1").rank == 1
        raised(errors.GroupClosed, call)
    assert raised(errors.PeerDied, handle.barrier, "barrier on channel 0").rank == 1
    one_shot = torch.ops.symm_mem.one_shot_all_reduce
    assert raised(errors.PeerDied, lambda: one_shot(x, "sum", group.group_name)).rank == 1
    return True


@pytest.mark.usefixtures("compiled")
def test_a_dead_peer():
    done = launch(killed, 2, env=NATIVE)
    assert done.results[0] is True, done.stderr[0]
    assert done.exitcodes[1] == -signal.SIGKILL
