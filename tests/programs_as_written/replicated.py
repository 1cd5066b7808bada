"""Data parallel training as people write it: DDP with Adam, with comm hooks, with no_sync."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU())
        self.body = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.body:
            x = x + F.relu(layer(x))
        return self.head(x)


def data():
    return torch.randn(8, 32), torch.randint(0, 10, (8,))


# -- DDP and Adam ---


def ddp_adam(mesh):
    rank = dist.get_rank()
    model = DDP(Net(), process_group=mesh.get_group("dp"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    running = {"loss": 0.0, "n": 0}

    def train_step(x, y):
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        running["loss"] += loss.item()
        running["n"] += 1
        if rank == 0:
            print(f"loss {running['loss'] / running['n']:.3f}")
        return loss

    return train_step, data()


# -- a compressing comm hook, and one of the user's own ---


def ddp_hooks(mesh):
    group = mesh.get_group("dp")
    first = DDP(Net(), process_group=group, bucket_cap_mb=1)
    first.register_comm_hook(group, default_hooks.fp16_compress_hook)
    second = DDP(nn.Linear(10, 10), process_group=group)

    def scaled(state, bucket):
        gradients = bucket.buffer() / dist.get_world_size()
        work = dist.all_reduce(gradients, group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    second.register_comm_hook(None, scaled)
    both = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(both, lr=0.1)

    def train_step(x, y):
        loss = F.cross_entropy(second(first(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return train_step, data()


# -- gradient accumulation ---


def accumulation(mesh):
    model = DDP(Net(), process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = 4

    def train_step(x, y):
        total = 0.0
        xs, ys = x.chunk(steps), y.chunk(steps)
        for i in range(steps - 1):
            with model.no_sync():
                loss = F.cross_entropy(model(xs[i]), ys[i]) / steps
                loss.backward()
            total += loss.item()
        loss = F.cross_entropy(model(xs[-1]), ys[-1]) / steps
        loss.backward()
        total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return train_step, data()
