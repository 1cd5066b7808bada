"""torch.distributed.init_process_group("fcoll"): the calls that a program makes in place, compared
with those of a gloo group of the same ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Launched, launch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fcoll
import fcoll_backend
from fcoll.errors import CollectiveMismatch, PeerDied
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

    for call in (even, uneven):
        same(call, groups)
    outs = lists(groups[0])
    for j, out in enumerate(outs):
        torch.testing.assert_close(out, values(me + j + 1, like=j))


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
    assert future.done() and future.wait()[0] is xs[2]
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
    world.monitored_barrier(timedelta(seconds=TIMEOUT_S))
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
    from torch.nn.parallel import DistributedDataParallel

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


def test_torch_finds_the_name_by_the_entry_point(tmp_path: Path) -> None:
    """As after an installation: the metadata that pyproject.toml makes, in a folder of the path."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"{name} = {function}" for name, function in points["torch.backends"].items()]
    info = tmp_path / "named-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: named\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines]))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60, env=env)


def test_fcoll_registers_the_name() -> None:
    assert dist.Backend._plugins["FCOLL"].creator_fn is fcoll_backend.make
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
