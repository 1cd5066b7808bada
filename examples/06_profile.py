"""How long a step's collectives took on this rank, beside what was predicted.

python examples/06_profile.py

Predictions need a machine: `fcoll calibrate` measures this one once; here it is an H100's.
"""

import torch
import torch.distributed as dist

import fcoll


def step(x, w_in, w_out):
    hidden = fcoll.identity(x) @ w_in  # its gradient is summed over the ranks
    y = fcoll.all_reduce(torch.relu(hidden) @ w_out, grad="identity")
    y.square().mean().backward()


def main() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    w_in = torch.randn(64, 128, requires_grad=True)
    w_out = torch.randn(128, 64, requires_grad=True)
    step(x, w_in, w_out)  # the first call on a group connects its ranks

    with fcoll.profile(machine="h100") as profile:
        for _ in range(10):
            step(x, w_in, w_out)

    if dist.get_rank() == 0:
        print(profile)
        longest = max(profile.collectives, key=lambda c: c.sum_us)
        print(f"most of it: {longest.op} at {longest.source}, {longest.calls} times")


if __name__ == "__main__":
    fcoll.launch(main)
