"""fcoll's collectives inside fcoll.simulate go without the dispatcher, to the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fcoll
from fcoll.eager import dispatch

MESH = {"dp": 2, "tp": 4}
CALLS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "all_reduce": lambda x, g: fcoll.all_reduce(x, "sum", g),
    "all_reduce avg": lambda x, g: fcoll.all_reduce(x, "AVG", g),
    "all_reduce max": lambda x, g: fcoll.all_reduce(x, "max", g),
    "broadcast": lambda x, g: fcoll.broadcast(x, 1, g),
    "all_gather": lambda x, g: fcoll.all_gather_into_tensor(x, g),
    "all_gather dim 1": lambda x, g: fcoll.all_gather_into_tensor(x, g, 1),
    "reduce_scatter": lambda x, g: fcoll.reduce_scatter_tensor(x, "sum", g),
    "reduce_scatter dim 1": lambda x, g: fcoll.reduce_scatter_tensor(x, "sum", g, 1),
    "all_to_all": lambda x, g: fcoll.all_to_all_single(x, g),
}
TORCHS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "all_reduce": lambda x, g: funcol.all_reduce(x, "sum", g),
    "all_reduce avg": lambda x, g: funcol.all_reduce(x, "AVG", g),
    "all_reduce max": lambda x, g: funcol.all_reduce(x, "max", g),
    "broadcast": lambda x, g: funcol.broadcast(x, 1, g),
    "all_gather": lambda x, g: funcol.all_gather_single(x, 0, g),
    "all_gather dim 1": lambda x, g: funcol.all_gather_single(x, 1, g),
    "reduce_scatter": lambda x, g: funcol.reduce_scatter_single(x, "sum", 0, g),
    "reduce_scatter dim 1": lambda x, g: funcol.reduce_scatter_single(x, "sum", 1, g),
    "all_to_all": lambda x, g: funcol.all_to_all_single(x, None, None, g),
}


NO_MEANING = {(torch.complex64, "all_reduce max"), (torch.int32, "all_reduce avg")}


class Watched(TorchDispatchMode):
    """Somebody looks: the call goes through the dispatcher."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def simulated(call: Callable[[Tensor, Any], Tensor], dim: int) -> Any:
    sim = fcoll.simulate(lambda x: funcol.wait_tensor(call(x, (sim.mesh, dim))), mesh_shape=MESH)
    return sim


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.complex64])
@pytest.mark.parametrize("name", CALLS)
def test_undispatched_calls_give_what_the_dispatcher_gives(name: str, dtype: Any, dim: int) -> None:
    if (dtype, name) in NO_MEANING:
        return
    torch.manual_seed(0)
    x_W = (torch.randn(8, 4, 8) * 100).to(dtype).transpose(1, 2)
    sim = simulated(CALLS[name], dim)
    undispatched = sim(x_W)
    with Watched():
        dispatched = sim(x_W)
    torchs = simulated(TORCHS[name], dim)(x_W)
    assert undispatched.stride() == dispatched.stride() == torchs.stride()
    assert torch.equal(undispatched, dispatched)
    assert torch.equal(undispatched, torchs)


@pytest.mark.parametrize("name", [name for name in CALLS if "max" not in name])
def test_gradients_are_the_same(name: str) -> None:
    torch.manual_seed(0)
    x_W = torch.randn(8, 8, 4, requires_grad=True)
    sim = simulated(CALLS[name], 1)
    y = sim(x_W)
    G = torch.randn_like(y)
    (undispatched,) = torch.autograd.grad(y, x_W, G)
    with Watched():
        (dispatched,) = torch.autograd.grad(sim(x_W), x_W, G)
    assert torch.equal(undispatched, dispatched)


