"""torch.distributed.init_process_group("fcoll"): the calls that a program makes in place, compared
with those of a gloo group of the same ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Launched, launch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fcoll
import fcoll_backend
from fcoll.errors import CollectiveMismatch, CollectiveTimeout, GroupClosed, PeerDied
from fcoll.transport import shared_memory

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30
ON_SHARED_MEMORY = {"FCOLL_NATIVE": "1"}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.uint8, torch.int8, torch.int32, torch.int64)
OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "PRODUCT", "MIN", "MAX")}
BITS = {name: getattr(dist.ReduceOp, name) for name in ("BAND", "BOR", "BXOR")}


def run(
    fn: Callable, n: int, *args: Any, env: dict[str, str] | None = None, timeout: float = 90
) -> Launched:
    """On ranks whose default group is of the backend; no rank may fail."""
    made = launch(fn, n, *args, init=False, env=ON_SHARED_MEMORY | (env or {}), timeout=timeout)
    for rank, error in enumerate(made.errors):
        assert error is None, f"rank {rank}: {error!r}\n{made.stderr[rank]}"
    assert made.exitcodes == [0] * n
    return made


def join(backend: str = "fcoll") -> tuple[Any, Any]:
    """The default group, and one of gloo to compare with."""
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    return dist.group.WORLD, dist.new_group(backend="gloo")


def values(*shape: int, dtype: torch.dtype = torch.float32, like: int | None = None) -> Tensor:
    """Powers of two, so that no order of a reduction rounds; each rank has its own."""
    seed = dist.get_rank() if like is None else like
    made = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)) + 1
    return made.to(dtype)


def same(call: Callable[[Any], Any], groups: tuple[Any, Any]) -> None:
    """The call gives the same on both groups, or raises on both."""
    results = [call(group) for group in groups]
    torch.testing.assert_close(*results, rtol=0, atol=0)


# -- the collectives ---


def reductions(groups: tuple[Any, Any]) -> None:
    for dtype in FLOATS + INTS:
        for op in (OPS if dtype in FLOATS else OPS | BITS).values():

            def in_place(group: Any, dtype: Any = dtype, op: Any = op) -> Tensor:
                x = values(3, 5, dtype=dtype)
                dist.all_reduce(x, op, group=group)
                return x

            same(in_place, groups)
    for size in (0, 1, 70_000, 1_200_000):  # none, one, in two passes on 4 ranks, beyond the ring

        def long(group: Any, size: int = size) -> Tensor:
            x = values(size)
            dist.all_reduce(x, group=group)
            return x

        same(long, groups)


def factors(groups: tuple[Any, Any]) -> None:
    """Sums with a factor, which gloo has not: FSDP2 divides by any number with them."""
    world, me, n = groups[0], dist.get_rank(), dist.get_world_size()
    half = dist.ReduceOp.PREMUL_SUM(0.5)
    total = sum(values(4 * n, 3, like=r) for r in range(n)) / 2
    for dtype in FLOATS:
        x = values(4 * n, 3, dtype=dtype)
        part = torch.zeros(4, 3, dtype=dtype)
        dist.reduce_scatter_single(part, x, half, group=world)
        torch.testing.assert_close(part, total[4 * me : 4 * me + 4].to(dtype))
        torch.testing.assert_close(x, values(4 * n, 3, dtype=dtype))  # an input stays as it is
        dist.all_reduce(x, half, group=world)
        torch.testing.assert_close(x, total.to(dtype))
    own = dist.ReduceOp.PREMUL_SUM(torch.tensor([float(me + 1)]))  # a tensor, each rank its own
    x = torch.ones(4, n).t()
    dist.reduce(x, 0, own, group=world)
    assert x.unique().tolist() == [sum(range(n + 1)) if me == 0 else 1]
    with pytest.raises(RuntimeError, match="PREMUL_SUM"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), half, group=world)
    dist.barrier(group=world)


def to_a_root(groups: tuple[Any, Any]) -> None:
    for root in range(dist.get_world_size()):

        def reduce(group: Any, root: int = root) -> Tensor:
            x = values(7)
            dist.reduce(x, root, group=group)
            return x if dist.get_rank() == root else torch.zeros(7)

        def broadcast(group: Any, root: int = root) -> Tensor:
            x = values(7)
            dist.broadcast(x, root, group=group)
            return x

        def gather(group: Any, root: int = root) -> list[Tensor]:
            n, mine = dist.get_world_size(), dist.get_rank() == root
            outs = [torch.zeros(2, 3) for _ in range(n)] if mine else None
            dist.gather(values(2, 3), outs, root, group=group)
            return outs or []

        def scatter(group: Any, root: int = root) -> Tensor:
            n, mine = dist.get_world_size(), dist.get_rank() == root
            out = torch.zeros(2, 3)
            ins = [values(2, 3, like=i) for i in range(n)] if mine else None
            dist.scatter(out, ins, root, group=group)
            return out

        for call in (reduce, broadcast, gather, scatter):
            same(call, groups)


def parts(groups: tuple[Any, Any]) -> None:
    n = dist.get_world_size()

    def all_gather(group: Any) -> list[Tensor]:
        outs = [torch.zeros(3) for _ in range(n)]
        dist.all_gather(outs, values(3), group=group)
        return outs

    def all_gather_views(group: Any) -> Tensor:
        out = torch.zeros(n, 3)
        dist.all_gather(list(out.unbind()), values(3), group=group)
        return out

    def all_gather_into_tensor(group: Any) -> Tensor:
        out = torch.zeros(n * 3, 2)
        dist.all_gather_single(out, values(3, 2), group=group)
        return out

    def all_gather_in_place(group: Any) -> Tensor:
        out = torch.zeros(n * 300)
        mine = out.view(n, 300)[dist.get_rank()]
        mine += values(300)
        dist.all_gather_single(out, mine, group=group)
        return out

    def reduce_scatter(group: Any) -> Tensor:
        out = torch.zeros(3)
        dist.reduce_scatter(out, [values(3) + i for i in range(n)], group=group)
        return out

    def reduce_scatter_tensor(group: Any) -> Tensor:
        out = torch.zeros(3, 2)
        dist.reduce_scatter_single(out, values(n * 3, 2), group=group)
        return out

    for call in (
        all_gather,
        all_gather_views,
        all_gather_into_tensor,
        all_gather_in_place,
        reduce_scatter,
        reduce_scatter_tensor,
    ):
        same(call, groups)


def exchanges(groups: tuple[Any, Any]) -> None:
    n, me = dist.get_world_size(), dist.get_rank()

    def even(group: Any) -> Tensor:
        out = torch.zeros(2 * n, 3)
        dist.all_to_all_single(out, values(2 * n, 3), group=group)
        return out

    def uneven(group: Any) -> Tensor:  # rank i sends i + j rows to rank j: 0 to itself from rank 0
        sent = [me + j for j in range(n)]
        out = torch.zeros(sum(sent), 2)
        dist.all_to_all_single(out, values(sum(sent), 2), sent, sent, group=group)
        return out

    def lists(group: Any) -> list[Tensor]:
        outs = [torch.zeros(me + j + 1) for j in range(n)]
        dist.all_to_all(outs, [values(me + j + 1) for j in range(n)], group=group)
        return outs

    def even_lists(group: Any) -> list[Tensor]:
        outs = [torch.zeros(5) for _ in range(n)]
        dist.all_to_all(outs, [values(5) * j for j in range(n)], group=group)
        return outs

    for call in (even, uneven, even_lists):
        same(call, groups)
    for group in groups:
        with pytest.raises(RuntimeError, match="invalid tensor size"):
            lists(group)


def as_they_come(groups: tuple[Any, Any]) -> None:
    """Tensors that are not one piece of memory, and dtypes and ops that gloo has not."""
    world, n = groups[0], dist.get_world_size()
    x = torch.zeros(4, 6).t()[::2]
    x += values(3, 4)
    total = sum(values(3, 4, like=r) for r in range(n))
    dist.all_reduce(x, group=world)
    torch.testing.assert_close(x, total)
    out = torch.zeros(n * 4, 3).t()
    dist.all_gather_single(out.t(), values(4, 3).t().contiguous().t(), group=world)
    torch.testing.assert_close(out.t(), torch.cat([values(4, 3, like=r) for r in range(n)]))
    y = values(3, 4, like=n - 1).t() if dist.get_rank() == n - 1 else torch.zeros(4, 3)
    dist.broadcast(y, n - 1, group=world)
    torch.testing.assert_close(y, values(3, 4, like=n - 1).t().contiguous())
    mean = values(5)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=world)
    torch.testing.assert_close(mean, sum(values(5, like=r) for r in range(n)) / n)
    small = values(5, dtype=torch.int16)
    dist.all_reduce(small, group=world)
    assert small.dtype == torch.int16
    p = torch.nn.Parameter(values(2, 3).t())  # a leaf, and not contiguous
    dist.broadcast(p, 0, group=world)
    torch.testing.assert_close(p.detach(), values(2, 3, like=0).t())


def coalesced(groups: tuple[Any, Any]) -> None:
    n = dist.get_world_size()

    def all_reduce(group: Any) -> list[Tensor]:
        xs = [values(3), values(2, 2)]
        with dist._coalescing_manager(group):
            for x in xs:
                dist.all_reduce(x, group=group)
        return xs

    def all_gather(group: Any) -> list[Tensor]:
        outs = [torch.zeros(n * 3), torch.zeros(n * 2, 2)]
        with dist._coalescing_manager(group):
            dist.all_gather_single(outs[0], values(3), group=group)
            dist.all_gather_single(outs[1], values(2, 2), group=group)
        return outs

    def reduce_scatter(group: Any) -> list[Tensor]:
        outs = [torch.zeros(3), torch.zeros(2, 2)]
        with dist._coalescing_manager(group):
            dist.reduce_scatter_single(outs[0], values(n * 3), group=group)
            dist.reduce_scatter_single(outs[1], values(n * 2, 2), group=group)
        return outs

    for call in (all_reduce, all_gather, reduce_scatter):
        same(call, groups)


# -- what is above and beside them ---


def objects(groups: tuple[Any, Any]) -> None:
    world, me, n = groups[0], dist.get_rank(), dist.get_world_size()
    everyone: list = [None] * n
    dist.all_gather_object(everyone, {"rank": me, "text": "x" * me}, group=world)
    assert [each["rank"] for each in everyone] == list(range(n))
    told = [("a", 1), None] if me == 0 else [None, None]
    dist.broadcast_object_list(told, 0, group=world)
    assert told == [("a", 1), None]
    mine: list = [None]
    dist.scatter_object_list(mine, list(range(n)) if me == 0 else None, 0, group=world)
    assert mine == [me]
    gathered: list | None = [None] * n if me == 0 else None
    dist.gather_object(me, gathered, 0, group=world)
    assert gathered in (None, list(range(n)))


def asynchronous(groups: tuple[Any, Any]) -> None:
    world, n = groups[0], dist.get_world_size()
    xs = [torch.full((size,), float(i)) for i, size in enumerate((4, 100_000, 1))]
    works = [dist.all_reduce(x, async_op=True, group=world) for x in xs]
    works.append(dist.barrier(async_op=True, group=world))
    for work in reversed(works):
        work.wait()
        assert work.is_completed() and work.is_success()
    for i, x in enumerate(xs):
        assert (x == i * n).all()
    work = dist.all_reduce(xs[0], async_op=True, group=world)
    while not work.is_completed():
        pass
    assert work.result()[0] is xs[0]
    future = dist.broadcast(xs[2], 0, async_op=True, group=world).get_future()
    assert future.wait()[0] is xs[2]
    doubled = dist.all_reduce(xs[2], async_op=True, group=world).get_future()
    assert doubled.then(lambda f: f.value()[0] * 2).wait().item() == 2 * xs[2].item()


def given_to_gloo(groups: tuple[Any, Any]) -> None:
    """Messages between pairs, sparse tensors; and what gloo refuses."""
    world, me, n = groups[0], dist.get_rank(), dist.get_world_size()
    to, source = (me + 1) % n, (me - 1) % n
    out, x = torch.zeros(3), values(3)
    ops = [dist.P2POp(dist.isend, x, to, world), dist.P2POp(dist.irecv, out, source, world)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    torch.testing.assert_close(out, values(3, like=source))
    if me == 0:
        senders = {dist.recv(out, group=world) for _ in range(n - 1)}
        assert senders == set(range(1, n))
    else:
        dist.send(x, 0, group=world)
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse, group=world)
    torch.testing.assert_close(sparse.to_dense(), torch.eye(3) * n)
    dist.monitored_barrier(world, timedelta(seconds=TIMEOUT_S))
    dist.monitored_barrier(groups[1])
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG, group=world)
    with pytest.raises((RuntimeError, ValueError)):
        dist.reduce_scatter_single(torch.zeros(3), torch.zeros(3 * n + 1), group=world)
    dist.barrier(group=world)


def same_memory_as_fcoll(groups: tuple[Any, Any]) -> None:
    """fcoll's own ops use the memory of the backend, in turns with torch's."""
    world, n = groups[0], dist.get_world_size()
    x = values(4)
    status = shared_memory.status_of(fcoll.groups.resolve(world))
    assert status.shared and status.handle == world._get_backend(torch.device("cpu")).handle
    total = sum(values(4, like=r) for r in range(n))
    ours = fcoll.all_reduce(x, "sum")
    dist.all_reduce(x)
    torch.testing.assert_close(ours + 0, total)
    torch.testing.assert_close(x, total)


def of_a_group(groups: tuple[Any, Any]) -> None:
    """Names, options, numbers, groups of some ranks, a mesh."""
    world, me, n = groups[0], dist.get_rank(), dist.get_world_size()
    backend = world._get_backend(torch.device("cpu"))
    assert dist.get_backend() == "fcoll" == backend.name()
    assert backend.options._timeout == timedelta(seconds=TIMEOUT_S)
    before = backend._get_sequence_number_for_group()
    dist.barrier()
    assert backend._get_sequence_number_for_group() == before + 1
    pair = dist.new_group([n - 1, 0])
    assert dist.get_backend(pair if me in (0, n - 1) else world) == "fcoll"
    if me in (0, n - 1):
        x = torch.ones(2)
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [2, 2]
        dist.destroy_process_group(pair)
    both = [dist.new_group(), dist.new_group()]  # used in another order on each rank
    xs = [torch.ones(2), torch.ones(2)]
    order = (0, 1) if me % 2 else (1, 0)
    for work in [dist.all_reduce(xs[i], group=both[i], async_op=True) for i in order]:
        work.wait()
    assert all(x.tolist() == [n, n] for x in xs)
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.ones(1)
    dist.all_reduce(x, group=mesh["tp"].get_group())
    assert x.item() == 2


def profiled(groups: tuple[Any, Any]) -> None:
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(4), group=groups[0])
    assert "fcoll:all_reduce" in {event.name for event in profile.events()}


CHECKS = (
    reductions,
    factors,
    to_a_root,
    parts,
    exchanges,
    as_they_come,
    coalesced,
    objects,
    asynchronous,
    given_to_gloo,
    same_memory_as_fcoll,
    of_a_group,
    profiled,
)


def all_checks(rank: int) -> None:
    groups = join()
    for check in CHECKS:
        try:
            check(groups)
        except BaseException as error:
            error.add_note(f"in {check.__name__}")
            raise
    dist.destroy_process_group()


@pytest.mark.parametrize("n", [2, 4])
def test_every_call_gives_what_gloo_gives(compiled: None, n: int) -> None:
    run(all_checks, n)


# -- what is built on the calls ---


def steps(groups: tuple[Any, Any]) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def ddp(group: Any, hook: Any = None) -> list[Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(8, 4), process_group=group)
        if hook:
            model.register_comm_hook(group, hook)
        model(values(2, 8)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    same(ddp, groups)
    same(lambda group: ddp(group, fp16_compress_hook), groups)


def fully_sharded_step(mesh: DeviceMesh) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    fully_shard(model, mesh=mesh)
    model(values(2, 8)).square().sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def redistributed(mesh: DeviceMesh) -> list[Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = distribute_tensor(values(8, 8, like=0), mesh, [Shard(0)])
    moved = x.redistribute(mesh, [Shard(1)])
    whole = moved.redistribute(mesh, [Replicate()])
    return [moved.to_local(), whole.to_local(), x.sum().full_tensor()]


def training(rank: int) -> None:
    groups = join()
    steps(groups)
    for program in (fully_sharded_step, redistributed):
        same(lambda group: program(DeviceMesh.from_group(group, "cpu")), groups)  # noqa: B023
    dist.destroy_process_group()


def test_ddp_fsdp_and_dtensor_run_on_it(compiled: None) -> None:
    run(training, 2)


# -- mistakes and ends ---


def differing(rank: int) -> list[str]:
    said = []
    join()
    for mine, theirs in (
        (lambda g: dist.all_reduce(torch.ones(2), group=g), lambda g: dist.barrier(group=g)),
        (
            lambda g: dist.all_reduce(torch.ones(2), group=g),
            lambda g: dist.all_reduce(torch.ones(3), group=g),
        ),
        (
            lambda g: dist.all_reduce(torch.ones(2), group=g),
            lambda g: dist.all_reduce(torch.eye(2).to_sparse(), group=g),  # which gloo takes
        ),
        (
            lambda g: dist.broadcast(torch.ones(2), 0, group=g),
            lambda g: dist.broadcast(torch.ones(2), 1, group=g),
        ),
    ):
        group = dist.new_group()
        with pytest.raises(CollectiveMismatch) as caught:
            (theirs if rank else mine)(group)
        said.append(str(caught.value))
    return said


def test_calls_that_differ_raise_on_all_ranks(compiled: None) -> None:
    for said in run(differing, 2).results:
        assert all("test_backend.py:" in message for message in said)
        assert "all_reduce(float32 [3]" in said[1]


def dying(rank: int) -> None:
    join()
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDied) as caught:
        dist.all_reduce(torch.ones(1))
    assert caught.value.rank == 1
    with pytest.raises(PeerDied, match=r"rank 1 died.*test_backend\.py"):
        dist.new_group()


def test_a_dead_peer_is_named(compiled: None) -> None:
    made = launch(dying, 2, init=False, env=ON_SHARED_MEMORY)
    assert (made.errors[0], made.exitcodes[1]) == (None, -signal.SIGKILL), made.stderr[0]


# -- calls that the program goes on without ---


LARGE = 700_000  # elements: more than the ring holds at once


def goes_on(rank: int) -> None:
    """Rank 1 makes its call only when rank 0 has gone on from its own."""
    _, gloo = join()
    word, splits = torch.zeros(1), [1, 1]
    for size in (3, LARGE):
        xs = torch.full((2, size), rank + 1.0)
        others = [torch.zeros(2, size), torch.zeros(2, size // 2)]
        calls: list[Callable[[], Any]] = [
            lambda xs=xs: dist.all_reduce(xs, async_op=True),
            lambda xs=xs, o=others: dist.all_to_all_single(o[0], xs, splits, splits, async_op=True),
            lambda xs=xs, o=others: dist.all_gather(list(o[0]), xs[0], async_op=True),
        ]
        for call in calls:
            if rank == 1:
                dist.recv(word, 0, group=gloo)
            work = call()
            future = work.get_future()
            if rank == 0:
                assert not future.done() and not work.is_completed()
                with pytest.raises(CollectiveTimeout, match="goes on"):
                    work.wait(timedelta(milliseconds=20))
                dist.send(word, 1, group=gloo)
            work.wait()
            assert future.wait() is not None and work.is_completed()
        assert (xs == 3).all() and (others[0] == 3).all()
    # a call behind one that is under way waits for it; so do fcoll's own
    if rank == 1:
        dist.recv(word, 0, group=gloo)
    first = dist.all_reduce(xs, async_op=True)
    small = dist.all_reduce(word, async_op=True)
    if rank == 0:
        assert not small.is_completed()
        dist.send(word.clone(), 1, group=gloo)
    assert (fcoll.all_reduce(torch.ones(2), "sum") == 2).all()
    assert first.is_completed() and small.is_completed() and (xs == 6).all()


def in_another_order_on_two_groups(rank: int) -> None:
    join()
    groups = [dist.new_group(backend="fcoll") for _ in range(2)]
    xs = [torch.ones(LARGE) for _ in groups]
    works = [None, None]
    for i in (0, 1) if rank == 0 else (1, 0):
        works[i] = dist.all_reduce(xs[i], group=groups[i], async_op=True)
    for work in works:
        work.wait()
    assert all((x == 2).all() for x in xs)


def in_callbacks(rank: int) -> None:
    """What a callback calls comes before all calls that were made after its own."""
    join()
    values = [torch.full((size,), rank + 1.0) for size in (LARGE, LARGE // 7, 2)]
    inner = [torch.full((i + 1,), rank + 1.0) for i in range(3)]

    def also(i: int) -> Callable[[Any], Any]:
        def callback(_: Any) -> Tensor:
            dist.all_reduce(inner[i])
            return inner[i]

        return callback

    for _ in range(5):
        ends = []
        for i, x in enumerate(values):
            ends.append(dist.all_reduce(x, async_op=True).get_future().then(also(i)))
            if (i + rank) % 2:
                ends[-1].wait()
        assert all((f.wait() == f.wait()[0]).all() for f in ends)
    for x in values + inner:
        assert (x == 3 * 2**4).all()


def compressed(rank: int) -> list[Tensor]:
    """PowerSGD calls collectives in the callbacks of others, for several buckets at once."""
    torch.manual_seed(0)
    group, _ = join()
    module = torch.nn.Sequential(*[torch.nn.Linear(40, 40) for _ in range(6)])
    ddp = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.01)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(3, 40)).square().sum().backward()
    return [p.grad for p in module.parameters()]


def fails_later(rank: int) -> None:
    join()
    futures = []
    with pytest.raises(CollectiveMismatch, match=f"{LARGE}.*{LARGE + 1}|{LARGE + 1}.*{LARGE}"):
        work = dist.all_reduce(torch.ones(LARGE + rank), async_op=True)  # here if the peer is there
        futures.append(work.get_future().then(lambda f: f.value()))
        work.wait()
    for failed in futures:
        with pytest.raises((CollectiveMismatch, RuntimeError), match="where rank"):
            failed.wait()
    with pytest.raises(GroupClosed):
        dist.all_reduce(torch.ones(2), async_op=True).wait()
    dist.destroy_process_group()
    dist.init_process_group("fcoll", timeout=timedelta(seconds=TIMEOUT_S))
    x = torch.ones(LARGE)
    dist.all_reduce(x, async_op=True)
    dist.barrier()
    assert (x == 2).all()
    dist.all_reduce(x, async_op=True)  # nobody waits: peers get this rank's part all the same
    dist.destroy_process_group()
    assert (x == 4).all()


@pytest.mark.parametrize(
    "program", [goes_on, in_another_order_on_two_groups, in_callbacks, fails_later]
)
def test_calls_that_the_program_goes_on_without(compiled: None, program: Callable) -> None:
    run(program, 2)


def test_powersgd_with_several_buckets(compiled: None) -> None:
    first, second = run(compressed, 2).results
    torch.testing.assert_close(first, second)


def as_of_gloo(rank: int) -> None:
    """Calls that torch has for groups of gloo alone."""
    for size in (2, 1):
        group = dist.new_group(list(range(size))) if dist.is_initialized() else join()[0]
        if rank >= size:
            continue
        dist.monitored_barrier(group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # from torch 2.15 on: dist.set_timeout
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7), group)
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
        before = group._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(2), group=group)
        assert group._get_sequence_number_for_group() == before + 1
        model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
        assert model._get_ddp_logging_data()["backend_name"] == "fcoll"


def test_calls_that_torch_has_for_gloo_alone(compiled: None) -> None:
    run(as_of_gloo, 2)


def one_call_timeout(rank: int) -> None:
    """The timeout of one call is over long before that of the group."""
    world, gloo = join()
    options = dist.AllreduceOptions()
    options.timeout, options.asyncOp = timedelta(milliseconds=200), False
    x, word = torch.ones(3), torch.ones(1)
    world.allreduce([x], options).wait()  # both make it
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            world.allreduce([x], options)
        dist.send(word, 1, group=gloo)
    else:
        dist.recv(word, 0, group=gloo)
        dist.all_reduce(x)  # rank 0's part was there
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            dist.all_reduce(x)


def test_one_call_has_a_timeout_of_its_own(compiled: None) -> None:
    run(one_call_timeout, 2, timeout=TIMEOUT_S - 5)


def with_nans(rank: int) -> None:
    join()
    x = torch.tensor([1.0, float("nan")]) if rank == 0 else torch.ones(2)
    if rank == 0:
        with pytest.raises(ValueError, match="NaN"):
            dist.all_reduce(x)
        x = torch.ones(2)
    dist.all_reduce(x)
    assert (x == 2).all()
    out = torch.full((2,), float("nan")) if rank else torch.ones(2)
    dist.broadcast(out, 0)  # what is only written to may be anything
    assert (out == 1).all()


def test_nans_are_refused_on_request(compiled: None) -> None:
    run(with_nans, 2, env={"TORCH_NCCL_NAN_CHECK": "1"})


def without_shared_memory(rank: int) -> None:
    world, _ = join()
    assert dist.get_backend() == "fcoll"
    for check in (reductions, to_a_root, objects):
        check((world, world))
    assert fcoll.all_reduce(torch.ones(1)).item() == 2
    dist.destroy_process_group()


def test_gloo_takes_all_where_there_is_no_shared_memory() -> None:
    made = run(without_shared_memory, 2, env={"FCOLL_NATIVE": "0"})
    assert "hands all collectives to gloo: FCOLL_NATIVE=0" in made.stderr[0]


def worlds(rank: int) -> None:
    """One after the other, in one store: named for a device, split, and of one rank."""
    for backend in ("cpu:fcoll", "fcoll"):
        dist.init_process_group(backend)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 4
        # dist.split_group wants an accelerator
        half = dist.group.WORLD.split_group([[0, 1], [2, 3]][rank // 2], group_name="half")
        half.allreduce([x]).wait()
        assert x.item() == 8 and half._get_backend(torch.device("cpu")).name() == "fcoll"
        half.shutdown()
        dist.destroy_process_group()
    dist.init_process_group("fcoll", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(x)
    assert x.item() == 8
    dist.destroy_process_group()


def slow_to_connect(rank: int) -> None:
    """No rank has its group, which it might end at once, while another is still connecting."""
    store = dist.FileStore(os.environ["CONNECTED"], -1)
    gloo = dist.ProcessGroupGloo

    def connect(*args: Any) -> Any:
        made = gloo(*args)
        if rank == 1:
            time.sleep(0.5)
            store.set("connected", "1")
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupGloo", connect)
        dist.init_process_group("fcoll")
    assert store.check(["connected"])


def test_a_group_is_there_when_all_ranks_are_connected(compiled: None, tmp_path: Path) -> None:
    run(slow_to_connect, 3, env={"CONNECTED": str(tmp_path / "store")})


def test_worlds_are_made_one_after_the_other_split_and_of_one(compiled: None) -> None:
    run(worlds, 4)


# -- the name ---


PROGRAM = """
import sys, torch, torch.distributed as dist
assert "fcoll" not in sys.modules  # it is not worth the time of programs that do not ask for it
dist.init_process_group("fcoll", store=dist.HashStore(), rank=0, world_size=1)
import fcoll, fcoll_backend
assert dist.Backend._plugins["FCOLL"].creator_fn is fcoll_backend.make
assert fcoll.all_reduce(torch.ones(1)).item() == 1
"""


def torch_finds_fcoll(folder: Path) -> str:
    """As after an installation: the metadata that pyproject.toml makes, in a folder of the path."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"{name} = {function}" for name, function in points["torch.backends"].items()]
    info = folder / "named-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: named\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines]))
    return os.pathsep.join([str(folder), str(ROOT)])


def test_torch_finds_the_name_by_the_entry_point(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": torch_finds_fcoll(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60, env=env)


def test_fcoll_registers_the_name() -> None:
    assert dist.Backend._plugins["FCOLL"].creator_fn is fcoll_backend.make
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


def profiled_messages(rank: int) -> None:
    dist.init_process_group("fcoll")
    x = torch.full((2,), float(rank))
    with torch.profiler.profile(record_shapes=True) as seen:
        if rank == 0:
            dist.send(x, 1)
        else:
            assert dist.recv(x) == 0  # of any rank
            assert x.tolist() == [0, 0]
    events = {event.name: event.input_shapes for event in seen.events()}
    assert events["fcoll:recvAnySource" if rank else "fcoll:send"] == [[2]], events
    dist.destroy_process_group()


def test_a_profile_shows_messages_as_the_backends(compiled: None) -> None:
    run(profiled_messages, 2)
