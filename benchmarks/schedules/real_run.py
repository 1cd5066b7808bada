"""Does a planned order take less time in a real run, and as much less as the plan says?

Two ranks in two network namespaces, so two hosts as far as gloo can tell, joined by a link of
limited rate. Each rank has one core and one thread. Three training steps written by hand, forward
and backward, compiled by backend="fcoll" once in the order they are written in (schedule=None) and
once for each scheduler:

    fsdp  every layer's weight is gathered where it is used; its gradient is reduce-scattered
    ddp   every layer's weight is whole; its gradient is all-reduced
    tp    columns and rows of two weights a layer; activations are gathered before the first product
          and reduce-scattered behind the second: only in chunks can they travel meanwhile

The link and the cores are measured first (what `fcoll calibrate` measures, here between these
two ranks), and the plans are made with those prices. Then all compiled steps take turns; a turn's
time is that of the slower rank, and the median of the turns is shown beside the plan's own figure.

python benchmarks/schedules/real_run.py [--mbit 400] [--layers 6] [--turns 15] [--delay-us 0] ...
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import slow_links
import torch
import torch.distributed as dist
from torch import Tensor

import fcoll
import inductor_ext
from fcoll.profiling.calibration import measure
from fcoll.units import table

PROGRAMS: dict[str, Callable[..., Tensor]] = {}


def program(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    PROGRAMS[fn.__name__] = fn
    return fn


@program
def fsdp(x: Tensor, *shards: Tensor) -> Tensor:
    for shard in shards:
        x = torch.relu(x @ fcoll.all_gather_into_tensor(shard))
    return x


@program
def ddp(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = torch.relu(x @ fcoll.identity(weight))  # its gradient is summed over the ranks
    return x


@program
def tp(x: Tensor, *weights: Tensor) -> Tensor:
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        h = torch.relu(fcoll.all_gather_into_tensor(x) @ up)
        x = fcoll.reduce_scatter_tensor(h @ down)
    return x


def inputs(name: str, args: argparse.Namespace) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    rows = args.dim // 2 if name == "fsdp" else args.dim
    weights = [torch.randn(rows, args.dim) / args.dim**0.5 for _ in range(args.layers)]
    mine = args.rows // 2 if name == "tp" else args.rows
    return [torch.randn(mine, args.dim), *(w.requires_grad_() for w in weights)]


def variants(name: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is compared, and the settings of each."""
    made: dict[str, dict[str, Any]] = {"as written": {"schedule": None}}
    made |= {scheduler: {"schedule": scheduler} for scheduler in args.schedulers.split(",")}
    if name == "tp":
        made["overlap, in chunks"] = {"schedule": "overlap", "splits": True}
    return made


def step(compiled: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    for x in given:
        x.grad = None
    compiled(*given).sum().backward()
    return [x.grad for x in given if x.grad is not None]


def compiled(name: str, settings: dict[str, Any], given: list[Tensor]) -> Callable[..., Tensor]:
    """The program compiled under a scheduler, forward and backward. With code of its own: Dynamo
    keeps what it compiles by the code."""
    source = PROGRAMS[name]
    own = types.FunctionType(source.__code__.replace(), source.__globals__, name)
    made = torch.compile(own, backend="fcoll", fullgraph=True, dynamic=False)
    with inductor_ext.config.patch(**settings):
        step(made, given)
    return made


def turn_ms(made: Callable[..., Tensor], given: list[Tensor]) -> float:
    """The time of a step on the slower rank."""
    dist.barrier()
    begin = time.perf_counter()
    step(made, given)
    taken = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return 1e3 * float(taken)


# -- a rank ---


def on_rank(args: argparse.Namespace) -> None:
    os.sched_setaffinity(0, {args.rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=args.meet, rank=args.rank, world_size=2)
    shows = args.rank == 0
    machine = measure(quick=True)
    if shows:
        link = f"{machine.intra.gb_per_s * 8e3:.0f} Mbit/s, {machine.intra.latency_us:.0f} us"
        print(f"measured: {link} a message; {1e3 * machine.flops['float32']:.0f} GFLOP/s a rank")
    with inductor_ext.config.patch(machine=machine, network=machine, memory_cap=args.memory):
        for name in args.programs.split(","):
            rows = compare(name, args)
            if shows:
                print(
                    f"\n{name}: {args.layers} layers of {args.dim} x {args.dim}, {args.rows} rows"
                )
                print("\n".join(table(rows, "<" + ">" * (len(rows[0]) - 1))), flush=True)
    dist.destroy_process_group()


def compare(name: str, args: argparse.Namespace) -> list[tuple[str, ...]]:
    """The rows of a program's table: all schedules take turns."""
    given = inputs(name, args)
    made, predicted, grads = {}, {}, {}
    for variant, settings in variants(name, args).items():
        before = len(inductor_ext.plans())
        made[variant] = compiled(name, settings, given)
        if plans := inductor_ext.plans()[before:]:  # of the forward and the backward graph
            predicted[variant] = sum(plan.makespan_us for plan in plans) / 1e3
            predicted["as written"] = sum(plan.original_us for plan in plans) / 1e3
        grads[variant] = step(made[variant], given)
    turns: dict[str, list[float]] = {variant: [] for variant in made}
    for _ in range(args.turns):
        for variant, run in made.items():
            turns[variant].append(turn_ms(run, given))
    took = {variant: statistics.median(ms) for variant, ms in turns.items()}
    rows = [("schedule", "planned ms", "took ms", "gain planned", "gain measured", "same values")]
    for variant in made:
        gains = [ms["as written"] / ms[variant] for ms in (predicted, took)]
        figures = (predicted[variant], took[variant], *gains)
        shown = (f"{x:.1f}" if i < 2 else f"{x:.2f}x" for i, x in enumerate(figures))
        rows.append((variant, *shown, same(grads["as written"], grads[variant])))
    return rows


def same(these: list[Tensor], those: list[Tensor]) -> str:
    """Sums in chunks may be rounded otherwise: those of weights' gradients have other products."""
    if all(map(torch.equal, these, those)):
        return "yes"
    off = max(float((a - b).norm() / a.norm()) for a, b in zip(these, those, strict=True))
    return f"to {off:.0e}"


# -- both ranks ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=400, help="rate of the link, each way")
    parser.add_argument("--delay-us", type=float, default=0, help="each way; needs netem")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--memory", default="+10%", help="memory cap of the plans")
    parser.add_argument("--schedulers", default="safe,overlap")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        on_rank(args)
        return
    with slow_links.two_hosts(args.mbit, args.delay_us) as hosts, TemporaryDirectory() as folder:
        ranks = [start(host, rank, folder) for rank, host in enumerate(hosts)]
        try:
            failed = [rank for rank, process in enumerate(ranks) if process.wait()]
        finally:
            for process in ranks:
                process.kill()
    if failed:
        raise SystemExit(f"rank {failed[0]} failed")


def start(host: str, rank: int, folder: str) -> subprocess.Popen[bytes]:
    """This program as a rank, in a namespace. Shared memory would reach across: it is off."""
    own = ["--rank", str(rank), "--meet", f"file://{folder}/store"]
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", folder)
    settings = {
        "GLOO_SOCKET_IFNAME": slow_links.interface(rank),
        "FCOLL_NATIVE": "0",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/rank{rank}",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = ["ip", "netns", "exec", host, sys.executable, *sys.argv, *own]
    return subprocess.Popen(command, env={**os.environ, **settings})


if __name__ == "__main__":
    main()
