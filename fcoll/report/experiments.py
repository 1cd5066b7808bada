"""Schedulers side by side: one program, several schedulers, memory caps and machines."""

from __future__ import annotations

import csv
import io
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import Any

from fcoll.costs.machine import Machine
from fcoll.errors import BadPlan, MemoryCapTooSmall
from fcoll.report import notebook
from fcoll.report.lanes import page
from fcoll.report.svg import document
from fcoll.scheduling.bounds import times
from fcoll.scheduling.contention import Contention
from fcoll.scheduling.planner import schedule
from fcoll.scheduling.problem import problem_of
from fcoll.scheduling.scheduler_registry import scheduler_of
from fcoll.scheduling.verified_plan import Plan
from fcoll.units import show_bytes, show_us, table

SEEDS = 9


@dataclass(frozen=True)
class SchedulerResult:
    """What one scheduler makes of the program on one machine under one cap.

    ``noisy_us`` is the median step with all times off by up to the noise: the order is made with
    the machine's prices and runs with others. ``failed`` says why there is no plan.
    """

    machine: str
    scheduler: str
    memory: str
    makespan_us: float = 0.0
    over_bound: float = 0.0
    exposed_us: float = 0.0
    peak_bytes: int = 0
    buckets: int = 0
    noisy_us: float = 0.0
    plan_s: float = 0.0
    failed: str = ""


