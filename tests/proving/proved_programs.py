"""Programs that are right: each build(mesh) gives (step, args), small, on the CPU."""

from __future__ import annotations

import programs_attention
import programs_layers
import programs_routed
import programs_sharding
import torch
import torch.nn.functional as F
from program_parts import (
    DIM,
    HIDDEN,
    MLP,
    SEQUENCE,
    VOCABULARY,
    Block,
    Copy,
    batch,
    cut,
    language_step,
    targets,
    trained,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fcoll


class ByHand(nn.Module):
    """A norm's weight, and an MLP that is cut over tp, by hand."""

    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        self.tp = tp
        self.norm = nn.Parameter(torch.ones(DIM))
        self.up = nn.Parameter(cut(torch.randn(HIDDEN, DIM), tp))
        self.down = nn.Parameter(cut(torch.randn(DIM, HIDDEN), tp, 1))

    def forward(self, x):
        x = Copy.apply(x * self.norm, self.tp)
        y = F.gelu(x @ self.up.t()) @ self.down.t()
        return fcoll.all_reduce(y, "sum", self.tp, grad="identity")


def by_hand(mesh):
    """dp x tp on fcoll's calls, AdamW."""
    model, dp = ByHand(mesh["tp"]), mesh["dp"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            p.grad = fcoll.all_reduce(p.grad, "avg", dp)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (batch(dp, 4, DIM),)


def dtensor_tp(mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(MLP(), mesh["tp"], plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return trained(model, torch.randn(4, DIM), optimizer)


def torch_ddp(mesh):
    model = nn.parallel.DistributedDataParallel(MLP(), process_group=mesh["dp"].get_group())
    return trained(model, batch(mesh["dp"], 4, DIM), torch.optim.SGD(model.parameters(), lr=0.1))


def fcoll_ddp(mesh):
    model = fcoll.DataParallel(MLP(), mesh["dp"].get_group())
    return trained(model, batch(mesh["dp"], 4, DIM), torch.optim.SGD(model.parameters(), lr=0.1))


def fsdp2(mesh):
    """Uneven shards, AdamW, and clipping by the norm of all gradients."""
    model = MLP()
    fully_shard(model.up, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trained(model, batch(mesh["dp"], 4, DIM), optimizer, clip=1.0)


def sequence_parallel(mesh):
    """Tensor and sequence parallel: a transformer's block on DTensor."""
    model = parallelize_module(Block(), mesh["tp"], SEQUENCE)
    tokens, wanted = torch.tensor([[1, 5, 7, 2], [3, 3, 0, 9]]), torch.arange(8).view(2, 4)
    return language_step(model), (tokens, wanted)


def fsdp_and_sequence(mesh):
    """FSDP2 x TP + SP, and SGD."""
    model = parallelize_module(Block(), mesh["tp"], SEQUENCE)
    fully_shard(model.attention, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, wanted = targets(mesh["dp"], 2, 4), targets(mesh["dp"], 2, 4)
    return language_step(model, optimizer), (tokens, wanted)


class VocabularyLoss(nn.Module):
    """Cross entropy of logits that are cut over the vocabulary."""

    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        self.tp = tp
        self.head = nn.Parameter(cut(torch.randn(VOCABULARY, DIM), tp))

    def forward(self, x, wanted):
        logits = Copy.apply(x, self.tp) @ self.head.t()
        most = fcoll.all_reduce(logits.detach().amax(-1), "max", self.tp)
        logits = logits - most.unsqueeze(-1)
        summed = fcoll.all_reduce(logits.exp().sum(-1), "sum", self.tp, grad="identity")
        first = self.tp.get_local_rank() * len(self.head)
        here = (wanted >= first) & (wanted < first + len(self.head))
        index = torch.where(here, wanted - first, 0)
        picked = torch.where(here, logits.gather(-1, index.unsqueeze(-1)).squeeze(-1), 0.0)
        picked = fcoll.all_reduce(picked, "sum", self.tp, grad="identity")
        return (summed.log() - picked).mean()


def vocabulary_parallel(mesh):
    loss, scale = VocabularyLoss(mesh["tp"]), nn.Parameter(torch.ones(DIM))
    x, wanted = torch.randn(4, DIM), torch.tensor([1, 5, 7, 11])

    def step(x, wanted):
        out = loss(x * scale, wanted)
        out.backward()
        return out

    return step, (x, wanted)


PROGRAMS = {
    "by_hand": (by_hand, {"dp": 2, "tp": 2}),
    "dtensor_tp": (dtensor_tp, {"tp": 2}),
    "torch_ddp": (torch_ddp, {"dp": 2}),
    "fcoll_ddp": (fcoll_ddp, {"dp": 2}),
    "fsdp2": (fsdp2, {"dp": 2}),
    "sequence_parallel": (sequence_parallel, {"tp": 2}),
    "fsdp_and_sequence": (fsdp_and_sequence, {"dp": 2, "tp": 2}),
    "vocabulary_parallel": (vocabulary_parallel, {"tp": 2}),
    **programs_sharding.PROGRAMS,
    **programs_attention.PROGRAMS,
    **programs_layers.PROGRAMS,
    **programs_routed.PROGRAMS,
}
SINGLE = programs_layers.SINGLE  # of one device, where it is not the same build
