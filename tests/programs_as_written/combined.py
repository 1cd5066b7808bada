"""Two kinds of parallel training at once, and steps that send objects, as people write them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel as DDP

DIM = 16


class Layers(nn.Module):
    def __init__(self, n: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


# -- a pipeline of replicas, and of sharded stages ---


def _pipelined(mesh, module):
    rank, size = mesh.get_local_rank("pp"), mesh["pp"].size()
    stage = PipelineStage(module, rank, size, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
    opt = torch.optim.Adam(module.parameters())

    def step(x, y):
        opt.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        opt.step()

    return step, (torch.randn(8, DIM), torch.randn(8, DIM))


def pipeline_of_replicas(mesh):
    return _pipelined(mesh, DDP(Layers(), process_group=mesh.get_group("dp")))


def pipeline_of_shards(mesh):
    module = Layers()
    for layer in module.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return _pipelined(mesh, module)


# -- an optimizer whose states are sharded ---


def sharded_optimizer(mesh):
    model = DDP(Layers())
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)

    def step(x):
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss.item()

    return step, (torch.randn(8, DIM),)


# -- objects ---


def with_objects(mesh):
    model = DDP(Layers())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"best": math.inf}

    def step(x):
        settings = [{"scale": 2.0, "layers": [1, 2]} if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(settings, src=0)
        loss = model(x).square().mean() * settings[0]["scale"]
        loss.backward()
        opt.step()
        opt.zero_grad()
        stats = [None] * dist.get_world_size()
        dist.all_gather_object(stats, {"rank": dist.get_rank(), "loss": loss.item()})
        mean = sum(s["loss"] for s in stats) / len(stats)
        if mean < state["best"]:
            state["best"] = mean
        if dist.get_rank() == 0:
            print(f"loss {mean:.3f}")
        dist.barrier()

    return step, (torch.randn(8, DIM),)
