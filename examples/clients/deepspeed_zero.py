"""DeepSpeed: ZeRO on CPUs; deepspeed.init_distributed takes the name of a backend.

torchrun --nproc-per-node 2 examples/clients/deepspeed_zero.py [fcoll|gloo] [1|2|3]
"""

import sys

import deepspeed
import torch
from torch import nn


def config(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def main(backend: str = "fcoll", stage: str = "1") -> None:
    deepspeed.init_distributed(dist_backend=backend)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config(int(stage))
    )
    made = torch.Generator().manual_seed(engine.global_rank)
    losses = []
    for _ in range(5):
        x = torch.randn(4, 16, generator=made)
        loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if engine.global_rank == 0:
        print("losses", *losses)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
