"""fcoll's own collectives on LocalTensors, and LocalTensors in fake and compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from local.test_collectives import given, made, same, wanted
from local.worlds import fake_world
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fcoll
from fcoll.local import LocalTensor, LocalTensorMode

Tensor = torch.Tensor
W = 4
GROUPS = {"world": (None, [[0, 1, 2, 3]]), "columns": ([0, 2], [[0, 2], [1, 3]])}

# name of the row -> (call, the arguments that the oracle gets)
CALLS: dict[str, tuple[Callable[[Any, Any], Any], dict[str, Any]]] = {
    "all_reduce": (lambda x, g: fcoll.all_reduce(x, "max", g), {"reduce_op": "max"}),
    "all_gather_into_tensor": (
        lambda x, g: fcoll.all_gather_into_tensor(x, g, dim=1),
        {"dim": 1},
    ),
    "reduce_scatter_tensor": (
        lambda x, g: fcoll.reduce_scatter_tensor(x, "sum", g),
        {"reduce_op": "sum"},
    ),
    "all_to_all_single": (fcoll.all_to_all_single, {}),
    "broadcast": (lambda x, g: fcoll.broadcast(x, 1, g), {"src": 1}),
    "reduce": (
        lambda x, g: fcoll.reduce(x, 1, "sum", g),
        {"reduce_op": "sum", "dst": 1},
    ),
    "scatter": (lambda x, g: fcoll.scatter(x, 1, g), {"src": 1}),
    "gather": (lambda x, g: fcoll.gather(x, 0, g), {"dst": 0}),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("stored", ["stack", "apart"])
@pytest.mark.parametrize("op", CALLS)
def test_rows(op, stored, group):
    call, args = CALLS[op]
    ranks, groups = GROUPS[group]
    xs = given((8, 2))
    with fake_world(W), LocalTensorMode(W):
        pg = None if ranks is None else dist.new_group(ranks)
        y = fcoll.wait_tensor(call(made(xs, stored), pg))
    same(y, wanted(op, xs, args, groups))


def test_lists_and_forms_that_write():
    xs = given((8, 2))
    with fake_world(W), LocalTensorMode(W):
        both = fcoll.all_reduce_coalesced([made(xs, "stack"), made(xs, "apart")], "sum")
        gathered = fcoll.all_gather_into_tensor_coalesced([made(xs, "stack")])
        x = made(xs, "stack")
        fcoll.dist.all_reduce(x)
    for y in (*both, x):
        same(y, wanted("all_reduce", xs, {"reduce_op": "sum"}, GROUPS["world"][1]))
    same(gathered[0], wanted("all_gather_into_tensor", xs, {}, GROUPS["world"][1]))


def test_gradients():
    xs = given((3,))
    with fake_world(W), LocalTensorMode(W):
        x = made(xs, "stack").requires_grad_()
        (fcoll.all_reduce(x) * x).sum().backward()
    total = torch.stack(list(xs.values())).sum(0)
    same(x.grad, dict.fromkeys(range(W), 2 * total))  # of its own factor, and of all the others'


def test_shapes_that_differ():
    with fake_world(W), LocalTensorMode(W):
        x = LocalTensor({r: torch.ones(r + 1, 4) for r in range(W)})
        with pytest.raises(fcoll.errors.RaggedRanks, match="different shapes"):
            fcoll.all_gather_into_tensor(x, dim=1)
        with pytest.raises(fcoll.errors.RaggedRanks, match="different shapes"):
            fcoll.reduce(x, 0, "sum")


def test_parts_of_different_sizes():
    xs, sizes = given((8, 2)), [1, 4, 0, 3]
    with fake_world(W), LocalTensorMode(W):
        y = fcoll.wait_tensor(fcoll.reduce_scatter_tensor(made(xs, "stack"), sizes=sizes))
    total = torch.stack(list(xs.values())).sum(0)
    same(y, dict(enumerate(total.split(sizes))))


def test_calls_are_checked():
    with fake_world(W), LocalTensorMode(W), pytest.raises(fcoll.errors.WrongDtype):
        torch.ops.fcoll.all_reduce(torch.ones(3).int(), "avg", dist.group.WORLD.group_name)


def test_fake_tensors_inside():
    with fake_world(W), FakeTensorMode(), LocalTensorMode(W):
        x = torch.ones(3, 2) + 1
        dist.all_reduce(x)
        y = funcol.all_reduce(x, "sum", dist.group.WORLD)
        z = fcoll.all_gather_into_tensor(x)
        assert isinstance(x, LocalTensor)
        assert all(isinstance(t, FakeTensor) for t in x._local_tensors.values())
        assert (tuple(y.shape), tuple(z.shape)) == ((3, 2), (12, 2))


def test_fake_tensor_of_a_local_one():
    fake = FakeTensorMode().from_tensor(LocalTensor(given((3,))))
    assert isinstance(fake, LocalTensor)
    assert all(isinstance(t, FakeTensor) for t in fake._local_tensors.values())


@pytest.mark.parametrize("stored", ["stack", "apart"])
def test_compiled(stored):
    def step(x: Tensor) -> Tensor:
        y = funcol.wait_tensor(funcol.all_reduce(x * 2, "sum", dist.group.WORLD))
        return (y + x).relu()

    xs = given((3,))
    torch._dynamo.reset()
    with fake_world(W), LocalTensorMode(W):
        y = torch.compile(step, backend="aot_eager")(made(xs, stored))
    total = torch.stack(list(xs.values())).sum(0)
    same(y, {r: (2 * total + x).relu() for r, x in xs.items()})


def test_each_rank_has_its_own_number():
    with fake_world(4), LocalTensorMode(4):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        asked = fcoll.rank(), fcoll.axis_index("tp"), fcoll.rank((mesh, "dp"))
        got = [torch.ones(1) * number for number in asked]
    for rank in range(4):
        mine = [int(x._local_tensors[rank]) for x in got]
        assert mine == [rank, rank % 2, rank // 2]
