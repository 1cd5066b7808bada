"""Hangs and mismatches made on purpose: torchfrtrace reads every dump, and `fcoll why` names the
rank, the call and the line."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.flight_recorder import fr_trace

import fcoll
from fcoll.errors import FcollError

HERE = Path(__file__)
ENV = {"FCOLL_NATIVE": "1"}


class Case:
    """A program, and what is found: {rank: (its call, the text that its line ends with)}."""

    def __init__(self, run: Callable, n: int, circle: bool, **found: Any) -> None:
        self.run, self.n, self.circle, self.found = run, n, circle, found


CASES: dict[str, Case] = {}
AWAY = ("is in no collective", "B")  # in elsewhere()


def case(n: int = 2, circle: bool = False, **found: Any) -> Callable[[Callable], Callable]:
    """``r0=("all_reduce", "A")``: rank 0 is in an all_reduce, at the line with ``# A``."""

    def add(run: Callable) -> Callable:
        CASES[run.__name__] = Case(run, n, circle, **found)
        return run

    return add


TIMEOUT = timedelta(seconds=1.5)


def join() -> None:
    dist.init_process_group("fcoll", timeout=TIMEOUT)
    # so that no group is made while another rank's timeout runs
    dist.barrier()


def elsewhere() -> None:
    """Until the other ranks' timeouts are over, and this rank was asked for its records."""
    asked = threading.Event()
    from fcoll.transport import dumps

    write = dumps._written
    dumps._written = lambda reason: (write(reason), asked.set())  # type: ignore[func-returns-value]
    assert asked.wait(20)  # B


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (4,), dtype=dtype)


# -- calls that differ ---


