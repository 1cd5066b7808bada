"""vLLM: the communicator of its CPU platform, on the groups that it is given.

torchrun --nproc-per-node 2 examples/clients/vllm_communicator.py [fcoll|gloo]
"""

import sys

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def main(backend: str = "fcoll") -> None:
    dist.init_process_group(backend)
    group = dist.new_group()
    tp = CpuCommunicator(group, torch.device("cpu"), group, unique_name="tp:0")
    x = torch.arange(8.0).view(2, 4) * (dist.get_rank() + 1)
    total = tp.all_reduce(x.clone())
    wide = tp.all_gather(x, dim=-1)
    part = tp.reduce_scatter(x.clone(), dim=0)
    collected = tp.gather(x, dst=0)
    if dist.get_rank() == 0:
        for result in (total, wide, part, collected):
            print("values", *result.flatten().tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
