"""Data parallel training in eager and compiled: gradients averaged in buckets.

python examples/13_data_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn

import fcoll


def train(step: nn.Module, model: nn.Module) -> float:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own
    for _ in range(5):
        optimizer.zero_grad()
        loss = step(torch.randn(8, 16, generator=data)).square().mean()
        loss.backward()  # buckets are sent while it runs
        optimizer.step()
    return sum(p.sum().item() for p in model.parameters())


def make() -> fcoll.DataParallel:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return fcoll.DataParallel(layers, bucket_cap_mb=0.0005)


def main() -> None:
    eager, compiled = make(), make()
    sums = [train(eager, eager)]
    sums.append(train(torch.compile(compiled, fullgraph=True, backend="aot_eager"), compiled))
    print(f"rank {dist.get_rank()}: parameters add up to {sums[0]:.6f}, compiled {sums[1]:.6f}")
    if dist.get_rank() == 0:
        for bucket in eager.reducer.buckets:
            print(f"{bucket.name}: {bucket.bytes} bytes, {', '.join(bucket.members)}")


if __name__ == "__main__":
    fcoll.launch(main)
