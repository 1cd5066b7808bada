"""A small program for every op of c10d: what torch.distributed calls, on two ranks.

Each takes this rank's tensor [4, 3] and its number, and returns the tensors that were written. In
a batch and on LocalTensors all ranks make rank 0's call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

W = 2
X_W = torch.arange(W * 12.0).view(W, 4, 3) * torch.tensor([1.0, -1.0]).view(W, 1, 1)
Program = Callable[[Tensor, int], list[Tensor]]


class Case(NamedTuple):
    """Of an op, which may have several: the larger of what goes in and out on rank 0, elements."""

    op: str
    program: Program
    elements: int


CASES: dict[str, Case] = {}


def case(op: str, elements: int) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        if hasattr(torch.ops.c10d, op):
            CASES[program.__name__] = Case(op, program, elements)
        return program

    return add


def on_rank(rank: int, name: str) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to rename or drop some
        return CASES[name].program(X_W[rank].clone(), rank)


def _method(*names: str) -> Any:
    """A method of the group, by the name that this version of torch has for it."""
    group: Any = dist.group.WORLD
    return next(getattr(group, name) for name in names if hasattr(group, name))


@case("allreduce_", 12)
def all_reduce(x: Tensor, me: int) -> list[Tensor]:
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return [x]


@case("allreduce_coalesced_", 15)
def all_reduce_coalesced(x: Tensor, me: int) -> list[Tensor]:
    y = x[0] * 2
    dist.all_reduce_coalesced([x, y])
    return [x, y]


@case("reduce_", 12)
def reduce(x: Tensor, me: int) -> list[Tensor]:
    dist.reduce(x, 0)
    return [x]


@case("broadcast_", 12)
def broadcast(x: Tensor, me: int) -> list[Tensor]:
    dist.broadcast(x, 1)
    return [x]


@case("_allgather_base_", 24)
def all_gather_into_tensor(x: Tensor, me: int) -> list[Tensor]:
    out = x.new_zeros(W * 4, 3)
    dist.all_gather_into_tensor(out, x)
    return [out]


@case("_allgather_base_", 24)
def all_gather_into_stack(x: Tensor, me: int) -> list[Tensor]:
    out = x.new_zeros(W, 4, 3)
    dist.all_gather_into_tensor(out, x)
    return [out]


@case("allgather_into_tensor_coalesced_", 30)
def all_gather_into_tensors(x: Tensor, me: int) -> list[Tensor]:
    y = x[0] * 2
    outs = [x.new_zeros(W * 4, 3), x.new_zeros(W * 3)]
    _method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")(outs, [x, y]).wait()
    return outs


@case("allgather_", 24)
def all_gather(x: Tensor, me: int) -> list[Tensor]:
    outs = [torch.zeros_like(x) for _ in range(W)]
    dist.all_gather(outs, x)
    return outs


@case("allgather_coalesced_", 38)
def all_gather_coalesced(x: Tensor, me: int) -> list[Tensor]:
    """Three tensors on two ranks: each list is of one rank."""
    xs = [x, x[0] * 2, x[:, 0] * 3]
    outs = [[torch.zeros_like(t) for t in xs] for _ in range(W)]
    dist.all_gather_coalesced(outs, xs)
    return [t for of_rank in outs for t in of_rank]


@case("_reduce_scatter_base_", 12)
def reduce_scatter_tensor(x: Tensor, me: int) -> list[Tensor]:
    out = x.new_zeros(2, 3)
    dist.reduce_scatter_tensor(out, x)
    return [out]


@case("_reduce_scatter_base_", 12)
def reduce_scatter_of_a_stack(x: Tensor, me: int) -> list[Tensor]:
    out = x.new_zeros(2, 3)
    dist.reduce_scatter_tensor(out, x.view(W, 2, 3), dist.ReduceOp.MAX)
    return [out]


@case("reduce_scatter_tensor_coalesced_", 18)
def reduce_scatter_tensors(x: Tensor, me: int) -> list[Tensor]:
    y = x[:2] * 2
    outs = [x.new_zeros(2, 3), x.new_zeros(1, 3)]
    names = "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
    _method(*names)(outs, [x, y]).wait()
    return outs


@case("reduce_scatter_", 12)
def reduce_scatter(x: Tensor, me: int) -> list[Tensor]:
    out = x.new_zeros(2, 3)
    dist.reduce_scatter(out, [x[:2].clone(), x[2:].clone()])
    return [out]


@case("gather_", 24)
def gather(x: Tensor, me: int) -> list[Tensor]:
    outs = [torch.zeros_like(x) for _ in range(W)]
    dist.gather(x, outs if me == 0 else None, 0)
    return outs


@case("gather_into_tensor_", 24)
def gather_single(x: Tensor, me: int) -> list[Tensor]:
    out = x.new_zeros(W * 4, 3)
    dist.gather_single(x, out if me == 0 else None, 0)
    return [out]


@case("scatter_", 12)
def scatter(x: Tensor, me: int) -> list[Tensor]:
    out = x.new_zeros(2, 3)
    dist.scatter(out, [x[:2].clone(), x[2:].clone()] if me == 0 else None, 0)
    return [out]


@case("alltoall_", 12)
def all_to_all(x: Tensor, me: int) -> list[Tensor]:
    outs = [x.new_zeros(2, 3) for _ in range(W)]
    dist.all_to_all(outs, [x[:2].clone(), x[2:].clone()])
    return outs


@case("alltoall_base_", 12)
def all_to_all_single(x: Tensor, me: int) -> list[Tensor]:
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x)
    return [out]


@case("alltoall_base_", 12)
def all_to_all_single_split(x: Tensor, me: int) -> list[Tensor]:
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x, [2, 2], [2, 2])
    return [out]


@case("barrier", 0)
def barrier(x: Tensor, me: int) -> list[Tensor]:
    dist.barrier()
    return [x]


@case("monitored_barrier_", 0)
def monitored_barrier(x: Tensor, me: int) -> list[Tensor]:
    _method("monitored_barrier")()
    return [x]


# -- where ranks differ: no batch can run them ---


@case("allgather_", 9)
def all_gather_uneven(x: Tensor, me: int) -> list[Tensor]:
    outs = [x.new_zeros(r + 1, 3) for r in range(W)]
    dist.all_gather(outs, x[: me + 1].clone())
    return outs


@case("reduce_scatter_", 12)
def reduce_scatter_uneven(x: Tensor, me: int) -> list[Tensor]:
    out = x.new_zeros(2 * me + 1, 3)
    dist.reduce_scatter(out, [x[:1].clone(), x[1:].clone()])
    return [out]


@case("alltoall_", 12)
def all_to_all_uneven(x: Tensor, me: int) -> list[Tensor]:
    outs = [x.new_zeros(2 * me + 1, 3) for _ in range(W)]
    dist.all_to_all(outs, [x[:1].clone(), x[1:].clone()])
    return outs


@case("send", 12)
def send(x: Tensor, me: int) -> list[Tensor]:
    (dist.send if me == 0 else dist.recv)(x, 1 - me)
    return [x]


@case("recv_", 12)
def recv(x: Tensor, me: int) -> list[Tensor]:
    (dist.recv if me == 0 else dist.send)(x, 1 - me)
    return [x]


@case("recv_any_source_", 12)
def recv_any_source(x: Tensor, me: int) -> list[Tensor]:
    dist.recv(x) if me == 0 else dist.send(x, 0)
    return [x]


# -- methods of groups: they take lists and c10d's options, or tensors ---


@case("allreduce_", 12)
def method_all_reduce(x: Tensor, me: int) -> list[Tensor]:
    dist.group.WORLD.allreduce(x, dist.ReduceOp.MAX).wait()
    return [x]


@case("reduce_", 12)
def method_reduce(x: Tensor, me: int) -> list[Tensor]:
    dist.group.WORLD.reduce(x, 0, dist.ReduceOp.MIN).wait()
    return [x]


@case("broadcast_", 12)
def method_broadcast(x: Tensor, me: int) -> list[Tensor]:
    dist.group.WORLD.broadcast(x, root=1).wait()
    return [x]


@case("allgather_", 24)
def method_all_gather(x: Tensor, me: int) -> list[Tensor]:
    outs = [torch.zeros_like(x) for _ in range(W)]
    dist.group.WORLD.allgather(outs, x).wait()
    return outs


@case("reduce_scatter_", 12)
def method_reduce_scatter(x: Tensor, me: int) -> list[Tensor]:
    out = x.new_zeros(2, 3)
    dist.group.WORLD.reduce_scatter(
        out, [x[:2].clone(), x[2:].clone()], op=dist.ReduceOp.MAX
    ).wait()
    return [out]


@case("alltoall_base_", 12)
def method_all_to_all(x: Tensor, me: int) -> list[Tensor]:
    out = torch.zeros_like(x)
    dist.group.WORLD.alltoall_base(out, x, [], []).wait()
    return [out]
