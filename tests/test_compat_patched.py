"""With fcoll.compat in the place of torch's functional collectives, torch computes the same.

DTensor, tensor parallelism, FSDP2, DDP and torch.compile run once on torch as it is and once on
torch with every name replaced, in processes of their own, and the results are the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import launch
from test_compat import SPACES, Capture, part
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fcoll import compat
from fcoll._torch import ONE_RANK_CONFIG, work_registry_size

Tensor = torch.Tensor


def patch_torch() -> None:
    for name in compat.__all__:
        setattr(torch.distributed._functional_collectives, name, getattr(compat, name))


class Seen(TorchDispatchMode):
    """Records the collectives that run in eager."""

    def __init__(self, ops: list[str]) -> None:
        super().__init__()
        self.ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in SPACES:
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE_PARALLEL = {
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
}


def redistributed(mesh: DeviceMesh) -> list[Tensor]:
    rank = mesh.get_rank()
    even, odd = part(0, 8, 12), part(1, 7, 5)
    return [
        distribute_tensor(even, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local() * 1,
        distribute_tensor(even, mesh, [Shard(1)]).full_tensor(),
        distribute_tensor(odd, mesh, [Shard(0)]).full_tensor(),
        distribute_tensor(even, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)]).to_local() * 1,
        distribute_tensor(odd, mesh, [Shard(1)]).redistribute(mesh, [Shard(0)]).to_local() * 1,
        *[
            DTensor.from_local(even * (rank + 1), mesh, [Partial(op)])
            .redistribute(mesh, [to])
            .to_local()
            * 1
            for op in ("sum", "avg", "max")
            for to in (Replicate(), Shard(0), Shard(1))
        ],
    ]


def trained(mesh: DeviceMesh, plan: dict, backend: Any = None) -> list[Tensor]:
    """Output and gradients of one step of the parallelized MLP."""
    model = parallelize_module(MLP(), mesh, plan)
    step = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    x = part(7, 4 * mesh.size(), 8)
    if plan is SEQUENCE_PARALLEL:
        x = x.chunk(mesh.size())[mesh.get_rank()].clone()
    y = step(x.requires_grad_())
    y.square().sum().backward()
    return [y.detach() * 1, x.grad * 1, *[p.grad.full_tensor() for p in model.parameters()]]


def data_parallel(rank: int, backend: Any) -> list[Tensor]:
    """DDP whose all_reduces are in the compiled backward."""
    from torch._dynamo import compiled_autograd

    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = nn.parallel.DistributedDataParallel(MLP())
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # torch's
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        y = torch.compile(model, backend=backend)(part(rank, 4, 8))
        y.square().sum().backward()
    return [y.detach(), *[p.grad for p in model.parameters()]]


def fully_sharded(mesh: DeviceMesh) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = MLP()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    y = model(part(mesh.get_rank(), 4, 8))
    y.square().sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [y.detach(), norm.full_tensor(), *[p.grad.full_tensor() for p in model.parameters()]]


def torch_distributed(rank: int, n: int, backend: Any) -> list[Tensor]:
    """The functions of torch.distributed, which Dynamo writes as functional collectives."""
    torch._dynamo.config.enable_p2p_compilation = True
    right, left = (rank + 1) % n, (rank - 1) % n

    def step(x, whole, mine, turned, parts, a, b):
        y = x + rank
        dist.all_reduce(y)
        dist.all_gather_single(whole, x)
        dist.reduce_scatter_single(mine, whole + rank, op=dist.ReduceOp.MAX)
        dist.all_to_all_single(turned, whole + rank)
        dist.all_gather(parts, y * rank)
        ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, a, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        send = dist.isend(y, right)
        receive = dist.irecv(b, left)
        send.wait()
        receive.wait()
        return [y * 1, a + b]

    x = part(rank, 3, 2)
    parts = [torch.zeros(3, 2) for _ in range(n)]
    written = [torch.zeros(3 * n, 2), torch.zeros(3, 2), torch.zeros(3 * n, 2), parts]
    written += [torch.zeros(3, 2), torch.zeros(3, 2)]
    outs = torch.compile(step, backend=backend, fullgraph=True)(x, *written)
    return [*outs, *tree_leaves(written)]


def programs(rank: int, patched: bool) -> tuple[dict[str, list[Tensor]], dict[str, list[str]]]:
    """What they compute, and the collectives that they issue: eager ones run, compiled traced."""
    if patched:
        patch_torch()
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    eager = {
        "redistributed": lambda: redistributed(mesh),
        "tensor parallel": lambda: trained(mesh, TENSOR_PARALLEL),
        "sequence parallel": lambda: trained(mesh, SEQUENCE_PARALLEL),
        "fully sharded": lambda: fully_sharded(mesh),
    }
    compiled: dict[str, Callable[[Any], list[Tensor]]] = {
        "tensor parallel, compiled": lambda backend: trained(mesh, TENSOR_PARALLEL, backend),
        "sequence parallel, compiled": lambda backend: trained(mesh, SEQUENCE_PARALLEL, backend),
        "torch.distributed, compiled": lambda backend: torch_distributed(rank, n, backend),
        "data parallel, compiled": lambda backend: data_parallel(rank, backend),
    }
    values, ops = {}, {}
    for name, program in eager.items():
        with Seen(ops.setdefault(name, [])):
            values[name] = program()
    for name, compiled_program in compiled.items():
        backend = Capture()
        values[name] = compiled_program(backend)
        ops[name] = backend.ops
    return values, ops


def fresh(fn: Callable, world_size: int, *args: Any, init: bool = True) -> list[Any]:
    """The results of new processes: they change torch for good."""
    launched = launch(fn, world_size, *args, timeout=120, init=init)
    assert launched.exitcodes == [0] * world_size, launched.stderr[0]
    return launched.results


@pytest.fixture(scope="module")
def programs_of_torch_and_patched() -> tuple[list, list]:
    return fresh(programs, 2, False), fresh(programs, 2, True)


def issued(ops: list[str]) -> list[str]:
    """Without what is not communication, and with torch's names."""
    ours = [op.replace("_c10d_functional", "fcoll") for op in ops]
    return sorted(op for op in ours if "wait_tensor" not in op and "_wrap_" not in op)


