"""Steps as torch.compile makes them: graphs, what runs between them, and programs that compile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fcoll

HERE = Path(__file__).name


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


def training_step(model):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step, (torch.randn(4, 8),)


def tensor_parallel(mesh, compile=lambda block: None):
    model = nn.Sequential(Block(), Block())
    for block in model:
        compile(block)
        parallelize_module(block, mesh["dp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return training_step(model)


def fsdp(mesh, compile=lambda block: None):
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    for block in model:
        compile(block)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return training_step(model)


def by_hand(mesh):
    model = Block()

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            p.grad = fcoll.all_reduce(p.grad, "avg", mesh["dp"])
        return loss

    return step, (torch.randn(4, 8),)


# By hand: 2 all-reduces of each block's results, 1 of its input's gradient but for the first's.
CALLS = {
    tensor_parallel: {"all_reduce fwd": 2, "all_reduce bwd": 1},
    fsdp: {
        "all_gather_into_tensor_out fwd": 2,
        "all_gather_into_tensor_out bwd": 2,
        "reduce_scatter_tensor_out bwd": 2,
    },
    by_hand: {"all_reduce bwd": 2},
}


def traced(build, mode):
    with fcoll.fake_world(dp=2) as mesh:
        step, args = build(mesh)
        return fcoll.trace(step, *args, mode=mode)


@pytest.mark.parametrize("build", CALLS)
@pytest.mark.parametrize("mode", ["joint", "compiled"])
def test_calls(build, mode):
    calls = traced(build, mode).collectives
    assert Counter(f"{c.op} {c.phase}" for c in calls) == CALLS[build]
    assert all(HERE in c.source for c in calls), [c.source for c in calls]


@pytest.mark.parametrize("build", [tensor_parallel, fsdp])
def test_a_program_that_compiles_its_blocks_is_traced_as_written(build):
    """fullgraph=True: beside a dispatch mode Dynamo compiles nothing, and would say so."""
    found = traced(lambda mesh: build(mesh, lambda block: block.compile(fullgraph=True)), "joint")
    assert Counter(f"{c.op} {c.phase}" for c in found.collectives) == CALLS[build]


def test_what_the_program_compiles_is_recorded_whatever_its_backend():
    def build(mesh):
        compiled = torch.compile(lambda x: fcoll.all_reduce(x, "sum", mesh).relu(), backend="eager")
        return lambda x: torch._dynamo.disable(compiled)(x), (torch.ones(4),)

    assert [c.op for c in traced(build, "compiled").collectives] == ["all_reduce"]
