"""megatron-core: a column parallel layer, a row parallel one behind it, and an optimizer's step.

torchrun --nproc-per-node 2 examples/clients/megatron_linear.py [fcoll|gloo]
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def block() -> torch.nn.ModuleList:
    config = ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        params_dtype=torch.float32,
    )
    options = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": True}
    torch.manual_seed(0)
    up = ColumnParallelLinear(64, 256, gather_output=False, **options)
    down = RowParallelLinear(256, 64, input_is_parallel=True, skip_bias_add=False, **options)
    return torch.nn.ModuleList([up, down])


def main(backend: str = "fcoll") -> None:
    dist.init_process_group(backend)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    layers = block()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    x = torch.randn(16, 4, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(5):
        hidden, _ = layers[0](x)
        out, _ = layers[1](torch.nn.functional.gelu(hidden))
        loss = (out - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print("losses", *losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
