"""Sharded and replicated parameters: FSDP2, DDP, mixed precision, checkpointing, accumulation."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from program_parts import (
    DIM,
    MLP,
    SEQUENCE,
    VOCABULARY,
    Block,
    batch,
    cut,
    language_step,
    targets,
    trained,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fcoll


def hsdp(mesh):
    """FSDP2 on two axes: replicated over one, sharded over the other."""
    model = MLP()
    fully_shard(model.down, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = batch(mesh["replicate"], 8, DIM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trained(model, cut(rows, mesh["shard"]), optimizer)


def fsdp_and_sequence_adamw(mesh):
    """FSDP2 x TP + SP, AdamW and clipping, two steps."""
    plan = {name: style for name, style in SEQUENCE.items() if "attention" not in name}
    model = parallelize_module(Block(attends=False), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = targets(mesh["dp"], 2, 4)

    def step(tokens):
        losses = []
        for x, y in ((tokens, tokens.roll(1, 1)), (tokens.flip(1), tokens)):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return losses

    return step, (tokens,)


def fsdp_bf16(mesh):
    """Parameters gathered in bfloat16, gradients reduced in float32."""
    model = MLP()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model.down, model):
        fully_shard(part, mesh=mesh["dp"], mp_policy=policy)
    return trained(model, batch(mesh["dp"], 4, DIM), torch.optim.SGD(model.parameters(), lr=0.1))


def ddp_autocast(mesh):
    model = nn.parallel.DistributedDataParallel(MLP(), process_group=mesh["dp"].get_group())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (batch(mesh["dp"], 4, DIM),)


def fsdp_accumulating(mesh):
    """Gradients of two microbatches, reduced with the second."""
    model = MLP()
    fully_shard(model.down, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        total = 0
        for i, rows in enumerate(x.chunk(2)):
            model.set_requires_gradient_sync(i == 1)
            loss = model(rows).square().mean() / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, (batch(mesh["dp"], 8, DIM),)


def ddp_accumulating(mesh, wrap=nn.parallel.DistributedDataParallel):
    model = wrap(MLP(), process_group=mesh["dp"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        first, second = x.chunk(2)
        with model.no_sync():
            loss = model(first).square().mean() / 2
            loss.backward()
        last = model(second).square().mean() / 2
        last.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss + last).detach()

    return step, (batch(mesh["dp"], 8, DIM),)


def ddp_compiled(mesh):
    model = fcoll.DataParallel(MLP(), mesh["dp"].get_group())
    compiled = torch.compile(model, backend="aot_eager")
    return trained(compiled, batch(mesh["dp"], 4, DIM), torch.optim.SGD(model.parameters(), lr=0.1))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = MLP(), MLP(), reentrant

    def forward(self, x):
        run = partial(checkpoint, use_reentrant=self.reentrant)
        return run(self.second, run(self.first, x.requires_grad_(True)))


def checkpointed(mesh, reentrant):
    group = mesh["dp"].get_group()
    model = nn.parallel.DistributedDataParallel(Checkpointed(reentrant), process_group=group)
    return trained(model, batch(mesh["dp"], 4, DIM), torch.optim.SGD(model.parameters(), lr=0.1))


def fsdp_checkpointed(mesh):
    """FSDP2 and TP + SP, with the block recomputed in the backward pass."""
    model = parallelize_module(Block(), mesh["tp"], SEQUENCE)
    fully_shard(model, mesh=mesh["dp"])
    attend = model.attention.forward
    model.attention.forward = lambda x: checkpoint(attend, x, use_reentrant=False)
    return language_step(model), (targets(mesh["dp"], 2, 4), targets(mesh["dp"], 2, 4))


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.mlp, self.head = MLP(), nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.mlp(self.embed(tokens)))


def tied(mesh):
    model = Tied()
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, weight_decay=0.1)
    return language_step(model, optimizer), (targets(mesh["dp"], 2, 4), targets(mesh["dp"], 2, 4))


DP, GRID = {"dp": 2}, {"dp": 2, "tp": 2}
PROGRAMS = {
    "hsdp": (hsdp, {"replicate": 2, "shard": 2}),
    "fsdp_and_sequence_adamw": (fsdp_and_sequence_adamw, GRID),
    "fsdp_bf16": (fsdp_bf16, DP),
    "ddp_autocast": (ddp_autocast, DP),
    "fsdp_accumulating": (fsdp_accumulating, DP),
    "ddp_accumulating": (ddp_accumulating, DP),
    "ddp_compiled": (ddp_compiled, DP),
    "checkpointed": (partial(checkpointed, reentrant=False), DP),
    "checkpointed_reentrant": (partial(checkpointed, reentrant=True), DP),
    "fsdp_checkpointed": (fsdp_checkpointed, GRID),
    "tied": (tied, DP),
}
