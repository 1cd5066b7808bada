"""How good are the plans? Ours against torch's FX scheduler and Inductor's classic rules.

    python benchmarks/schedules/suite.py                    # 8 layers, a few minutes
    python benchmarks/schedules/suite.py --layers 8,32,80   # torch's scheduler takes long

Every family is planned for collectives that take 0.3, 1 and 3 times as long as compute. Each
competitor's order is timed by the same rules as ours. ``x best`` compares with the fastest of them
and ``x torch`` with torch's, each at no more peak memory than that competitor holds. ``x noise`` is
the first with all times off by up to 30 %: orders are made with the model's prices and run with
others, the median of 9 seeds.

Ours may change the graph: ``--fixed`` forbids it. Chunks and buckets have prices that follow from
the given ones: a chunk takes its share plus a launch or a latency, a bucket saves latencies, copies
cost their bytes. What is gathered twice may be kept instead. The rivals' orders are of the graph as
it is.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from schedules.llama import Program, Shape, program

import fcoll
from fcoll.errors import BadPlan
from fcoll.scheduling.bounds import times
from fcoll.scheduling.problem import problem_of
from fcoll.scheduling.verified_plan import Plan
from fcoll.units import table

RULES = ("sink_waits", "raise_comms", "reorder_compute")
FAMILIES: dict[str, dict] = {
    "ddp": dict(data="ddp"),
    "fsdp": dict(data="fsdp"),
    "fsdp flat": dict(data="fsdp", flat=True),
    "hsdp": dict(data="hsdp"),
    "tp": dict(tp=8),
    "tp+sp": dict(tp=8, sequence=True),
    "fsdp x tp": dict(data="fsdp", tp=8, sequence=True),
    "fsdp x tp x cp": dict(data="fsdp", tp=8, sequence=True, cp=2),
    "moe": dict(data="fsdp", experts=True),
    "checkpoint": dict(data="fsdp", checkpoint=True),
    "uneven": dict(data="fsdp", uneven=True, seed=3),
    "tp forward": dict(tp=8, train=False),
}


@dataclass
class Row:
    """One graph's figures."""

    family: str
    layers: int
    ratio: float
    nodes: int
    bound: float  # our makespan / the lower bound, both of the graph as it is
    at_bound: float  # the lower bound of the graph that was planned / the fastest competitor's
    best: float  # ours / the fastest competitor's
    best_name: str
    torch: float  # ours / torch's; nan where torch's scheduler fails
    noise: float
    changed: str  # collectives in chunks / in buckets / left out
    plan_s: float  # with the graph as it is
    change_s: float  # with what comes of changing it
    torch_s: float

    def cells(self) -> tuple[str, ...]:
        name = f"{self.family}, {self.layers}"
        numbers = (self.bound, self.best, self.torch, self.noise)
        times_s = (f"{s:.2f}" for s in (self.plan_s, self.change_s, self.torch_s))
        shown = ("-" if math.isnan(x) else f"{x:.3f}" for x in numbers)
        known = (name, f"{self.ratio:g}", str(self.nodes), *shown)
        return (*known, self.best_name, self.changed, *times_s)


HEAD = (
    *("graph, layers", "ratio", "nodes", "x bound", "x best", "x torch", "x noise"),
    *("best rival", "chunks/buckets/left out", "plan s", "changed s", "torch s"),
)


def planned(
    made: Program, scheduler: str, cap: int | None = None, change: bool | str = False
) -> tuple[Plan | None, float]:
    """A plan, and the CPU seconds that it took; None where the scheduler fails."""
    begin = time.process_time()
    options = {"costs": made.costs, "scheduler": scheduler, "memory_cap": cap}
    may = {"splits": change, "buckets": bool(change), "reuse": bool(change)}
    try:
        plan = fcoll.schedule(made.graph_module, made.machine, **options, **may)
    except BadPlan:  # torch's, on some graphs of two groups
        plan = None
    return plan, time.process_time() - begin


def measure(
    family: str, layers: int, ratio: float, groups: dict[str, str], change: bool | str = True
) -> Row:
    made = program(Shape(family, layers, ratio=ratio, **FAMILIES[family]), groups)
    theirs, torch_s = planned(made, "torch")
    rivals = [theirs, *(planned(made, rule)[0] for rule in RULES)]
    best = min((p for p in rivals if p is not None), key=lambda p: p.makespan_us)
    fixed, plan_s = planned(made, "overlap", best.peak_bytes)
    ours, change_s = planned(made, "overlap", best.peak_bytes, change)
    assert fixed is not None and ours is not None and ours.peak_bytes <= best.peak_bytes
    beside_torch = math.nan
    if theirs is not None:
        beside = ours if theirs is best else planned(made, "overlap", theirs.peak_bytes, change)[0]
        assert beside is not None and beside.peak_bytes <= theirs.peak_bytes
        beside_torch = beside.makespan_us / theirs.makespan_us
    return Row(
        family=family,
        layers=layers,
        ratio=ratio,
        nodes=len(made.graph_module.graph.nodes),
        bound=fixed.over_bound,
        at_bound=ours.lower_bound_us / best.makespan_us,
        best=ours.makespan_us / best.makespan_us,
        best_name=best.scheduler,
        torch=beside_torch,
        noise=with_noise(ours, best),
        changed=changes(ours),
        plan_s=plan_s,
        change_s=change_s,
        torch_s=torch_s,
    )