@case(r0=("all_reduce", "A"), r1=("broadcast", "B"))
def other_collective(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(x())  # A
    else:
        dist.broadcast(x(), 0)  # B


@case(r0=("all_reduce(float32 [4]", "A"), r1=("all_reduce(float32 [5]", "A"))
def other_size(rank: int) -> None:
    dist.all_reduce(x(4 + rank))  # A


@case(r0=("all_reduce(float32", "A"), r1=("all_reduce(float64", "A"))
def other_dtype(rank: int) -> None:
    dist.all_reduce(x(dtype=torch.float64 if rank else torch.float32))  # A


@case(r0=("max", "A"), r1=("sum", "B"))
def other_reduce_op(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(x(), dist.ReduceOp.MAX)  # A
    else:
        dist.all_reduce(x())  # B


@case(r0=("root 0", "A"), r1=("root 1", "A"))
def other_root(rank: int) -> None:
    dist.broadcast(x(), rank)  # A


@case(r0=("all_gather", "A"), r1=("reduce_scatter", "B"))
def gathered_and_scattered(rank: int) -> None:
    whole, part = x(8), x(4)
    if rank == 0:
        dist.all_gather_single(whole, part)  # A
    else:
        dist.reduce_scatter_single(part, whole)  # B


@case(r0=("all_reduce", "A"), r1=("barrier", "B"))
def barrier_too_early(rank: int) -> None:
    for step in range(3):
        if rank == 1 and step == 2:
            dist.barrier()  # B
        dist.all_reduce(x())  # A


@case(r0=("all_reduce(float32 [4]", "A"), r1=("all_reduce(float32 [6]", "B"))
def async_calls_in_another_order(rank: int) -> None:
    calls = [
        lambda: dist.all_reduce(x(4), async_op=True),  # A
        lambda: dist.all_reduce(x(6), async_op=True),  # B
    ]
    for work in [call() for call in (reversed(calls) if rank else calls)]:
        work.wait()


@case(n=4, r0=("all_reduce", "A"), r2=("all_to_all", "B"))
def one_of_four_differs(rank: int) -> None:
    if rank == 2:
        dist.all_to_all_single(x(4), x(4))  # B
    else:
        dist.all_reduce(x(4))  # A


@case(
    r0=("all_gather_into_tensor(float32 [4]", "A"),
    r1=("all_gather_into_tensor(float32 [2, 2]", "A"),
)
def own_ops_with_other_shapes(rank: int) -> None:
    y = x(4) if rank == 0 else x(2, 2)
    fcoll.all_gather_into_tensor(y, None)  # A


@case(r0=("all_reduce", "A"), r1=("reduce_scatter_tensor", "B"))
def own_ops_that_differ(rank: int) -> None:
    if rank == 0:
        y = fcoll.all_reduce(x(), "sum", None)  # A
    else:
        y = fcoll.reduce_scatter_tensor(x(), "sum", None)  # B
    fcoll.wait_tensor(y)


# -- ranks that do not come ---


@case(r0=("all_reduce", "A"), r1=AWAY)
def skipped(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(x())  # A
    else:
        elsewhere()


@case(r0=("barrier", "A"), r1=AWAY)
def sleeps_before_a_barrier(rank: int) -> None:
    dist.all_reduce(x())
    if rank == 1:
        elsewhere()
    dist.barrier()  # A


@case(r0=("all_reduce", "A"), r1=AWAY)
def waits_for_an_async_call(rank: int) -> None:
    if rank == 0:
        work = dist.all_reduce(x(), async_op=True)  # A
        work.wait()
    else:
        elsewhere()


@case(r0=("all_reduce", "A"), r1=AWAY)
def waits_for_a_large_async_call(rank: int) -> None:
    """Its rest is made by the group's thread, which has no line of the program."""
    if rank == 0:
        work = dist.all_reduce(x(700_000), async_op=True)  # A
        work.wait()
    else:
        elsewhere()


@case(r0=("all_reduce", "A"), r1=AWAY)
def own_op_waits(rank: int) -> None:
    fcoll.barrier(None)
    if rank == 0:
        y = fcoll.all_reduce(x(), "sum", None)  # A
        fcoll.wait_tensor(y)
    else:
        elsewhere()


@case(r0=("all_reduce", "A"), r1=AWAY)
def one_step_less(rank: int) -> None:
    for _ in range(3 - rank):
        dist.all_reduce(x())  # A
    if rank == 1:
        elsewhere()


@case(n=4, r0=("all_reduce", "A"), r3=AWAY)
def one_of_four_is_late(rank: int) -> None:
    if rank == 3:
        elsewhere()
    dist.all_reduce(x())  # A


@case(r0=("all_reduce", "A"), r1=("broadcast", "B"), circle=True)
def two_groups_in_another_order(rank: int) -> None:
    first, second = dist.new_group(timeout=TIMEOUT), dist.new_group(timeout=TIMEOUT)
    if rank == 0:
        dist.all_reduce(x(), group=first)  # A
        dist.broadcast(x(), 0, group=second)
    else:
        dist.broadcast(x(), 0, group=second)  # B
        dist.all_reduce(x(), group=first)


@case(n=4, r0=("all_reduce", "A"), r1=AWAY)
def a_group_of_two_of_four(rank: int) -> None:
    halves = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in ([0, 1], [2, 3])]
    mine = halves[rank // 2]
    if rank == 1:
        elsewhere()
    if rank == 0:
        dist.all_reduce(x(), group=mine)  # A
    elif rank > 1:
        dist.all_reduce(x(), group=mine)
        elsewhere()


@case(
    r0=("waits for rank 1 in all_reduce", "A"),
    r1=("waits to receive float32 [3] from rank 0, message 1 on", "C"),
    circle=True,
)
def a_message_instead(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(x())  # A
    else:
        dist.recv(x(3), 0)  # C


@case(
    r0=("waits for rank 1 in all_reduce", "A"),
    r1=("waits to receive float32 [5] from rank 0, message 3 on", "C"),
    circle=True,
)
def a_batch_of_messages_instead(rank: int) -> None:
    """The ranks send to one another once; then one waits for a second message."""
    peer = 1 - rank
    y = x(5)
    ops = [dist.P2POp(dist.isend, x(5), peer), dist.P2POp(dist.irecv, y, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert y.tolist() == [1] * 5
    if rank == 0:
        dist.irecv(x(2), peer)  # nobody waits for it
        dist.all_reduce(x())  # A
    else:
        work = dist.irecv(y, peer)  # C
        work.wait()


@case(r0=("reduce", "A"), r1=AWAY)
def handed_to_gloo(rank: int) -> None:
    """Shared memory does not reduce float8; the call is announced there."""
    y = x(4).to(torch.float8_e4m3fn)
    if rank == 0:
        dist.reduce(y, 0)  # A
    else:
        elsewhere()


# -- the test ---


def program(rank: int, name: str, env: dict[str, str]) -> None:
    os.environ.update(env)  # here: a nursery forks no ranks whose environment differs in these
    join()
    CASES[name].run(rank)


def marked(run: Callable, mark: str) -> str:
    """The line of a program that ends with "# A", as file:line."""
    lines, first = inspect.getsourcelines(run)
    (found,) = [i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {mark}")]
    return f"{HERE.name}:{first + found}"


def torchfrtrace(folder: Path) -> list[Any]:
    """The collectives that torch's reader finds; it raises for what it cannot read."""
    out = folder.with_suffix(".db")
    try:
        fr_trace.main([str(folder), "-o", str(out)])
    finally:
        gc.enable()  # it switches that off
    return pickle.loads(out.read_bytes())[1].collectives


def dumped(tmp_path: Path, name: str, n: int, **env: str) -> Any:
    env = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_", **env}
    made = launch(program, n, name, env, init=False, env=ENV, timeout=60)
    for _ in range(4):  # a rank may abort while it ends, before its records are written
        if -signal.SIGABRT not in made.exitcodes:
            break
        for file in tmp_path.iterdir():
            file.unlink()
        made = launch(program, n, name, env, init=False, env=ENV, timeout=60)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"rank_{r}" for r in range(n)], (
        made.stderr
    )
    return made


@pytest.mark.parametrize("name", CASES)
def test_why_names_rank_call_and_line(name, tmp_path, compiled):
    case = CASES[name]
    made = dumped(tmp_path, name, case.n)
    assert any(isinstance(error, FcollError) for error in made.errors), made.stderr
    found = fcoll.why(tmp_path)
    text = str(found)
    assert not found.ok
    for who, (call, mark) in case.found.items():
        rank, run = int(who[1:]), elsewhere if (call, mark) == AWAY else case.run
        line = marked(run, mark)
        said = [t for t in text.splitlines() if re.search(rf"ranks? [\d, ]*\b{rank}\b", t)]
        assert any(call in t and line in t for t in said), text
    assert torchfrtrace(tmp_path)
    assert bool(found.circle) == case.circle, text


# -- with the program ---


def build(mesh):
    def step(x: torch.Tensor) -> torch.Tensor:
        y = fcoll.wait_tensor(fcoll.all_reduce(x, "sum", mesh["dp"]))
        if stops():
            elsewhere()
        return fcoll.wait_tensor(fcoll.all_gather_into_tensor(y, mesh["dp"]))  # A

    return step, (torch.ones(4),)


def stops() -> bool:
    """In the second step of rank 1; a trace is of another one."""
    seen.append(None)
    return len(seen) == 2 and RUNNING.is_set() and dist.get_rank() == 1


seen: list[None] = []
RUNNING = threading.Event()


def a_step_that_stops(rank: int, env: dict[str, str]) -> None:
    os.environ.update(env)
    join()
    RUNNING.set()
    step, args = build(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    for _ in range(3):
        step(*args)


def test_the_programs_call_is_the_expected_one(tmp_path, compiled):
    env = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}
    launch(a_step_that_stops, 2, env, init=False, env=ENV, timeout=60)
    found = fcoll.why(tmp_path, build, {"dp": 2})
    (line,) = {call.source for _, call in found.expected}
    assert [(rank, call.op) for rank, call in found.expected] == [
        (0, "all_gather_into_tensor"),
        (1, "all_gather_into_tensor"),
    ]
    assert line.endswith(marked(build, "A"))
