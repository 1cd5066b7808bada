"""All-reduce on 2 ranks. Run it either way:

python examples/01_all_reduce.py
torchrun --nproc-per-node 2 examples/01_all_reduce.py
"""

import torch
import torch.distributed as dist

import fcoll


def ranks() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4.0) + 10 * rank

    y = fcoll.all_reduce(x, "sum")  # starts at once, x stays as it was
    z = x * 2  # compute while the bytes are under way
    total = y + z  # the first use of y waits for it

    # an all-reduce is a reduce-scatter and an all-gather
    parts = fcoll.reduce_scatter_tensor(x, "sum")
    assert torch.equal(y, fcoll.all_gather_into_tensor(parts))
    assert torch.equal(total, sum(torch.arange(4.0) + 10 * r for r in range(n)) + z)
    print(f"rank {rank}: x = {x.tolist()}, summed over {n} ranks: {y.tolist()}")


def main() -> None:
    fcoll.launch(ranks, world_size=2)


if __name__ == "__main__":
    main()
