"""What a collective costs inside a compiled graph: rmsnorm(all_reduce(x @ w) + residual).

Hidden size 4096, 2 ranks, each pinned to a core of its own with 1 thread. Four compiled forms of
the same graph take turns in one run:

    stock   torch's functional collectives on gloo, backend="inductor"
    opaque  backend="fcoll", the sum over the ranks as one extern call
    fused   backend="fcoll", the sum over the ranks in the kernel of what follows
    none    the same graph with no collective, backend="inductor"

x is B x inner and w is inner x 4096. inner is small, so that the matmul takes little of the time
and w leaves room in the caches for Python: with 64, 1 MiB in f32, every form takes 50 us more.

Before and after each turn the cores' round trip is measured: "near" below 200 ns, "far" above;
turns during which it changed are left out, and turns are compared with turns of the same kind only.
Times are of one call: a turn's is the median of its calls on the slower of the two ranks, which is
the one that a tensor-parallel step waits for, with or without a collective in it. "median" is that
of the turns, "best" that of the fastest: what a machine with nothing else to do would show.

Then the time to compile: the first call of stock and of fused, taking turns. "cold" with empty
caches, most of it g++; "warm" with g++'s results kept and Inductor's own work done again.

python benchmarks/compiled_block.py [--turns 30] [--calls 100] [--batches 1,16] [--compiles 4] ...
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor.utils import fresh_cache

import fcoll
import inductor_ext
from fcoll import symm_mem

FORMS = ("stock", "opaque", "fused", "none")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
NEAR_NS = 200


# -- the four forms ---


def norm(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)


def stock(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return norm(funcol.all_reduce(x @ w, "sum", dist.group.WORLD) + residual)


def ours(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return norm(fcoll.all_reduce(x @ w, "sum", dist.group.WORLD) + residual)


def none(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return norm(x @ w + residual)


SOURCES = {"stock": stock, "opaque": ours, "fused": ours, "none": none}


def compiled(form: str) -> Callable:
    """A compiled form with code of its own: what others have compiled costs it no guards. No
    options: dynamic=False alone takes Dynamo 20 us a call."""
    source = SOURCES[form]
    own = types.FunctionType(source.__code__.replace(), source.__globals__, form)
    backend = "fcoll" if source is ours else "inductor"
    return torch.compile(own, backend=backend)


def first_call(form: str, call: Callable, inputs: tuple[Tensor, ...]) -> Tensor:
    with inductor_ext.config.patch(form="opaque" if form == "opaque" else "fused"):
        return call(*inputs)


def inputs_of(batch: int, dtype: torch.dtype, hidden: int, inner: int) -> tuple[Tensor, ...]:
    """x and w of this rank, and the residual, which all ranks have."""
    own = torch.Generator().manual_seed(dist.get_rank())
    same = torch.Generator().manual_seed(100)
    x = torch.randn(batch, inner, generator=own)
    w = torch.randn(inner, hidden, generator=own)
    residual = torch.randn(batch, hidden, generator=same)
    return x.to(dtype), w.to(dtype), residual.to(dtype)


def check(form: str, got: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """A form that is fast and wrong does not count."""
    x, w, residual = (t.double() for t in inputs)
    part = x @ w
    if form != "none":
        dist.all_reduce(part)
    tolerance = 1e-5 if got.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), norm(part + residual), rtol=tolerance, atol=tolerance)


# -- time of a call ---


def placement() -> float:
    """The cores' round trip in ns. Both ranks call it."""
    return torch.ops.fcoll_native.round_trip_ns(1 - dist.get_rank(), symm_mem.status().handle)


