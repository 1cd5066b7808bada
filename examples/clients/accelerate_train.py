"""accelerate: a small model is trained by DDP and by FSDP2. accelerate asks for gloo itself.

torchrun --nproc-per-node 2 examples/clients/accelerate_train.py [fcoll|gloo] [ddp|fsdp2]
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fcoll


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)
    )


def data() -> DataLoader:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=made)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def accelerator(way: str) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if way == "fsdp2" else None
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def main(backend: str = "fcoll", way: str = "ddp") -> None:
    if backend == "fcoll":
        fcoll.as_gloo()  # or FCOLL_AS=gloo, without this line
    run = accelerator(way)
    net = model()
    net, optimizer, loader = run.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2), data())
    losses = []
    for x, y in loader:
        loss = nn.functional.mse_loss(net(x), y)
        run.backward(loss)
        run.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.gather(loss.detach()).mean().item())
    if run.is_main_process:
        print("losses", *losses)
    run.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