def test_patched_torch_computes_the_same(programs_of_torch_and_patched):
    for (theirs, _), (ours, _) in zip(*programs_of_torch_and_patched, strict=True):
        assert len(ours) == 8
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_patched_torch_runs_on_our_ops(programs_of_torch_and_patched):
    for (_, theirs), (_, ours) in zip(*programs_of_torch_and_patched, strict=True):
        for name, ops in ours.items():
            assert {op for op in ops if op.startswith("_c10d")} <= {
                "_c10d_functional.wait_tensor.default"
            }, name
            assert issued(ops) == issued(theirs[name]), name
            assert issued(ops) or name == "fully sharded"
            assert not any("fcoll" in op for op in theirs[name])


def local_tensor_and_one_rank(rank: int) -> list[Any]:
    """What knows only torch's ops goes on as before, in one process on a fake world of 4."""
    from torch.distributed._local_tensor import LocalTensorMode

    patch_torch()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (4,))
        x = torch.arange(16.0).reshape(4, 4)
        whole = distribute_tensor(x, mesh, [Shard(0)]).full_tensor()
        same = [torch.equal(whole._local_tensors[r], x) for r in range(4)]
    left = work_registry_size()
    mesh = init_device_mesh("cpu", (2, 2))
    backend = Capture()
    ONE_RANK_CONFIG.compile_on_one_rank = True
    step = torch.compile(lambda x: funcol.all_reduce(x, "sum", (mesh, 1)) * 2, backend=backend)
    step(torch.ones(2))
    ONE_RANK_CONFIG.compile_on_one_rank = False
    dist.destroy_process_group()
    return [same, left, backend.ops]


def test_patched_torch_keeps_its_ops_where_only_they_are_known():
    [[same, left, ops]] = fresh(local_tensor_and_one_rank, 1, init=False)
    assert same == [True] * 4 and left == 0
    assert ops == ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