@pytest.mark.parametrize("elements", [7, 3000])  # few: as they lie; many: in the order of memory
def test_sums_are_in_rank_order_whatever_the_strides(elements: int) -> None:
    torch.manual_seed(0)
    x_W = (torch.randn(8, 5, elements) * 10 ** torch.randn(8, 1, 1)).transpose(1, 2)
    y_W = fcoll.simulate(lambda x: fcoll.all_reduce(x, "sum", "tp"), mesh_shape=MESH)(x_W)
    for first in (0, 4):
        expected = x_W[first] + x_W[first + 1] + x_W[first + 2] + x_W[first + 3]
        for r in range(first, first + 4):
            assert torch.equal(y_W[r], expected)
    assert y_W.is_contiguous()


def test_a_sum_of_negative_zeros_is_one() -> None:
    x_W = torch.full((8, 2), -0.0)
    y_W = fcoll.simulate(lambda x: fcoll.all_reduce(x, "sum", "tp"), mesh_shape=MESH)(x_W)
    assert torch.signbit(y_W).all()


def test_a_sum_is_not_kept_for_the_next_call() -> None:
    sim = fcoll.simulate(lambda x: fcoll.all_reduce(x, "sum", "tp"), mesh_shape=MESH)
    assert torch.equal(sim(torch.ones(8, 3)), sim(torch.ones(8, 3)))
    assert sim(torch.ones(8, 3))[0].tolist() == [4.0] * 3


def test_fcolls_functions_go_undispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    run = dispatch.on_stacked

    def noted(row: Any, args: Any) -> Any:
        out = run(row, args)
        used.append((row.name, out is not NotImplemented))
        return out

    monkeypatch.setattr(dispatch, "on_stacked", noted)
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        simulated(CALLS[name], 1)(torch.ones(8, 8))
    expected = ["all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"]
    assert used == [(name, True) for name in [*expected, "all_to_all_single"]]


def test_torchs_functional_collectives_by_fcolls_names() -> None:
    sim = fcoll.simulate(
        lambda x: fcoll.compat.wait_tensor(fcoll.compat.all_reduce(x, "sum", sim.mesh)),
        world_size=4,
    )
    assert sim(torch.ones(4, 2)).tolist() == [[4.0, 4.0]] * 4


def test_nothing_stays_patched() -> None:
    def now() -> list[Any]:
        mesh = dist.device_mesh.DeviceMesh
        return [
            *(vars(mesh)[name] for name in ("__init__", "get_rank", "get_coordinate")),
            *(dist.get_rank, vars(dist.ProcessGroup)["rank"]),
        ]

    before = now()

    def inner(x: Tensor) -> Tensor:
        assert all(a is not b for a, b in zip(now(), before, strict=True))
        return x

    def fails(x: Tensor) -> Tensor:
        fcoll.simulate(inner, world_size=2)(torch.ones(2))
        raise KeyError("as planned")

    with pytest.raises(KeyError, match="as planned"):
        fcoll.simulate(fails, mesh_shape=MESH)(torch.ones(8))
    assert all(a is b for a, b in zip(now(), before, strict=True))


def test_groups_that_fn_destroys_are_there_again_in_the_next_call() -> None:
    def step(x: Tensor) -> Tensor:
        y = funcol.wait_tensor(funcol.all_reduce(x, "sum", (sim.mesh, 1)))
        dist.destroy_process_group()
        return y

    sim = fcoll.simulate(step, mesh_shape=MESH)
    for _ in range(2):
        assert sim(torch.ones(8)).tolist() == [4.0] * 8


def test_groups_that_fn_makes_are_gone_in_the_next_call() -> None:
    sizes = []

    def step(x: Tensor) -> Tensor:
        sizes.append(len(dist.distributed_c10d._world.pg_map))
        dist.new_group([0, 1])
        return x

    sim = fcoll.simulate(step, mesh_shape=MESH)
    sim(torch.ones(8))
    sim(torch.ones(8))
    assert sizes[0] == sizes[1]


def test_a_transform_inside_goes_through_the_dispatcher() -> None:
    def loss(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x * x, "sum", "tp").sum()

    sim = fcoll.simulate(lambda x: torch.func.grad(loss)(x), mesh_shape=MESH)
    assert torch.equal(sim(torch.ones(8, 3)), torch.full((8, 3), 8.0))
