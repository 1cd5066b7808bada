"""DTensor on LocalTensorMode: redistribution and training, against one process and torch's own."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed._local_tensor as torchs
import torch.nn.functional as F
from local.worlds import fake_world
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fcoll import local

W = 4
PLACEMENTS = [Replicate(), Shard(0), Shard(1), Partial()]


def reconciled(x):
    return x.reconcile() if isinstance(x, (local.LocalTensor, torchs.LocalTensor)) else x


def ranks_of(x) -> dict[int, torch.Tensor]:
    return {r: t.clone() for r, t in x._local_tensors.items()}


def redistribute(face, mesh_shape, size, source, target):
    """(local tensors after, the full tensor) with ours or torch's LocalTensorMode."""
    clear_redistribute_planner_cache()  # it keeps ints of ranks, of the one face or the other
    with fake_world(W), face.LocalTensorMode(W):
        mesh = init_device_mesh("cpu", mesh_shape)
        whole = torch.arange(float(size[0] * size[1])).view(size)
        x = DTensor.from_local(
            distribute_tensor(whole, mesh, [
                p if not p.is_partial() else Replicate() for p in source
            ]).to_local(),
            mesh, source, run_check=False, shape=whole.shape, stride=whole.stride(),
        )  # fmt: skip
        y = x.redistribute(mesh, target)
        return ranks_of(y.to_local()), reconciled(y.full_tensor())


# DTensor redistributes to partial from partial only.
PAIRS = [(a, b) for a in PLACEMENTS for b in PLACEMENTS if a.is_partial() or not b.is_partial()]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("size", [(8, 12), (7, 5)], ids=str)
def test_redistribute_1d(source, target, size):
    ours, full = redistribute(local, (W,), size, [source], [target])
    theirs, their_full = redistribute(torchs, (W,), size, [source], [target])
    assert ours.keys() == theirs.keys()
    for r in ours:
        torch.testing.assert_close(ours[r], theirs[r])
    torch.testing.assert_close(full, their_full)


PAIRS_2D = [
    (s, t)
    for s, t in itertools.product(itertools.product(PLACEMENTS, repeat=2), repeat=2)
    if not any(b.is_partial() and not a.is_partial() for a, b in zip(s, t, strict=True))
]


@pytest.mark.parametrize("source", sorted({s for s, _ in PAIRS_2D}, key=str), ids=str)
def test_redistribute_2d(source):
    size = (8, 12)
    whole = torch.arange(96.0).view(size)
    times = 2 ** sum(p.is_partial() for p in source)  # each replica is one part of the sum
    for target in (t for s, t in PAIRS_2D if s == source):
        _, full = redistribute(local, (2, 2), size, list(source), list(target))
        torch.testing.assert_close(full, whole * times, msg=lambda m: f"{target}: {m}")  # noqa: B023


@pytest.mark.parametrize("source,target", [
    ((Shard(0), Shard(1)), (Shard(1), Shard(0))),
    ((Shard(0), Shard(0)), (Replicate(), Shard(1))),
    ((Partial(), Shard(0)), (Shard(1), Shard(1))),
])  # fmt: skip
def test_uneven_2d(source, target):
    times = 2 ** sum(p.is_partial() for p in source)
    _, full = redistribute(local, (2, 2), (7, 5), list(source), list(target))
    torch.testing.assert_close(full, torch.arange(35.0).view(7, 5) * times)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def trained(face, *, plain: bool, steps=3):
    """Tensor parallel over 4 simulated ranks; the parameters after some steps of Adam.

    ``plain``: the model is made outside of the mode, so that what is replicated stays plain.
    """
    torch.manual_seed(0)
    model, x = (MLP(), torch.randn(6, 8)) if plain else (None, None)
    with fake_world(W), face.LocalTensorMode(W):
        mesh = init_device_mesh("cpu", (W,))
        if model is None:
            model, x = MLP(), torch.randn(6, 8)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(model, mesh, plan)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(reconciled(loss.detach()))
        return losses, {
            n: reconciled(p.detach().full_tensor()) for n, p in model.named_parameters()
        }


def test_a_tensor_parallel_step_is_that_of_one_process():
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(6, 8)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.05), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    for plain in (True, False):  # torch's own adds each rank's update to a plain parameter
        found, parameters = trained(local, plain=plain)
        torch.testing.assert_close(found, losses)
        for name, p in model.named_parameters():
            torch.testing.assert_close(parameters[name], p.detach())
    theirs, their_parameters = trained(torchs, plain=False)
    torch.testing.assert_close(found, theirs)
    torch.testing.assert_close(parameters, their_parameters)


PROGRAMS = {
    "addmm": lambda a, b: torch.addmm(b[0], a, b.t()),
    "cat": lambda a, b: torch.cat([a, b], 1),
    "sum": lambda a, b: (a * b).sum(),
    "softmax": lambda a, b: a.softmax(-1),
    "mm": lambda a, b: a @ b.t(),
    "layer_norm": lambda a, b: F.layer_norm(a, (a.shape[-1],)),
    "slice": lambda a, b: a[1:5] + b[1:5],
    "max": lambda a, b: a.amax(0),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_dtensor_programs(name, placement):
    a, b = torch.rand(8, 8), torch.rand(8, 8)
    with fake_world(W), local.LocalTensorMode(W):
        mesh = init_device_mesh("cpu", (W,))
        da, db = (distribute_tensor(t, mesh, [placement]) for t in (a, b))
        found = reconciled(PROGRAMS[name](da, db).full_tensor())
    torch.testing.assert_close(found, PROGRAMS[name](a, b))


def test_uneven_shards_of_a_dtensor():
    whole = torch.randn(10, 3)
    with fake_world(W), local.LocalTensorMode(W):
        mesh = init_device_mesh("cpu", (W,))
        x = distribute_tensor(whole, mesh, [Shard(0)])
        assert x.to_local().shape[0].node._local_ints == {0: 3, 1: 3, 2: 3, 3: 1}
        y = (x * 2 + 1).sum(1)
        assert torch.equal(reconciled((x * 2).full_tensor()), whole * 2)
    torch.testing.assert_close(
        torch.cat([y.to_local()._local_tensors[r] for r in range(W)]), (whole * 2 + 1).sum(1)
    )


def test_embedding():
    table, ids = torch.randn(16, 4), torch.randint(0, 16, (5, 3))
    with fake_world(W), local.LocalTensorMode(W):
        mesh = init_device_mesh("cpu", (W,))
        t = distribute_tensor(table, mesh, [Shard(0)])
        i = distribute_tensor(ids, mesh, [Replicate()])
        found = reconciled(F.embedding(i, t).full_tensor())
    torch.testing.assert_close(found, F.embedding(ids, table))
