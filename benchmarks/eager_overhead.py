"""What a functional collective costs in eager: fcoll, torch's functional collectives, dist.

Issue, then wait, on 2 gloo ranks; the peers take turns within every round, so that all see the
same machine. Median microseconds a call: first of an all-reduce by size, then of every collective
that torch's functional module has too, and of a gradient, by name. FCOLL_NATIVE=0 measures fcoll on
process groups.

python benchmarks/eager_overhead.py [--rounds 200]
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import fcoll

SIZES = (64, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
SMALL = 1 << 10
PEERS = ("fcoll", "torch functional", "dist.all_reduce")
Call = Callable[[], object]


def by_size(nbytes: int) -> dict[str, Call]:
    """An all-reduce by each peer."""
    x, group = torch.ones(nbytes // 4), dist.group.WORLD

    def in_place() -> None:
        dist.all_reduce(x.clone())  # the others leave x alone

    return {
        "fcoll": lambda: fcoll.wait_tensor(fcoll.all_reduce(x, "sum", group)),
        "torch functional": lambda: funcol.all_reduce(x, "sum", group).wait(),
        "dist.all_reduce": in_place,
    }


def by_name(nbytes: int) -> dict[str, dict[str, Call]]:
    """Every collective, by fcoll and by torch's functional module."""
    x, world = torch.ones(nbytes // 4), dist.group.WORLD
    leaf, ones = torch.ones(nbytes // 4, requires_grad=True), torch.ones(nbytes // 4)

    def each(ours: Call, torchs: Call) -> dict[str, Call]:
        def waited(call: Call, wait: Callable) -> Call:
            return lambda: [wait(y) for y in made] if type(made := call()) is list else wait(made)

        return {
            "fcoll": waited(ours, fcoll.wait_tensor),
            "torch functional": waited(torchs, funcol.wait_tensor),
        }

    return {
        "all_gather_into_tensor": each(
            lambda: fcoll.all_gather_into_tensor(x, world),
            lambda: funcol.all_gather_single(x, 0, world),
        ),
        "reduce_scatter_tensor": each(
            lambda: fcoll.reduce_scatter_tensor(x, "sum", world),
            lambda: funcol.reduce_scatter_single(x, "sum", 0, world),
        ),
        "all_to_all_single": each(
            lambda: fcoll.all_to_all_single(x, world),
            lambda: funcol.all_to_all_single(x, None, None, world),
        ),
        "broadcast": each(lambda: fcoll.broadcast(x, 0), lambda: funcol.broadcast(x, 0, world)),
        "all_reduce_coalesced": each(
            lambda: fcoll.all_reduce_coalesced([x, x], "sum", world),
            lambda: funcol.all_reduce_coalesced([x, x], "sum", world),
        ),
        "all_reduce and its gradient": {
            "fcoll": lambda: fcoll.wait_tensor(fcoll.all_reduce(leaf, "sum", world)).backward(ones),
            "torch functional": lambda: funcol.all_reduce(leaf, "sum", world).wait().backward(ones),
        },
    }


def measure(run: dict[str, Call], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {peer: [] for peer in run}
    peers = list(run)
    for i in range(rounds + 10):
        for k in range(len(peers)):
            peer = peers[(i + k) % len(peers)]
            start = time.perf_counter()
            run[peer]()
            if i >= 10:  # the first rounds warm up
                times[peer].append((time.perf_counter() - start) * 1e6)
    return {peer: statistics.median(t) for peer, t in times.items()}


def show(what: str, us: dict[str, float]) -> None:
    if dist.get_rank() == 0:
        cells = [f"{us[p]:>17.1f}" if p in us else " " * 17 for p in PEERS]
        print(f"{what:>28}", *cells, f"{us['fcoll'] / us['torch functional']:>12.2f}", flush=True)


def ranks(rounds: int) -> None:
    warnings.simplefilter("ignore")
    if dist.get_rank() == 0:
        print(f"f32, issue and wait, 2 ranks, gloo, {rounds} rounds, median us")
        print(f"{'':>28}", *[f"{p:>17}" for p in PEERS], f"{'fcoll/torch':>12}")
    for nbytes in SIZES:
        us = measure(by_size(nbytes), rounds if nbytes < 1 << 20 else rounds // 4)
        show(f"all_reduce {nbytes:>9} B", us)
    for name, run in by_name(SMALL).items():
        show(name, measure(run, rounds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    fcoll.launch(ranks, parser.parse_args().rounds, world_size=2)