def compare(
    trace: Any,
    schedulers: Sequence[str],
    memory: Sequence[str] = ("+0%",),
    machines: Sequence[str] = ("h100",),
    noise: float = 0.0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[SchedulerResult]:
    """Plan a trace in every way. The order that came in is always among them, and first; the
    schedulers that heed no cap are asked once.

    ``memory`` are caps as ``fcoll.schedule`` takes them, or "none"; ``noise`` is 0.3 for times that
    are up to 30 % off.
    """
    found = []
    for machine, scheduler, cap in _ways(schedulers, memory, machines):
        progress(f"{scheduler} on {machine}, memory {cap}")
        found.append(_result(trace, machine, scheduler, cap, noise))
    return found


def _ways(
    schedulers: Sequence[str], memory: Sequence[str], machines: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    for machine in machines:
        for scheduler in dict.fromkeys(("original", *schedulers)):
            heeds_cap = scheduler != "original" and scheduler_of(scheduler).keeps_cap
            for cap in memory if heeds_cap else ("none",):
                yield machine, scheduler, cap


def _result(trace: Any, machine: str, scheduler: str, cap: str, noise: float) -> SchedulerResult:
    begin = time.perf_counter()
    memory_cap = None if cap == "none" else int(cap) if cap.isdigit() else cap
    try:
        plan = schedule(trace, Machine.of(machine), memory_cap=memory_cap, scheduler=scheduler)
    except (BadPlan, MemoryCapTooSmall) as error:  # torch's fails on some graphs of two groups
        return SchedulerResult(machine, scheduler, cap, failed=str(error))
    return SchedulerResult(
        machine,
        scheduler,
        cap,
        makespan_us=plan.makespan_us,
        over_bound=plan.over_bound,
        exposed_us=plan.exposed_us,
        peak_bytes=plan.peak_bytes,
        buckets=len(plan.buckets),
        noisy_us=noisy_us(plan, noise) if noise else plan.makespan_us,
        plan_s=time.perf_counter() - begin,
    )


def noisy_us(plan: Plan, noise: float) -> float:
    """The step where each of its parts takes 1 - noise to 1 + noise times its price: the median."""

    def once(seed: int) -> float:
        rng = random.Random(seed)
        true = {
            name: us * rng.uniform(1 - noise, 1 + noise) for name, us in sorted(plan.us.items())
        }
        contention = Contention.of(plan.machine, plan.collectives) if plan.machine else None
        problem = problem_of(plan.steps, lambda step: true[step.name], contention=contention)
        return times(problem, range(problem.n))[0]

    return statistics.median(once(seed) for seed in range(SEEDS))


# -- as a table, a file, a picture ---


def render(results: Sequence[SchedulerResult], noise: float = 0.0) -> str:
    """A table for a terminal."""
    head = _head(noise)
    lines = table([head, *_rows(results, noise)], _align(head))
    return "\n".join([*lines, *(f"{r.scheduler}: {r.failed}" for r in results if r.failed)])


def _head(noise: float) -> tuple[str, ...]:
    return (
        *("machine", "scheduler", "memory", "step", "x bound", "x original"),
        *("exposed", "peak", "buckets", *((f"+-{noise:.0%}",) if noise else ()), "plan"),
    )


def _align(head: Sequence[str]) -> str:
    return "<<>" + ">" * (len(head) - 3)


def _rows(results: Sequence[SchedulerResult], noise: float) -> list[tuple[str, ...]]:
    original = {r.machine: r.makespan_us for r in results if r.scheduler == "original"}
    return [_cells(r, original[r.machine], bool(noise)) for r in results]


def _cells(r: SchedulerResult, original_us: float, noisy: bool) -> tuple[str, ...]:
    if r.failed:
        return (r.machine, r.scheduler, r.memory, "no plan", *[""] * (7 if noisy else 6))
    return (
        *(r.machine, r.scheduler, r.memory, show_us(r.makespan_us), f"{r.over_bound:.3f}"),
        f"{r.makespan_us / original_us:.3f}" if original_us else "1.000",
        *(show_us(r.exposed_us), show_bytes(r.peak_bytes), str(r.buckets)),
        *((show_us(r.noisy_us),) if noisy else ()),
        f"{r.plan_s:.2f} s",
    )


def html(results: Sequence[SchedulerResult], title: str, noise: float = 0.0) -> str:
    """The table and the drawing as a page that needs nothing else."""
    head = _head(noise)
    rows = notebook.table(head, _rows(results, noise), _align(head))
    failed = [f"<p>{escape(r.scheduler)}: {escape(r.failed)}</p>" for r in results if r.failed]
    return page(
        f"Schedules of {title}",
        f"{title} · x bound: 1 is optimal",
        [rows, plot(results, title)],
        "\n".join(failed),
    )


def as_csv(results: Sequence[SchedulerResult]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(SchedulerResult)])
    writer.writeheader()
    writer.writerows(map(asdict, results))
    return out.getvalue()


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 460, 90, 30, 60, 54
COLORS = ("#4a6fa5", "#d9552c", "#3f8f5f", "#7a5ea8", "#b8860b", "#5b5b5b", "#a04060", "#208080")


def plot(results: Sequence[SchedulerResult], title: str) -> str:
    """Step time against peak memory, a line for each scheduler and machine: SVG."""
    shown = [r for r in results if not r.failed]
    across = _axis([r.peak_bytes for r in shown], LEFT, WIDTH - RIGHT)
    up = _axis([r.makespan_us for r in shown], HEIGHT - BOTTOM, TOP)
    lines: dict[str, list[SchedulerResult]] = {}
    for r in shown:
        lines.setdefault(f"{r.scheduler}, {r.machine}", []).append(r)
    parts = [f'<text class="title" x="16" y="24">{escape(title)}</text>']
    for i, (name, line) in enumerate(lines.items()):
        line.sort(key=lambda r: r.peak_bytes)
        points = [(across(r.peak_bytes), up(r.makespan_us), r) for r in line]
        parts += _line(points, name, COLORS[i % len(COLORS)], LEFT + i % 4 * 200, 38 + i // 4 * 16)
    return document([*parts, *_scales(shown)], WIDTH, HEIGHT)


def _axis(values: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    """From a value to its place between the two, from nothing to a little above the largest."""
    most = max(values, default=0.0) * 1.05 or 1.0
    return lambda value: low + value / most * (high - low)


def _line(points: list[Any], name: str, color: str, x: float, y: float) -> list[str]:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in points)
    found = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>']
    for a, b, r in points:
        about = f"{name}: {show_us(r.makespan_us)}, {show_bytes(r.peak_bytes)}"
        dot = f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{color}">'
        found.append(f"{dot}<title>{escape(about)}</title></circle>")
    found.append(f'<rect fill="{color}" x="{x}" y="{y - 9}" width="10" height="10"/>')
    return [*found, f'<text class="soft" x="{x + 15}" y="{y}">{escape(name)}</text>']


def _scales(shown: Sequence[SchedulerResult]) -> list[str]:
    most_us = max((r.makespan_us for r in shown), default=0.0) * 1.05
    most_bytes = max((r.peak_bytes for r in shown), default=0) * 1.05
    base, parts = HEIGHT - BOTTOM, []
    for i in range(5):
        y, x = base - i / 4 * (base - TOP), LEFT + i / 4 * (WIDTH - LEFT - RIGHT)
        us, held = show_us(most_us * i / 4), show_bytes(most_bytes * i / 4)
        parts.append(f'<text class="soft" x="{LEFT - 8}" y="{y:.0f}" text-anchor="end">{us}</text>')
        middle = f'y="{base + 20}" text-anchor="middle"'
        parts.append(f'<text class="soft" x="{x:.0f}" {middle}>{held}</text>')
    where = f'x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle"'
    return [*parts, f'<text class="soft" {where}>step time against peak memory</text>']
