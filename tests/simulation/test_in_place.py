"""torch.distributed's own calls inside fcoll.simulate write what they write on ranks in threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fcoll

Tensor = torch.Tensor
W = 4
MESH = {"dp": 2, "tp": 2}
X_W = torch.arange(W * 8.0).view(W, 8) + 1
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def all_reduce(x: Tensor, g: Any) -> Tensor:
    dist.all_reduce(x, group=g)
    return x


def all_reduce_async(x: Tensor, g: Any) -> Tensor:
    work = dist.all_reduce(x, dist.ReduceOp.MAX, group=g, async_op=True)
    work.wait()
    return x


def broadcast(x: Tensor, g: Any) -> Tensor:
    dist.broadcast(x, group=g, group_src=1)
    return x


def reduce(x: Tensor, g: Any) -> Tensor:
    y = x.clone()
    dist.reduce(y, group=g, group_dst=0)
    return torch.where(fcoll.rank(g) == 0, y, x) if fcoll_inside(x) else (y if _root(g) else x)


def fcoll_inside(x: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(x)


def _root(g: Any) -> bool:
    return dist.get_rank(g) == 0


def all_gather_into_tensor(x: Tensor, g: Any) -> Tensor:
    y = x.new_empty(dist.get_world_size(g) * 8)
    dist.all_gather_into_tensor(y, x, group=g)
    return y


def all_gather(x: Tensor, g: Any) -> Tensor:
    ys = [x.new_empty(8) for _ in range(dist.get_world_size(g))]
    dist.all_gather(ys, x, group=g)
    return torch.stack(ys)


def reduce_scatter_tensor(x: Tensor, g: Any) -> Tensor:
    y = x.new_empty(8 // dist.get_world_size(g))
    dist.reduce_scatter_tensor(y, x, group=g)
    return y


def reduce_scatter(x: Tensor, g: Any) -> Tensor:
    n = dist.get_world_size(g)
    y = x.new_empty(8 // n)
    dist.reduce_scatter(y, [t.clone() for t in x.chunk(n)], group=g)
    return y


def all_to_all_single(x: Tensor, g: Any) -> Tensor:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x, group=g)
    return y


def all_to_all(x: Tensor, g: Any) -> Tensor:
    n = dist.get_world_size(g)
    ys = [x.new_empty(8 // n) for _ in range(n)]
    dist.all_to_all(ys, [t.clone() for t in x.chunk(n)], group=g)
    return torch.cat(ys)


def scatter(x: Tensor, g: Any) -> Tensor:
    n = dist.get_world_size(g)
    y = x.new_empty(8 // n)
    mine = fcoll_inside(x) or _root(g)
    dist.scatter(y, [t.clone() for t in x.chunk(n)] if mine else None, group=g, group_src=0)
    return y


def gather(x: Tensor, g: Any) -> Tensor:
    n = dist.get_world_size(g)
    ys = [x.new_zeros(8) for _ in range(n)]
    dist.gather(x, ys if fcoll_inside(x) or _root(g) else None, group=g, group_dst=0)
    return torch.stack(ys)


def gather_single(x: Tensor, g: Any) -> Tensor:
    y = x.new_zeros(dist.get_world_size(g) * 8)
    dist.gather_single(x, y if fcoll_inside(x) or _root(g) else None, group=g, group_dst=0)
    return y


def barrier(x: Tensor, g: Any) -> Tensor:
    dist.barrier(group=g)
    return x


PROGRAMS: list[Callable[[Tensor, Any], Tensor]] = [
    all_reduce,
    all_reduce_async,
    broadcast,
    reduce,
    all_gather_into_tensor,
    all_gather,
    reduce_scatter_tensor,
    reduce_scatter,
    all_to_all_single,
    all_to_all,
    scatter,
    gather,
    barrier,
    *([gather_single] if hasattr(dist, "gather_single") else []),  # from torch 2.14 on
]


@pytest.mark.parametrize("axis", [None, "dp", "tp"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_on_ranks_in_threads(program, axis):
    def batched(x: Tensor) -> Tensor:
        return program(x.clone(), None if axis is None else sim.mesh.get_group(axis))

    def one(rank: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            return program(X_W[rank].clone(), None if axis is None else mesh.get_group(axis))

    sim = fcoll.simulate(batched, mesh_shape=MESH)
    got = sim(X_W)
    want = fcoll.simulate_ranks(one, world_size=W)
    for r in range(W):
        assert torch.equal(got[r], want[r]), (r, got[r], want[r])


def test_the_argument_itself_is_written():
    x_W = X_W.clone()
    fcoll.simulate(lambda x: all_reduce(x, None), world_size=W)(x_W)
    assert torch.equal(x_W, X_W.sum(0).expand(W, 8))


def test_autograd_does_not_see_them():
    x_W = X_W.clone().requires_grad_()

    def fn(x: Tensor) -> Tensor:
        return all_reduce(x * 2, None) + x

    out = fcoll.simulate(fn, world_size=W)(x_W)
    (grad,) = torch.autograd.grad(out.sum(), x_W)
    assert torch.equal(grad, torch.full_like(x_W, 3.0))  # all_reduce is taken for the identity


def test_tensors_that_all_ranks_share():
    def fn(x: Tensor) -> Tensor:
        shared = torch.empty(8 * W)
        dist.all_gather_into_tensor(shared, x)  # the same on all ranks: one tensor can hold it
        return shared

    assert torch.equal(fcoll.simulate(fn, world_size=W)(X_W)[2], X_W.flatten())


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "one tensor for all": (
        lambda x: dist.reduce_scatter_tensor(torch.empty(2), x),
        r"one for all ranks, and their results differ.*new_empty",
    ),
    "a message": (lambda x: dist.send(x, 1), "message.*fcoll.permute"),
    "premul_sum": (
        lambda x: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0)),
        "factor of premul_sum",
    ),
    "another root's list": (
        lambda x: dist.scatter(x.new_empty(2), None, src=1),
        "scatter_list has 0 tensors",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_the_line(what):
    fn, message = REFUSED[what]
    line = r"test_in_place.py:\d+"
    with pytest.raises(fcoll.errors.NotInBatch, match=rf"{line}: .*{message}"):
        fcoll.simulate(fn, world_size=W)(X_W.clone())
    out = fcoll.simulate(lambda x: all_reduce(x, None), world_size=W)(X_W.clone())
    assert torch.equal(out[3], X_W.sum(0))
