"""fcoll.prove: what a proof costs, against the float simulation of the same program.

Each program is built and stepped once on simulated ranks in floats, and proved. Times are of the
process (the CPU's, so that other programs disturb little) but for "wall", the medians of runs that
take turns. One more trial is a run of the parallel program and of one device's in the ring.

    python benchmarks/prove.py                        # the small ones and the 4 layers
    python benchmarks/prove.py --only 405b            # 126 layers on 64 ranks: minutes
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import fcoll
from fcoll.units import table

DIM, HIDDEN, HEADS, VOCABULARY = 16, 32, 4, 24
ROWS, SEQUENCE, MICROBATCHES = 4, 4, 2


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[Any], Any]
    mesh: dict[str, int]
    trials: int = 3


def cut(x: Tensor, mesh: Any, dim: int = 0) -> Tensor:
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()


# -- a Llama, its layers cut over tp and its stages over pp ---


class Layer(nn.Module):
    """Attention and an MLP: column and row parallel, with a norm before each."""

    def __init__(self, number: int, tp: Any) -> None:
        super().__init__()
        torch.manual_seed(number)  # the same on every mesh
        self.tp = tp
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        whole = {"q": (DIM, DIM), "k": (DIM, DIM), "v": (DIM, DIM), "o": (DIM, DIM)}
        whole |= {"gate": (HIDDEN, DIM), "up": (HIDDEN, DIM), "down": (DIM, HIDDEN)}
        for name, shape in whole.items():
            dim = 1 if name in ("o", "down") else 0
            weight = cut(torch.randn(shape) / math.sqrt(shape[1]), tp, dim)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        y = self._copied(self.attention_norm(x))
        heads = [
            (y @ w.t()).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self._summed(y.transpose(1, 2).flatten(2) @ self.o.t())
        y = self._copied(self.mlp_norm(x))
        return x + self._summed((F.silu(y @ self.gate.t()) * (y @ self.up.t())) @ self.down.t())

    def _copied(self, x: Tensor) -> Tensor:
        return _Copy.apply(x, self.tp)

    def _summed(self, x: Tensor) -> Tensor:
        return fcoll.all_reduce(x, "sum", self.tp, grad="identity")


class _Copy(torch.autograd.Function):
    """The identity, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return fcoll.all_reduce(grad, "sum", ctx.group), None


class Stage(nn.Module):
    """This rank's layers; the first stage embeds tokens, the last one has the head."""

    def __init__(self, layers: int, pp: Any, tp: Any) -> None:
        super().__init__()
        stage, n = pp.get_local_rank(), pp.size()
        bounds = [round(layers * k / n) for k in range(n + 1)]
        mine = range(bounds[stage], bounds[stage + 1])
        torch.manual_seed(1000)
        self.embed = nn.Embedding(VOCABULARY, DIM) if stage == 0 else None
        self.layers = nn.ModuleDict({str(i): Layer(i, tp) for i in mine})
        self.norm = nn.RMSNorm(DIM) if stage == n - 1 else None
        self.head = nn.Linear(DIM, VOCABULARY, bias=False) if stage == n - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def llama(layers: int) -> Callable[[Any], Any]:
    """dp x pp x tp: GPipe, gradients averaged over dp, AdamW."""

    def build(mesh: Any) -> Any:
        dp, pp, tp = (mesh[axis] for axis in ("dp", "pp", "tp"))
        model = Stage(layers, pp, tp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        place, n = pp.get_local_rank(), pp.size()
        stage = PipelineStage(model, place, n, torch.device("cpu"), group=pp.get_group())
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=cross_entropy)
        g = torch.Generator().manual_seed(1)
        tokens = cut(torch.randint(VOCABULARY, (ROWS, SEQUENCE + 1), generator=g), dp)

        def step(x: Tensor, wanted: Tensor) -> Any:
            losses: list[Tensor] = []
            is_last = place == n - 1
            args = (x,) if place == 0 else ()
            how = {"target": wanted, "losses": losses} if is_last else {}
            schedule.step(*args, **how)
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=dp.get_group())
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).mean() if is_last else None

        return step, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    return build


# -- the small ones ---


def mlp(mesh: Any) -> Any:
    """torch's DDP and AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = cut(torch.randn(8, DIM, generator=torch.Generator().manual_seed(1)), mesh["dp"])

    def step(x: Tensor) -> Tensor:
        loss = wrapped(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (x,)


GRID = {"dp": 2, "pp": 8, "tp": 4}
CASES = {
    "mlp": Case("MLP, DDP, dp 2", mlp, {"dp": 2}),
    "block": Case("Llama, 1 layer, dp 2 x tp 2", llama(1), {"dp": 2, "pp": 1, "tp": 2}),
    "4": Case("Llama, 4 layers, dp 2 x pp 2 x tp 2", llama(4), {"dp": 2, "pp": 2, "tp": 2}),
    "8x64": Case("Llama, 8 layers, dp 2 x pp 8 x tp 4", llama(8), GRID, 1),
    "405b": Case("Llama, 126 layers, dp 2 x pp 8 x tp 4", llama(126), GRID, 1),
}
DEFAULT = ("mlp", "block", "4")


def simulated(case: Case) -> None:
    """One build and one step in floats."""
    names, shape = tuple(case.mesh), tuple(case.mesh.values())

    def one(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        fn, args = case.build(mesh)
        fn(*args)

    fcoll.simulate_ranks(one, math.prod(shape))


def proved(case: Case, trials: int) -> fcoll.Verdict:
    verdict = fcoll.prove(case.build, case.mesh, trials=trials)
    assert verdict.equal, str(verdict)
    return verdict


def cpu_s(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Of the process, of the clock, and what it gave."""
    wall, cpu = time.perf_counter(), time.process_time()
    done = run()
    return time.process_time() - cpu, time.perf_counter() - wall, done


def measured(case: Case, runs: int) -> list[str]:
    if case.trials > 1:
        proved(case, 1)  # torch's caches
    floats, fewer, alls, walls = [], [], [], []
    for _ in range(runs):
        floats.append(cpu_s(lambda: simulated(case))[0])
        if case.trials > 1:
            fewer.append(cpu_s(lambda: proved(case, case.trials - 1))[0])
        cpu, wall, verdict = cpu_s(lambda: proved(case, case.trials))
        alls.append(cpu)
        walls.append(wall)
    simulation, whole = map(statistics.median, (floats, alls))
    trial = whole - statistics.median(fewer) if fewer else math.nan
    return [
        case.name,
        f"{simulation:.2f}",
        f"{trial:.2f}",
        f"{trial / simulation:.1f}",
        f"{whole:.2f} ({case.trials})",
        f"{whole / simulation:.1f}",
        f"{statistics.median(walls):.1f}",
        f"{verdict.error_bound:.0e}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=CASES, default=DEFAULT)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # torch's own, of pipelines and DDP
    head = ["program", "floats s", "a trial more s", "ratio", "proof s (trials)"]
    rows = [measured(CASES[name], given.runs) for name in given.only]
    lines = [[*head, "ratio", "wall s", "error"], *rows]
    print(*table(lines, "<" + ">" * 7), sep="\n")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
