"""Resharding a tensor on 4 ranks: fcoll.sharded against torch's ShardedTensor on gloo.

Along the same dim (the shards change ranks) and from rows to columns and back. All take turns
within every round. Median ms of a reshard on the slowest rank, and its ratio to torch's.

python benchmarks/reshard.py [--mib 64] [--rounds 15] [--ranks 4]
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.api import _shard_tensor

import fcoll
from fcoll import sharded

WARM_UP = 3
WIDTH = 4096


def cases(n: int) -> dict[str, list[sharded.ShardingSpec]]:
    """The two layouts between which each goes to and fro."""
    return {
        "same dim": [sharded.chunk(0, n), sharded.chunk(0, reversed(range(n)))],
        "rows to columns": [sharded.chunk(0, n), sharded.chunk(1, n)],
    }


def measure(
    makers: dict[str, Callable[..., Any]], specs: list[Any], whole: torch.Tensor, rounds: int
) -> dict[str, float]:
    """Median seconds of a reshard on the slowest rank."""
    tensors = {name: make(whole, specs[0]) for name, make in makers.items()}
    taken: dict[str, list[float]] = {name: [] for name in makers}
    for i in range(WARM_UP + rounds):
        for name, tensor in tensors.items():
            dist.barrier()
            start = time.perf_counter()
            tensor.reshard(specs[(i + 1) % 2])
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if i >= WARM_UP:
                taken[name].append(slowest.item())
    ours, theirs = (tensors[name].local_tensor() for name in makers)
    assert torch.equal(ours, theirs)
    return {name: statistics.median(times) for name, times in taken.items()}


def main(mib: int, rounds: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch's: it is to go
    whole = torch.rand(mib * (1 << 20) // (4 * WIDTH), WIDTH)
    makers = {"fcoll": sharded.shard_tensor, "torch": _shard_tensor}
    for case, specs in cases(dist.get_world_size()).items():
        found = measure(makers, specs, whole, rounds)
        if dist.get_rank() == 0:
            mine, torchs = found["fcoll"] * 1e3, found["torch"] * 1e3
            print(f"{mib} MiB, {dist.get_world_size()} ranks, {case}:")
            print(f"  fcoll {mine:8.1f} ms  torch, gloo {torchs:8.1f} ms  {torchs / mine:.1f}x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    fcoll.launch(main, args.mib, args.rounds, world_size=args.ranks)
