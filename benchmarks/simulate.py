"""Simulated ranks in one process: fcoll.simulate against torch's LocalTensorMode.

A step is a tensor-parallel MLP with its backward and the gradients' all-reduce over dp; a
collective is alone, on the whole world. Each figure is the median of runs that take turns with the
peer's, in ms of process time (the CPU's, so other programs disturb little).

    python benchmarks/simulate.py                     # all of it: some minutes, most in the peer
    python benchmarks/simulate.py --only step --ranks 8 64
    python benchmarks/simulate.py --only many         # 10,000 ranks: time and peak memory
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode

import fcoll
from fcoll.units import table

TOKENS, DIM, HIDDEN = 8, 32, 16  # of a rank
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Way:
    """One way to simulate: ``run`` is timed, inside ``around``."""

    name: str
    run: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def axes_of(ranks: int) -> dict[str, int]:
    tp = 4 if ranks <= 8 else 8
    return {"dp": ranks // tp, "tp": tp}


# -- the step ---


def loss_of(x: Tensor, up: Tensor, down: Tensor, tp: Any) -> Tensor:
    h = torch.relu(x @ up.transpose(-1, -2))
    y = funcol.wait_tensor(funcol.all_reduce(h @ down.transpose(-1, -2), "sum", tp))
    return y.square().mean()


def reduced(grads: Sequence[Tensor], dp: Any) -> list[Tensor]:
    return [funcol.wait_tensor(funcol.all_reduce(g, "sum", dp)) for g in grads]


def stacks(ranks: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (TOKENS, DIM), (HIDDEN, DIM), (DIM, HIDDEN)
    return [torch.randn(ranks, *shape) for shape in shapes]


def our_step(ranks: int) -> Callable[[], list[Tensor]]:
    x, up, down = stacks(ranks)
    up.requires_grad_()
    down.requires_grad_()
    loss = fcoll.simulate(lambda *xs: loss_of(*xs, (loss.mesh, 1)), mesh_shape=axes_of(ranks))
    reduce = fcoll.simulate(lambda *gs: reduced(gs, (reduce.mesh, 0)), mesh_shape=axes_of(ranks))

    def run() -> list[Tensor]:
        grads = torch.autograd.grad(loss(x, up, down).sum(), (up, down))
        return reduce(*grads)

    return run


def local_step(ranks: int, mesh: Any, mode: LocalTensorMode) -> Callable[[], list[Tensor]]:
    with mode.disable():  # a tensor made inside the mode would be one of each rank already
        whole = stacks(ranks)
    x, up, down = (mode.rank_map(lambda r, s=s: s[r].clone()) for s in whole)
    up.requires_grad_()
    down.requires_grad_()

    def run() -> list[Tensor]:
        grads = torch.autograd.grad(loss_of(x, up, down, (mesh, 1)), (up, down))
        return reduced(grads, (mesh, 0))

    return run


# -- one collective ---

COLLECTIVES: dict[str, Callable[[Tensor, Any, int], Tensor]] = {
    "all_reduce": lambda x, g, n: funcol.all_reduce(x, "sum", g),
    "all_gather": lambda x, g, n: funcol.all_gather_single(x, 0, g),
    "reduce_scatter": lambda x, g, n: funcol.reduce_scatter_single(x, "sum", 0, g),
    "all_to_all": lambda x, g, n: funcol.all_to_all_single(x, None, None, g),
    "broadcast": lambda x, g, n: funcol.broadcast(x, 0, g),
}


def elements(size_bytes: int, ranks: int) -> int:
    return max(size_bytes // 4 // ranks, 1) * ranks


def our_collective(name: str, size_bytes: int, ranks: int) -> Callable[[], Tensor]:
    x_W = torch.randn(ranks, elements(size_bytes, ranks))
    call = COLLECTIVES[name]
    sim = fcoll.simulate(
        lambda x: funcol.wait_tensor(call(x, sim.mesh, ranks)), mesh_shape={"all": ranks}
    )
    return lambda: sim(x_W)


def local_collective(
    name: str, size_bytes: int, ranks: int, mesh: Any, mode: LocalTensorMode
) -> Callable[[], Tensor]:
    x = mode.rank_map(lambda r: torch.randn(elements(size_bytes, ranks)))
    call = COLLECTIVES[name]
    return lambda: funcol.wait_tensor(call(x, mesh, ranks))


# -- measuring ---


def in_turns(ways: Sequence[Way], rounds: int) -> list[float]:
    """The median process time of each, in ms; the first round warms up."""
    times: list[list[float]] = [[] for _ in ways]
    for round_ in range(rounds + 1):
        for way, found in zip(ways, times, strict=True):
            with way.around():
                gc.collect()
                for _ in range(3):
                    start = time.process_time()
                    way.run()
                    if round_:
                        found.append((time.process_time() - start) * 1e3)
    return [statistics.median(found) for found in times]


def against_local(
    ranks: int, axes: dict[str, int], ours: Callable[[], Any], theirs: Any, rounds: int
) -> tuple[float, float]:
    """(ours, LocalTensorMode's) in ms. Others add their columns here."""
    with fcoll.fake_world(**axes) as mesh:
        mode = LocalTensorMode(ranks)
        with mode:
            run = theirs(mesh, mode)
        ways = [Way("fcoll.simulate", ours), Way("LocalTensorMode", run, lambda: mode)]
        mine, peer = in_turns(ways, rounds)
    return mine, peer


def row(what: str, ranks: int, mine: float, peer: float, bar: float) -> list[str]:
    return [what, f"{ranks}", f"{mine:.2f}", f"{peer:.1f}", f"{peer / mine:.1f}x", f">= {bar:g}x"]


def steps(ranks_list: Sequence[int], rounds: int) -> list[list[str]]:
    bars = {8: 20, 64: 60, 256: 60, 1024: 100}
    rows = []
    for ranks in ranks_list:
        theirs = lambda mesh, mode, w=ranks: local_step(w, mesh, mode)  # noqa: E731
        count = rounds if ranks < 256 else min(rounds, 3)
        times = against_local(ranks, axes_of(ranks), our_step(ranks), theirs, count)
        rows.append(row("TP-MLP step", ranks, *times, bars.get(ranks, 20)))
    return rows


def collectives(ranks_list: Sequence[int], size_bytes: int, bar: float, rounds: int) -> Any:
    rows = []
    for ranks in ranks_list:
        for name in COLLECTIVES:
            theirs = lambda mesh, mode, c=name, w=ranks: local_collective(  # noqa: E731
                c, size_bytes, w, mesh, mode
            )
            ours = our_collective(name, size_bytes, ranks)
            times = against_local(ranks, {"all": ranks}, ours, theirs, rounds)
            size = f"{size_bytes // KIB} KiB" if size_bytes < MIB else f"{size_bytes // MIB} MiB"
            rows.append(row(f"{name} {size}", ranks, *times, bar))
    return rows


def many(ranks: int = 10_000) -> list[list[str]]:
    run = our_step(ranks)
    start = time.process_time()
    run()
    took_s = time.process_time() - start
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    shown = [f"{took_s:.2f} s (bar 2)", f"{peak_gib:.2f} GiB peak of the process (bar 4)"]
    return [["TP-MLP step, first call", f"{ranks}", *shown]]


def live_bytes(ranks: int = 64) -> list[list[str]]:
    """Bytes that each live stacked tensor has, over those of the ranks' data."""
    rows = []
    for name in COLLECTIVES:
        out = our_collective(name, MIB, ranks)()
        data = out.numel() * out.element_size()
        rows.append([f"{name} result", f"{ranks}", f"{out.untyped_storage().nbytes() / data:.3f}x"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=["step", "small", "large", "many", "memory"])
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wanted = options.only
    rows: list[list[str]] = []
    if wanted in (None, "step"):
        rows += steps(options.ranks or (8, 64, 256, 1024), options.rounds)
    if wanted in (None, "small"):
        rows += collectives(options.ranks or (64, 256), KIB, 10, options.rounds)
    if wanted in (None, "large"):
        rows += collectives(options.ranks or (8, 64), MIB, 1, min(options.rounds, 3))
    if rows:
        show(["", "ranks", "fcoll ms", "LocalTensorMode ms", "ratio", "bar"], rows)
    if wanted in (None, "memory"):
        show(["", "ranks", "bytes held / data"], live_bytes())
    if wanted in (None, "many"):
        show(["", "ranks", "process time", "memory"], many())


def show(head: list[str], rows: list[list[str]]) -> None:
    print("\n".join(table([head, *rows], "<" + ">" * (len(head) - 1))))


if __name__ == "__main__":
    main()
