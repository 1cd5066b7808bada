"""Collectives between the processes of one host: fcoll, gloo, OpenMPI and MPICH.

All take turns in one run, pinned to the same cores; who has no turn sleeps. Before and after each
turn the cores' round trip is measured: "near" below 200 ns, "far" above, and turns are compared
with turns of the same kind only. Times are of one call on rank 0, issue to result.

    fcoll C++     a loop in C++, as the MPI peers are measured
    fcoll Python  fcoll.all_reduce(x) and the wait, from Python
    bound         one sync of the ranks, and two copies of the bytes by each within its own memory
    torch         torch's functional collectives on gloo, issue and wait, from Python
    gloo          torch.distributed in place, from Python
    OpenMPI       if mpirun and mpicc are installed (openmpi-bin, libopenmpi-dev)
    MPICH         if the Python package mpich is installed

python benchmarks/collectives.py [--ranks 2] [--kinds all_reduce,...] [--sizes 64,1024,...]
                                 [--turns 6] [--plot figure.png] [--without MPICH]

MPICH spins: with more ranks than cores a call takes it 8 ms, and a run without it a tenth the time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from multiprocessing import Pipe, get_context
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import fcoll
from fcoll import symm_mem

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = (64, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 64 << 20)
NEAR_NS = 200
HERE = Path(__file__).parent


def rounds_for(nbytes: int) -> int:
    return 400 if nbytes <= 64 << 10 else 60 if nbytes <= 4 << 20 else 6


# -- the ranks of fcoll and torch ---


def calls(kind: str, nbytes: int) -> dict:
    """What each Python peer calls for one collective."""
    x, world = torch.ones(nbytes // 4), dist.group.WORLD
    n = dist.get_world_size()
    whole, part = torch.empty(n * x.numel()), torch.empty(x.numel() // n)
    ours = {
        "all_reduce": lambda: fcoll.all_reduce(x, "sum", world),
        "all_gather": lambda: fcoll.all_gather_into_tensor(x, world),
        "reduce_scatter": lambda: fcoll.reduce_scatter_tensor(x, "sum", world),
        "all_to_all": lambda: fcoll.all_to_all_single(x, world),
    }[kind]
    torchs = {
        "all_reduce": lambda: funcol.all_reduce(x, "sum", world),
        "all_gather": lambda: funcol.all_gather_single(x, 0, world),
        "reduce_scatter": lambda: funcol.reduce_scatter_single(x, "sum", 0, world),
        "all_to_all": lambda: funcol.all_to_all_single(x, None, None, world),
    }[kind]
    in_place = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_single(whole, x),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, x),
        "all_to_all": lambda: dist.all_to_all_single(whole[: x.numel()], x),
    }[kind]
    return {
        "fcoll Python": lambda: fcoll.wait_tensor(ours()),
        "torch": lambda: torchs().wait(),
        "gloo": in_place,
    }


def timed(peer: str, kind: str, nbytes: int, rounds: int) -> list[float]:
    if peer in ("fcoll C++", "bound"):
        handle = symm_mem.status().handle
        x, out = torch.ones(nbytes // 4), torch.zeros(dist.get_world_size() * (nbytes // 4))
        if kind in ("all_reduce", "reduce_scatter", "all_to_all"):
            share = dist.get_world_size() if kind == "reduce_scatter" else 1
            out = out[: x.numel() // share]
        kind = kind if peer == "fcoll C++" else peer
        return torch.ops.fcoll_native.loop(kind, x, out, rounds, handle)
    call, us = calls(kind, nbytes)[peer], []
    rounds = rounds if "fcoll" in peer else max(3, rounds // 4)
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        us.append((time.perf_counter() - start) * 1e6)
    return us


def rank_process(rank: int, n: int, store: str, cores: int, pipe) -> None:  # type: ignore
    warnings.simplefilter("ignore")
    os.sched_setaffinity(0, {rank % cores})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
    print(symm_mem.status()) if rank == 0 else symm_mem.status()
    while (command := pipe.recv()) is not None:
        if command[0] == "probe":
            handle = symm_mem.status().handle
            pipe.send(torch.ops.fcoll_native.round_trip_ns(1 - rank, handle) if rank < 2 else 0.0)
        else:
            pipe.send(timed(*command))
    dist.destroy_process_group()


class Ranks:
    """The processes of fcoll and torch, which do what they are told and sleep in between."""

    def __init__(self, n: int, cores: int, folder: str) -> None:
        context = get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(n):
            ours, theirs = Pipe()
            args = (rank, n, f"{folder}/store", cores, theirs)
            process = context.Process(target=rank_process, args=args)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, *command) -> list:  # type: ignore[no-untyped-def]
        for pipe in self.pipes:
            pipe.send(command)
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)


# -- the ranks of MPI ---


class Mpi:
    """The processes of one MPI, told what to do through FIFOs, on which they sleep."""

    def __init__(self, mpicc: str, mpirun: list[str], n: int, cores: int, folder: str) -> None:
        os.makedirs(folder)
        driver = f"{folder}/driver"
        subprocess.run([mpicc, "-O3", str(HERE / "mpi_driver.c"), "-o", driver], check=True)
        for rank in range(n):
            os.mkfifo(f"{folder}/in.{rank}")
            os.mkfifo(f"{folder}/out.{rank}")
        command = [*mpirun, "-n", str(n), driver, folder, str(cores)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.ins = [open(f"{folder}/in.{r}", "w") for r in range(n)]  # noqa: SIM115
        self.outs = [open(f"{folder}/out.{r}") for r in range(n)]  # noqa: SIM115

    def ask(self, kind: str, nbytes: int, rounds: int) -> list[float]:
        for pipe in self.ins:
            pipe.write(f"{kind} {nbytes} {rounds}\n")
            pipe.flush()
        lines = [pipe.readline() for pipe in self.outs]
        return [float(us) for us in lines[0].split()]

    def close(self) -> None:
        for pipe in self.ins:
            pipe.close()
        self.process.wait(20)


def mpis(n: int, cores: int, folder: str, without: str = "") -> dict[str, Mpi]:
    found = {}
    system = {"mpicc": "/usr/bin/mpicc", "mpirun": "/usr/bin/mpirun"}
    openmpi = Path(system["mpicc"]).exists() and "Open MPI" in (
        subprocess.run([system["mpirun"], "--version"], capture_output=True, text=True).stdout
    )
    if openmpi and without != "OpenMPI":
        flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        found["OpenMPI"] = Mpi(system["mpicc"], [system["mpirun"], *flags], n, cores, f"{folder}/o")
    bin_dir = Path(sys.executable).parent
    mpich = (bin_dir / "mpichversion").exists() and shutil.which("gcc")
    if mpich and without != "MPICH":
        mpicc, mpirun = str(bin_dir / "mpicc"), [str(bin_dir / "mpirun")]
        found["MPICH"] = Mpi(mpicc, mpirun, n, cores, f"{folder}/m")
    return found


# -- the run ---


def run(
    n: int, kinds: list[str], sizes: list[int], turns: int, torch_too: bool, without: str = ""
) -> dict:
    """{(kind, bytes): {(peer, placement): [us, ...]}}"""
    cores = os.cpu_count() or 1
    peers = ["fcoll C++", "fcoll Python", "bound"] + (["torch", "gloo"] if torch_too else [])
    table: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(n, cores, folder)
        others = mpis(n, cores, folder, without)
        for kind in kinds:
            for nbytes in sizes:
                cell: dict = defaultdict(list)
                for turn in range(turns + 1):
                    for peer in [*peers, *others]:
                        before = ranks.ask("probe")[0]
                        if peer in others:
                            us = others[peer].ask(kind, nbytes, rounds_for(nbytes))
                        else:
                            us = ranks.ask(peer, kind, nbytes, rounds_for(nbytes))[0]
                        after = ranks.ask("probe")[0]
                        where = {x < NEAR_NS for x in (before, after)}
                        label = "moved" if len(where) > 1 else "near" if where.pop() else "far"
                        if turn:  # the first one warms up
                            cell[peer, label] += us[len(us) // 10 :]
                table[kind, nbytes] = dict(cell)
                show(kind, nbytes, cell, [*peers, *others])
        ranks.close()
        for other in others.values():
            other.close()
    return table


def show(kind: str, nbytes: int, cell: dict, peers: list[str]) -> None:
    for label in ("near", "far", "moved"):
        rows = {p: cell[p, label] for p in peers if cell.get((p, label))}
        if "fcoll C++" not in rows or (label == "moved" and len(rows) < len(peers)):
            continue
        line = f"{kind:<15}{nbytes:>9} B {label:<6}"
        for peer, us in rows.items():
            p99 = sorted(us)[len(us) * 99 // 100]
            line += f"  {peer} {statistics.median(us):.2f} ({p99:.1f})"
        best = min(
            (statistics.median(rows[p]) for p in ("OpenMPI", "MPICH") if p in rows), default=0
        )
        ours = statistics.median(rows["fcoll C++"])
        if best:
            line += f"  | C++/best MPI {ours / best:.2f}"
        if "bound" in rows:
            line += f"  | C++/bound {ours / statistics.median(rows['bound']):.2f}"
        print(line, flush=True)


def plot(table: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(kind for kind, _ in table))
    figure, axes = plt.subplots(1, len(kinds), figsize=(5 * len(kinds), 4), squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        lines: dict = defaultdict(list)
        for (k, nbytes), cell in table.items():
            if k == kind:
                for peer in dict.fromkeys(p for p, _ in cell):
                    us = [t for (p, _), ts in cell.items() if p == peer for t in ts]
                    lines[peer].append((nbytes, statistics.median(us)))
        for peer, points in lines.items():
            axis.loglog(*zip(*points, strict=True), marker="o", label=peer)
        axis.set(title=kind, xlabel="bytes", ylabel="median us")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--no-torch", action="store_true", help="leave out torch and gloo")
    parser.add_argument("--without", default="", help="an MPI to leave out")
    parser.add_argument("--plot")
    args = parser.parse_args()
    print(f"{args.ranks} ranks, f32; median us of a call (p99); {args.turns} turns")
    sizes = [int(s) for s in args.sizes.split(",")]
    kinds = args.kinds.split(",")
    result = run(args.ranks, kinds, sizes, args.turns, not args.no_torch, args.without)
    if args.plot:
        plot(result, args.plot)
