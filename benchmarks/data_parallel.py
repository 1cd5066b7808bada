"""A step of data parallel training on 2 ranks: fcoll.DataParallel against torch's module on gloo.

(a) 200 small layers, (b) a transformer of 10 M parameters; eager and compiled (backend="inductor").
All take turns within every round. Median ms of a step (forward and backward) on the slower rank,
and its ratio to torch's; "none" is the step without any exchange.

"all_reduce of 64 MiB" is a call from Python against the loop in C++ on the same memory.

python benchmarks/data_parallel.py [--rounds 20] [--no-compile] [--only layers] [--layers 200]
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fcoll
from fcoll import symm_mem

WARM_UP = 4


def small_layers(count: int = 200) -> tuple[nn.Module, Tensor]:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*layers), torch.randn(4, 32)


def transformer() -> tuple[nn.Module, Tensor]:
    block = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(block, 3, enable_nested_tensor=False), torch.randn(2, 32, 512)


PARTS = ("message", "layers", "transformer")


def ways(build: Callable[[], tuple[nn.Module, Tensor]], compiles: bool) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {
        "none": build()[0],
        "torch": DistributedDataParallel(build()[0]),
        "fcoll": fcoll.DataParallel(build()[0]),
    }
    if compiles:
        found["torch, compiled"] = torch.compile(DistributedDataParallel(build()[0]))
        found["fcoll, compiled"] = torch.compile(fcoll.DataParallel(build()[0]), fullgraph=True)
    return found


def measure(modules: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, float]:
    """Median seconds of a step on the slower rank."""
    taken: dict[str, list[float]] = {name: [] for name in modules}
    for i in range(WARM_UP + rounds):
        for name, module in modules.items():
            module.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            module(x).sum().backward()
            slower = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slower, dist.ReduceOp.MAX)
            if i >= WARM_UP:
                taken[name].append(slower.item())
    return {name: statistics.median(times) for name, times in taken.items()}


def large_message(rounds: int) -> tuple[float, float]:
    """Median seconds of an all-reduce of 64 MiB, from Python and in the loop in C++, in turns."""
    x, out = torch.ones(16 << 20), torch.ones(16 << 20)
    python, loop = [], []
    for _ in range(WARM_UP + rounds):
        dist.barrier()
        start = time.perf_counter()
        fcoll.wait_tensor(fcoll.all_reduce(x))
        python.append(time.perf_counter() - start)
        dist.barrier()
        # us of one round; the result's memory is there, as in an MPI program
        us = torch.ops.fcoll_native.loop("all_reduce", x, out, 1, symm_mem.status().handle)
        loop.append(1e-6 * us[0])
    return statistics.median(python[WARM_UP:]), statistics.median(loop[WARM_UP:])


def main(rounds: int, compiles: bool, only: str, layers: int) -> None:
    # Dynamo makes an autograd function itself where it traces one
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    if only in ("", "message"):
        python, loop = large_message(rounds)
        if dist.get_rank() == 0:
            print("all_reduce of 64 MiB")
            print(f"  Python {python * 1e3:.2f} ms, C++ {loop * 1e3:.2f} ms  {python / loop:5.2f}")
    models = {
        f"{layers} small layers": partial(small_layers, layers),
        "transformer, 10 M": transformer,
    }
    for name, build in models.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        found = measure(ways(build, compiles), build()[1], rounds)
        if dist.get_rank() == 0:
            print(name)
            for way, seconds in found.items():
                ratio = seconds / found["torch"]
                print(f"  {way:18} {seconds * 1e3:9.2f} ms  {ratio:5.2f} of torch's")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--only", default="", choices=["", *PARTS])
    parser.add_argument("--layers", type=int, default=200)
    args = parser.parse_args()
    fcoll.launch(main, args.rounds, not args.no_compile, args.only, args.layers)
