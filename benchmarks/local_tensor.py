"""fcoll.local against torch's LocalTensorMode: ops and collectives on W simulated ranks.

    python benchmarks/local_tensor.py [--ranks 64] [--numel 256] [--seconds 0.5]

Each line is one call on LocalTensors of ``numel`` floats a rank, in one process: the CPU time of a
call (process_time, the least of interleaved rounds), ours and torch's, and their ratio.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._local_tensor as torchs

from fcoll import local
from fcoll.units import table

Call = Callable[[], Any]


def calls(face: ModuleType, ranks: int, numel: int) -> dict[str, Call]:
    """What is timed, by name; made and run in a mode of ``face``."""
    side = max(1, int(numel**0.5))
    with torch.random.fork_rng():
        parts = {r: torch.randn(numel) for r in range(ranks)}
        squares = {r: torch.randn(side, side) for r in range(ranks)}
    with face.LocalTensorMode(ranks):
        x, y = face.LocalTensor(parts) + 0, face.LocalTensor(parts) + 1
        a = face.LocalTensor(squares) + 0
        wide, narrow = torch.zeros(ranks * numel), torch.zeros(max(1, numel // ranks))
        even = torch.zeros(ranks * max(1, numel // ranks))
        many = [torch.zeros(numel) for _ in range(ranks)]
    world = dist.group.WORLD
    return {
        "x + y": lambda: x + y,
        "x.mul_(1.0)": lambda: x.mul_(1.0),
        "gelu(x)": lambda: torch.nn.functional.gelu(x),
        "sigmoid(x)": lambda: x.sigmoid(),
        "x.sum()": lambda: x.sum(),
        "x.view(-1)": lambda: x.view(-1),
        "a @ a": lambda: a @ a,
        "a.softmax(-1)": lambda: a.softmax(-1),
        "zeros": lambda: torch.zeros(numel),
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather (tensor)": lambda: dist.all_gather_into_tensor(wide, x),
        "all_gather (list)": lambda: dist.all_gather(many, x),
        "reduce_scatter (tensor)": lambda: dist.reduce_scatter_tensor(narrow, even),
        "all_to_all (tensor)": lambda: dist.all_to_all_single(even, even.clone()),
        "functional all_reduce": lambda: funcol.all_reduce(x, "sum", world),
        "functional all_gather": lambda: torch.ops._c10d_functional.all_gather_into_tensor(
            x, ranks, world.group_name
        ),
    }


def seconds_of(face: ModuleType, ranks: int, call: Call, budget: float) -> float:
    """The least CPU time of a call in rounds that take ``budget`` seconds in all."""
    best, spent = float("inf"), 0.0
    with face.LocalTensorMode(ranks):
        call()
        while spent < budget:
            start = time.process_time()
            call()
            took = time.process_time() - start
            best, spent = min(best, took), spent + took
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--numel", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line and side")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=args.ranks)
    ours = calls(local, args.ranks, args.numel)
    theirs = calls(torchs, args.ranks, args.numel)
    rows = [("call", "fcoll.local us", "torch us", "ratio")]
    for name in ours:
        mine = their = float("inf")
        for _ in range(3):  # interleaved, so that both see the same machine
            mine = min(mine, seconds_of(local, args.ranks, ours[name], args.seconds / 3))
            their = min(their, seconds_of(torchs, args.ranks, theirs[name], args.seconds / 3))
        rows.append((name, f"{mine * 1e6:.0f}", f"{their * 1e6:.0f}", f"{their / mine:.1f}x"))
    dist.destroy_process_group()
    print(f"{args.ranks} ranks, {args.numel} floats a rank")
    print(*table(rows, "<>>>"), sep="\n")


if __name__ == "__main__":
    main()
