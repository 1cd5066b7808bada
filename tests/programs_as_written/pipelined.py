"""Pipelines as people write them: torch.distributed.pipelining, and isend/irecv by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

DIM, MICROBATCHES = 32, 4


def stage_module(last: bool) -> nn.Module:
    layers = [nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)]
    return nn.Sequential(*layers, nn.Linear(DIM, 10)) if last else nn.Sequential(*layers)


def _trained(mesh, make_schedule):
    group = mesh.get_group("pp")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    is_last = rank == size - 1
    module = stage_module(is_last)
    stage = PipelineStage(module, rank, size, torch.device("cpu"), group=group)
    schedule = make_schedule(stage, n_microbatches=MICROBATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def train_step(x, y):
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(x)
        elif is_last:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        if is_last:
            loss = torch.stack(losses).mean()
            print(f"loss {loss.item():.3f}")

    return train_step, (torch.randn(16, DIM), torch.randint(0, 10, (16,)))


def gpipe(mesh):
    return _trained(mesh, ScheduleGPipe)


def one_f_one_b(mesh):
    return _trained(mesh, Schedule1F1B)


def interleaved(mesh):
    group = mesh.get_group("pp")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    n = 2 * size  # two stages on each rank
    mine = [rank, rank + size]
    modules = [stage_module(i == n - 1) for i in mine]
    stages = [
        PipelineStage(m, i, n, torch.device("cpu"), group=group)
        for m, i in zip(modules, mine, strict=True)
    ]
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)

    def train_step(x, y):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            losses = []
            schedule.step(target=y, losses=losses)
            print("loss", sum(losses).item() / len(losses))
        else:
            schedule.step()
        optimizer.step()

    return train_step, (torch.randn(16, DIM), torch.randint(0, 10, (16,)))


# -- by hand ---


def by_hand(mesh):
    """GPipe with dist.isend and irecv."""
    group = mesh.get_group("pp")
    rank, size = mesh.get_local_rank("pp"), mesh["pp"].size()
    ranks = dist.get_process_group_ranks(group)
    before = ranks[rank - 1] if rank > 0 else None
    after = ranks[rank + 1] if rank < size - 1 else None
    module = stage_module(after is None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def train_step(x, y):
        inputs, outputs, losses, sent = [], [], [], []
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            if before is not None:
                part = torch.empty_like(part)
                dist.irecv(part, before, group=group).wait()
                part.requires_grad_()
            out = module(part)
            if after is None:
                out = F.cross_entropy(out, target)
                losses.append(out.item())
            else:
                sent.append(dist.isend(out.detach(), after, group=group))
            inputs.append(part)
            outputs.append(out)
        for part, out in zip(inputs, outputs, strict=True):
            gradient = None
            if after is not None:
                gradient = torch.empty_like(out)
                dist.irecv(gradient, after, group=group).wait()
            out.backward(gradient)
            if before is not None:
                sent.append(dist.isend(part.grad, before, group=group))
        for work in sent:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print("loss", sum(losses) / len(losses))

    return train_step, (torch.randn(16, DIM), torch.randint(0, 10, (16,)))
