"""torchtitan: its debug model with its FSDP2, traced and checked without ranks, and trained.

fcoll check examples/clients/torchtitan_debug.py:build --mesh dp=8
torchrun --nproc-per-node 2 examples/clients/torchtitan_debug.py [fcoll|gloo]
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry


def build(mesh):
    """The model, sharded over the mesh's axis, and a training step with its arguments."""
    torch.manual_seed(0)
    config = model_registry("debugmodel").model
    for layer in config.layers:  # flex_attention has no backward pass on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_weights()
    apply_fsdp_to_decoder(model, mesh["dp"], torch.float32, torch.float32, pp_enabled=False)
    if dist.get_backend() == "gloo":  # it has no sums with a factor; "fcoll" has
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(text):
        logits = model(text)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    made = torch.Generator().manual_seed(mesh.get_local_rank())
    return step, (torch.randint(0, 2048, (2, 64), generator=made),)


def main(backend: str = "fcoll") -> None:
    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    step, args = build(mesh)
    losses = [step(*args).item() for _ in range(4)]
    if dist.get_rank() == 0:
        print("losses", *losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