def timed(call: Callable, inputs: tuple[Tensor, ...], calls: int) -> float:
    """The median of the calls in us, on the slower rank."""
    fcoll.barrier()
    us = []
    for _ in range(calls):
        start = time.perf_counter()
        call(*inputs)
        us.append((time.perf_counter() - start) * 1e6)
    own = torch.tensor(statistics.median(us[calls // 10 :]), dtype=torch.float64)
    return fcoll.all_reduce(own, "max").item()


def measure(inputs: tuple[Tensor, ...], turns: int, calls: int) -> dict:
    """{(form, placement): [us of a turn, ...]}"""
    forms = {form: compiled(form) for form in FORMS}
    for form, call in forms.items():
        for _ in range(3):
            check(form, first_call(form, call, inputs), inputs)
    cell: dict = defaultdict(list)
    for turn in range(turns + 1):
        for form, call in forms.items():
            before = placement()
            us = timed(call, inputs, calls if form != "stock" else max(10, calls // 5))
            where = {x < NEAR_NS for x in (before, placement())}
            if turn and len(where) == 1:  # the first one warms up
                cell[form, "near" if where.pop() else "far"].append(us)
    return cell


def show(name: str, cell: dict) -> None:
    for label in ("near", "far"):
        turns = {form: cell[form, label] for form in FORMS}
        if not all(turns.values()):
            continue
        for kind, of in (("median", statistics.median), ("best", min)):
            us = {form: of(turns[form]) for form in FORMS}
            print(
                f"{name:<10}{label:<5}{kind:<7}",
                *[f"{us[form]:>8.1f}" for form in FORMS],
                f"{us['stock'] / us['fused']:>12.1f}",
                f"{us['fused'] - us['none']:>11.1f}",
                f"{us['fused'] / us['opaque']:>13.2f}",
                flush=True,
            )


# -- time to compile ---


def compile_s(form: str, inputs: tuple[Tensor, ...]) -> float:
    torch.compiler.reset()
    fcoll.barrier()
    call = compiled(form)
    start = time.perf_counter()
    first_call(form, call, inputs)
    return time.perf_counter() - start


def compile_times(inputs: tuple[Tensor, ...], compiles: int, cold: bool) -> dict[str, float]:
    times: dict[str, list[float]] = {"stock": [], "fused": []}
    for i in range(compiles + 1):
        order = list(times) if i % 2 else list(times)[::-1]
        for form in order:
            if cold:
                with fresh_cache():
                    s = compile_s(form, inputs)
            else:
                with torch._inductor.config.patch(fx_graph_cache=False):
                    s = compile_s(form, inputs)
            if i:  # the first one imports and warms up
                times[form].append(s)
    return {form: statistics.median(s) for form, s in times.items()}


# -- the run ---


def ranks(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    assert symm_mem.status().shared, symm_mem.status()
    if rank == 0:
        print(f"hidden {args.hidden}, inner {args.inner}, {args.turns} turns, us of a call")
        columns = "stock/fused  fused-none  fused/opaque"
        print(f"{'':<22}", *[f"{form:>8}" for form in FORMS], f" {columns}", flush=True)
    for batch in args.batches if args.turns else ():
        for name in args.dtypes:
            inputs = inputs_of(batch, DTYPES[name], args.hidden, args.inner)
            cell = measure(inputs, args.turns, args.calls)
            if rank == 0:
                show(f"B={batch} {name}", cell)
    inputs = inputs_of(1, torch.float32, args.hidden, args.inner)
    for kind in ("cold", "warm") if args.compiles else ():
        s = compile_times(inputs, args.compiles, kind == "cold")
        if rank == 0:
            ratio = s["fused"] / s["stock"]
            print(
                f"compile, {kind}: stock {s['stock']:.2f} s, fused {s['fused']:.2f} s,"
                f" fused/stock {ratio:.2f}",
                flush=True,
            )
    fcoll.barrier()


def names(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=16, help="columns of x, rows of w (16)")
    parser.add_argument("--batches", type=numbers, default=[1, 16])
    parser.add_argument("--dtypes", type=names, default=["f32", "bf16"])
    parser.add_argument("--turns", type=int, default=30, help="of each form; 0 leaves them out")
    parser.add_argument("--calls", type=int, default=100, help="of a form in a turn; stock a fifth")
    parser.add_argument("--compiles", type=int, default=4, help="of each kind; 0 leaves them out")
    fcoll.launch(ranks, parser.parse_args(), world_size=2)
