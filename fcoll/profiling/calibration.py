"""Measure this machine: what ``Machine.preset("local")`` then reads.

Matrix products by dtype and memory traffic as two ranks reach them at the same time, and every
collective of CALLS at sizes from 64 bytes on. What lies between two sizes is interpolated, so the
latencies and bandwidths of both the small and the large messages are in the model.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fcoll import functions as fcoll
from fcoll.costs.machine import Link, Machine, machine_dir
from fcoll.eager.launch import launch
from fcoll.table.collectives import COLLECTIVES

SIZES = tuple(1 << k for k in range(6, 26))  # 64 B to 32 MiB, of the larger of argument and result
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SECONDS = 0.008  # for one figure, in each pass; at least ROUNDS calls
ROUNDS = 3
# Far apart in time: the cores of a virtual machine are near to each other now and far then, and
# other programs come and go.
PASSES = 8
TRIES = 4
QUICK = SIZES[::4]  # and one pass

#: name of the row -> a call on n ranks whose larger side is x
CALLS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "all_reduce": lambda x, n: fcoll.all_reduce(x),
    "all_gather_into_tensor": lambda x, n: fcoll.all_gather_into_tensor(x[: len(x) // n]),
    "reduce_scatter_tensor": lambda x, n: fcoll.reduce_scatter_tensor(x),
    "all_to_all_single": lambda x, n: fcoll.all_to_all_single(x),
    "broadcast": lambda x, n: fcoll.broadcast(x, 0),
}


def calibrate(
    ranks: int = 2, path: Path | None = None, quiet: bool = False, quick: bool = False
) -> Machine:
    """Measure with this many local ranks and write the result to ``path`` (local.toml).

    ``quick`` takes seconds and gives a rough picture: few sizes, one pass.
    """
    path = path or machine_dir() / "local.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    launch(_measure_into, str(path), quiet, quick, world_size=ranks)
    return Machine.from_toml(path)


def _measure_into(path: str, quiet: bool, quick: bool) -> None:
    """Runs on every rank."""
    machine = measure(quiet, quick)
    if dist.get_rank() == 0:
        Path(path).write_text("# Written by `fcoll calibrate`.\n" + machine.to_toml())


def measure(quiet: bool = False, quick: bool = False) -> Machine:
    """The machine as the ranks of the default group find it: all of them call this together, and
    all get the same."""
    results: dict[str, Any] = {"flops": {}, "measured": {}}
    figures = list(_figures(results, quick))
    shows = dist.get_rank() == 0 and not quiet
    for i, (name, run) in enumerate(figures):
        if shows:
            _progress(f"{i + 1}/{len(figures)} {name}")
        run()
    if shows:
        _progress("", end="\n" if sys.stderr.isatty() else "")
    return _machine(results, dist.get_world_size())


@dataclass(frozen=True)
class Sample:
    us: float
    preempted: float  # times that a rank had to give up its core meanwhile


def call_us(op: str, nbytes: int, seconds: float = SECONDS) -> Sample:
    """The median time of a call and its wait; the same on all ranks, who call this together.

    While another program has one of the cores the figure says nothing of this machine: then it is
    tried again, and the least disturbed of the tries is taken.
    """
    n = dist.get_world_size()
    x = torch.ones(max(nbytes // 4, n))
    call = CALLS[op]
    tries: list[Sample] = []
    while not tries or (tries[-1].preempted > 1 and len(tries) < TRIES):
        before = _preempted()
        us = median_us(lambda: fcoll.wait_tensor(call(x, n)), seconds)
        tries.append(Sample(_agree(us), _agree(_preempted() - before)))
    return min(tries, key=lambda sample: sample.preempted)


def _preempted() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def typical(samples: list[Sample]) -> float:
    """The median of the less disturbed half of the passes."""
    quiet = sorted(samples, key=lambda sample: sample.preempted)[: (len(samples) + 1) // 2]
    return statistics.median(sample.us for sample in quiet)


def median_us(run: Callable[[], Any], seconds: float) -> float:
    for _ in range(2):
        run()
    first = time.perf_counter()
    run()
    each = time.perf_counter() - first
    rounds = int(_agree(max(ROUNDS, min(1000, seconds / max(each, 1e-7)))))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _agree(value: float) -> float:
    """The mean over the ranks."""
    x = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(x)
    return float(x) / dist.get_world_size()


def _progress(text: str, end: str = "") -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[Kfcoll: measuring {text}" if text else "\r\x1b[K", end=end, file=sys.stderr)
    elif text:
        print(f"fcoll: measuring {text}", file=sys.stderr)
    sys.stderr.flush()


def _figures(results: dict[str, Any], quick: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """(title, a function that measures it into ``results``)."""
    sizes = QUICK if quick else SIZES
    samples: dict[tuple[str, int], list[Sample]] = {}

    def flops(dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        results["flops"][name] = _matmul_tflops(dtype)

    def memory() -> None:
        x = torch.ones(16 << 20)  # 64 MiB: more than the caches hold
        y = torch.empty_like(x)
        moved = 2 * x.nbytes
        results["memory_gb_per_s"] = moved / _agree(median_us(lambda: y.copy_(x), 0.3)) / 1e3
        small = torch.ones(16)
        results["launch_us"] = _agree(median_us(lambda: small.neg(), SECONDS))

    def collective(op: str) -> None:
        for size in sizes:
            samples.setdefault((op, size), []).append(call_us(op, size))
        results["measured"][op] = [(size, typical(samples[op, size])) for size in sizes]

    for dtype in DTYPES:
        yield f"matrix products in {str(dtype).removeprefix('torch.')}", partial(flops, dtype)
    yield "memory", memory
    for i in range(1 if quick else PASSES):
        for op in CALLS:
            yield f"{op}, pass {i + 1}", partial(collective, op)


def _matmul_tflops(dtype: torch.dtype) -> float:
    n = 512
    x = torch.ones(n, n, dtype=dtype)
    return 2 * n**3 / _agree(median_us(lambda: x @ x, 0.2)) / 1e6


def _machine(results: dict[str, Any], ranks: int) -> Machine:
    link = fit_link(results["measured"], ranks)
    return Machine(
        name="local",
        flops=results["flops"],
        memory_gb_per_s=results["memory_gb_per_s"],
        launch_us=results["launch_us"],
        ranks_per_node=max(os.cpu_count() or 1, ranks),
        intra=link,
        inter=link,
        measured={op: tuple(map(tuple, points)) for op, points in results["measured"].items()},
        measured_ranks=ranks,
        note=f"measured with {ranks} ranks on {os.cpu_count()} cores",
    )


def fit_link(measured: dict[str, Any], n: int) -> Link:
    """A latency and a bandwidth for what was not measured: from the smallest messages, and from
    those of 1 MiB and more."""
    latencies, rates = [], []
    for op, points in measured.items():
        row = COLLECTIVES[op]
        latencies.append(points[0][1] / row.steps(n))
        rates += [row.wire_bytes(n, b) / us / 1e3 for b, us in points if b >= 1 << 20]
    return Link(statistics.median(latencies), statistics.median(rates))