def changes(plan: Plan) -> str:
    """How many collectives are in chunks, in buckets, and left out."""
    split = sum(len(s.collectives) for s in plan.splits)
    merged = sum(len(b.members) for b in plan.buckets)
    found = (split, merged, len(plan.reuses))
    return "/".join(map(str, found)) if any(found) else "-"


def with_noise(ours: Plan, other: Plan) -> float:
    """ours / other's where each node takes 0.7 to 1.3 times its price: the median of 9 seeds."""
    return statistics.median(noisy_us(ours, seed) / noisy_us(other, seed) for seed in range(9))


def noisy_us(plan: Plan, seed: int) -> float:
    """Nodes of one name are off by the same in all plans."""
    true = {
        name: us * random.Random(f"{seed} {name}").uniform(0.7, 1.3) for name, us in plan.us.items()
    }
    problem = problem_of(plan.steps, lambda step: true.get(step.name, 0.0))
    return times(problem, range(problem.n))[0]


def geomean(values: list[float]) -> float:
    known = [math.log(x) for x in values if not math.isnan(x)]
    return math.exp(sum(known) / len(known)) if known else math.nan


def summary(rows: list[Row]) -> list[str]:
    """Each bar, and what was found."""

    def of(*families: str, layers: int = 0) -> list[Row]:
        return [r for r in rows if r.family in families and r.layers >= layers]

    multi = of("fsdp x tp", "fsdp x tp x cp", "hsdp", "moe")
    bars = [
        ("x best, geometric mean", 0.93, geomean([r.best for r in rows])),
        ("the same for plans at their bounds", 0.93, geomean([r.at_bound for r in rows])),
        ("x best, worst", 1.00, max(r.best for r in rows)),
        ("fsdp x tp, x torch, mean", 0.87, geomean([r.torch for r in of("fsdp x tp")])),
        ("tp+sp, x torch, mean", 0.90, geomean([r.torch for r in of("tp+sp")])),
        ("fsdp, >= 32 layers, x bound", 1.02, worst(of("fsdp", layers=32))),
        ("multi-group, x bound", 1.08, worst(multi)),
        ("tp+sp, x bound", 1.08, worst(of("tp+sp"))),
        ("x noise, geometric mean", 0.96, geomean([r.noise for r in rows])),
    ]
    found = [(n, f"{bar:.2f}", "-" if math.isnan(x) else f"{x:.3f}") for n, bar, x in bars]
    return table([("bar", "at most", "found"), *found], "<>>")


def by_family(rows: list[Row]) -> list[str]:
    """Geometric means, and the worst."""
    found = [("family", "x best", "worst", "x torch", "x noise", "x bound")]
    for family in dict.fromkeys(r.family for r in rows):
        mine = [r for r in rows if r.family == family]
        means = [geomean([getattr(r, name) for r in mine]) for name in ("best", "torch", "noise")]
        cells = [means[0], max(r.best for r in mine), *means[1:], worst(mine)]
        found.append((family, *("-" if math.isnan(x) else f"{x:.3f}" for x in cells)))
    return table(found, "<>>>>>")


def worst(rows: list[Row]) -> float:
    return max((r.bound for r in rows), default=math.nan)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default="8", help="8,32,80")
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--ratios", default="0.3,1,3", help="collectives : compute")
    parser.add_argument("--fixed", action="store_true", help="plan the graph as it is")
    parser.add_argument("--sums", action="store_true", help='splits="sums" instead of True')
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # torch says that there is no GPU
    only = [name for name in args.only.split(",") if name] or list(FAMILIES)
    rows = []
    change = False if args.fixed else "sums" if args.sums else True
    axes = ("dp", "shard", "tp", "cp", "ep")
    with fcoll.fake_world(dp=2, shard=8, tp=8, cp=2, ep=8) as mesh:
        groups = {axis: mesh.get_group(axis).group_name for axis in axes}
        for layers in map(int, args.layers.split(",")):
            for family in only:
                for ratio in map(float, args.ratios.split(",")):
                    rows.append(measure(family, layers, ratio, groups, change))
                    print(*rows[-1].cells(), sep="  ", file=sys.stderr, flush=True)
    print("\n".join(table([HEAD, *(row.cells() for row in rows)], "<>>>>>><>>>>")))
    print()
    print("\n".join(by_family(rows)))
    print()
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
