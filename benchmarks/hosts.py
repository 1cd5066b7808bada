"""Two hosts of two ranks: fcoll on memory inside and messages between, against torch and gloo.

The hosts are network and PID namespaces of this machine, joined by a link of limited rate. In one
run all of a size take turns; a figure is the median of the turns' medians on the slowest rank. The
bound is the time that the bytes which must cross take at the link's rate, both ways at once.

python benchmarks/hosts.py [--mbit 1000,10000] [--turns 7] [--ranks 2,2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from schedules import slow_links

import fcoll
from fcoll.units import table

SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
SHARES = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "all_to_all": 0.5}


def calls(nbytes: int) -> dict[str, tuple[Callable, Callable]]:
    """By name: ours and torch's, of so many bytes in the larger of input and result."""
    n = dist.get_world_size()
    x, part = torch.ones(nbytes // 4), torch.ones(nbytes // 4 // n)
    out, share = torch.empty_like(x), torch.empty_like(part)
    wait = fcoll.wait_tensor
    return {
        "all_reduce": (lambda: wait(fcoll.all_reduce(x)), lambda: dist.all_reduce(out)),
        "all_gather": (
            lambda: wait(fcoll.all_gather_into_tensor(part)),
            lambda: dist.all_gather_into_tensor(out, part),
        ),
        "reduce_scatter": (
            lambda: wait(fcoll.reduce_scatter_tensor(x)),
            lambda: dist.reduce_scatter_tensor(share, x),
        ),
        "all_to_all": (
            lambda: wait(fcoll.all_to_all_single(x)),
            lambda: dist.all_to_all_single(out, x),
        ),
    }


def turn_us(call: Callable, times: int) -> float:
    """The median of the calls on the slowest rank."""
    dist.barrier()
    us = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        us.append((time.perf_counter() - start) * 1e6)
    slowest = torch.tensor([statistics.median(us)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", rank=args.rank, timeout=timeout)
    status = fcoll.symm_mem.status()
    rows: list[tuple[str, ...]] = [
        ("collective", "bytes", "fcoll us", "gloo us", "bound us", "ratio")
    ]
    for nbytes in SIZES:
        times = max(3, min(30, int(2e7 / (nbytes + 5e5))))
        for name, pair in calls(nbytes).items():
            us: tuple[list[float], list[float]] = ([], [])
            for turn in range(args.turns + 1):
                for kept, call in zip(us, pair, strict=True):
                    took = turn_us(call, times)
                    if turn:
                        kept.append(took)
            ours, theirs = map(statistics.median, us)
            # between two hosts of equal size each sends so many bytes of the whole
            bound = SHARES[name] * nbytes * 8 / args.link_mbit
            cells = (f"{x:.0f}" for x in (ours, theirs, bound))
            rows.append((name, f"{nbytes:,}", *cells, f"{ours / theirs:.2f}"))
    if args.rank == 0:
        print(status)
        print(*table(rows, "<>>>>>"), sep="\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", default="1000,10000")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--ranks", default="2,2")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--link-mbit", type=float, default=0)
    args = parser.parse_args()
    if args.rank is not None:
        return rank(args)
    ranks = list(map(int, args.ranks.split(",")))
    for mbit in map(float, args.mbit.split(",")):
        print(f"-- {ranks} ranks, {mbit:g} Mbit/s between the hosts")
        with slow_links.two_hosts(mbit, 0) as hosts:
            running = [
                start(hosts[i], i, range(sum(ranks[:i]), sum(ranks[: i + 1])), mbit, args)
                for i in range(2)
            ]
            if any([process.wait() for process in running]):
                raise SystemExit("a rank failed")


def start(
    host: str, i: int, ranks: range, mbit: float, args: argparse.Namespace
) -> subprocess.Popen:
    own = f"--link-mbit {mbit} --turns {args.turns}"
    each = " & ".join(f"{sys.executable} {__file__} --rank {r} {own}" for r in ranks)
    world = {
        "GLOO_SOCKET_IFNAME": slow_links.interface(i),
        "MASTER_ADDR": f"{slow_links.SUBNET}.1",
        "MASTER_PORT": "29517",
        "WORLD_SIZE": str(sum(map(int, args.ranks.split(",")))),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = ["ip", "netns", "exec", host, *inside, "sh", "-c", f"{each} & wait"]
    return subprocess.Popen(command, env=os.environ | world)


if __name__ == "__main__":
    main()
