"""torch.distributed in place on a group of the backend "fcoll" and on one of gloo, us of a call.

Both groups have the same ranks, pinned to cores, and take turns in one run. Times are of one call
on rank 0, from Python, issue to result; the ratio is of the medians.

python benchmarks/backend.py [--ranks 2] [--kinds all_reduce,...] [--sizes 64,1024,...] [--turns 6]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fcoll

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = (64, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)


def rounds_for(nbytes: int) -> int:
    return 400 if nbytes <= 64 << 10 else 60


def call_of(kind: str, nbytes: int, group: Any) -> Callable[[], object]:
    n, x = dist.get_world_size(), torch.ones(nbytes // 4)
    whole, part, same = torch.empty(n * x.numel()), torch.empty(x.numel() // n), torch.empty_like(x)
    return {
        "all_reduce": lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, x, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, x, group=group),
        "all_to_all": lambda: dist.all_to_all_single(same, x, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
    }[kind]


def measured(call: Callable[[], object], rounds: int) -> list[float]:
    us = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        us.append((time.perf_counter() - began) * 1e6)
    return us[rounds // 10 :]


def rank_main(kinds: list[str], sizes: list[int], turns: int) -> None:
    os.sched_setaffinity(0, {dist.get_rank() % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    groups = {"fcoll": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    for kind in kinds:
        for nbytes in sizes:
            us: dict[str, list[float]] = {name: [] for name in groups}
            calls = {name: call_of(kind, nbytes, group) for name, group in groups.items()}
            for turn in range(turns + 1):
                for name, call in calls.items():
                    dist.barrier()
                    times = measured(call, rounds_for(nbytes))
                    us[name] += times if turn else []  # the first one warms up
            if dist.get_rank() == 0:
                show(kind, nbytes, us)


def show(kind: str, nbytes: int, us: dict[str, list[float]]) -> None:
    ours, gloo = (statistics.median(us[name]) for name in ("fcoll", "gloo"))
    line = f"{kind:<15}{nbytes:>9} B  fcoll {ours:9.1f}  gloo {gloo:9.1f}  {ours / gloo:.3f}x"
    print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--turns", type=int, default=6)
    args = parser.parse_args()
    print(f"{args.ranks} ranks, f32, median us of a call from Python, {args.turns} turns")
    sizes = [int(s) for s in args.sizes.split(",")]
    facts = args.kinds.split(","), sizes, args.turns
    fcoll.launch(rank_main, *facts, world_size=args.ranks, backend="fcoll")
