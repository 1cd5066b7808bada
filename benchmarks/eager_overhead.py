"""What a functional all-reduce costs in eager: fcoll, torch's functional collectives, dist.

Issue, then wait, on 2 gloo ranks; the three take turns within every round, so that all see the
same machine. Median microseconds a call.

python benchmarks/eager_overhead.py [--rounds 200]
"""

import argparse
import statistics
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import fcoll

SIZES = (64, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
PEERS = ("fcoll", "torch functional", "dist.all_reduce")


def calls(x: torch.Tensor) -> dict:
    group = dist.group.WORLD

    def in_place() -> None:
        dist.all_reduce(x.clone())  # the others leave x alone

    return {
        "fcoll": lambda: fcoll.wait_tensor(fcoll.all_reduce(x, "sum", group)),
        "torch functional": lambda: funcol.all_reduce(x, "sum", group).wait(),
        "dist.all_reduce": in_place,
    }


def measure(nbytes: int, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {peer: [] for peer in PEERS}
    run = calls(torch.ones(nbytes // 4))
    for i in range(rounds + 10):
        for k in range(len(PEERS)):
            peer = PEERS[(i + k) % len(PEERS)]
            start = time.perf_counter()
            run[peer]()
            if i >= 10:  # the first rounds warm up
                times[peer].append((time.perf_counter() - start) * 1e6)
    return {peer: statistics.median(t) for peer, t in times.items()}


def ranks(rounds: int) -> None:
    warnings.simplefilter("ignore")
    if dist.get_rank() == 0:
        print(f"all_reduce f32, issue and wait, 2 ranks, gloo, {rounds} rounds, median us")
        print(f"{'bytes':>9}", *[f"{p:>17}" for p in PEERS], f"{'fcoll/torch':>12}")
    for nbytes in SIZES:
        us = measure(nbytes, rounds if nbytes < 1 << 20 else rounds // 4)
        if dist.get_rank() == 0:
            ratio = us["fcoll"] / us["torch functional"]
            print(f"{nbytes:>9}", *[f"{us[p]:>17.0f}" for p in PEERS], f"{ratio:>12.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    fcoll.launch(ranks, parser.parse_args().rounds, world_size=2)
