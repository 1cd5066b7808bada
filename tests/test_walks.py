"""How many files one call passes through: all of fcoll and inductor_ext in which any function runs.

Every file counts but `__init__`: words that all share, helpers, caches and tables too. The figures
are what a reader has to open in order to follow one all-reduce; they may go down.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import launch

import fcoll

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(str(ROOT / package) + "/" for package in ("fcoll", "inductor_ext"))


@contextmanager
def files_run() -> Iterator[set[str]]:
    """The files in which a function is called meanwhile, on any thread that starts in it."""
    for package in PACKAGES:
        for path in Path(package).rglob("*.py"):  # so that no import runs meanwhile
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if not name.endswith("__main__"):
                importlib.import_module(name.removesuffix(".__init__"))
    found: set[str] = set()

    def watch(frame: Any, event: str, called: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGES) and not path.endswith("__init__.py"):
            found.add(path.removeprefix(f"{ROOT}/"))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def assert_at_most(limit: int, walks: list[set[str]]) -> None:
    for walk in walks:
        assert walk and len(walk) <= limit, f"{len(walk)} files:\n" + "\n".join(sorted(walk))


def first_and_later(rank: int) -> tuple[set[str], set[str], bool]:
    """Also whether the later result was under way: on rank 0 it is, since rank 1 waits for it."""
    with files_run() as first:
        fcoll.all_reduce(torch.ones(4)).tolist()
    signals = dist.new_group()
    if rank == 1:
        dist.barrier(signals)
    with files_run() as later:
        y = fcoll.all_reduce(torch.ones(4))
        if rank == 0:
            dist.barrier(signals)
        y.tolist()
    return first, later, type(y) is fcoll.AsyncCollectiveTensor


def launched(program: Any, **env: str) -> list[Any]:
    done = launch(program, 2, env=env, timeout=100)
    assert all(error is None for error in done.errors), done.errors
    return done.results


def test_eager_on_shared_memory(compiled):
    results = launched(first_and_later, FCOLL_NATIVE="1")
    assert_at_most(15, [first for first, _, _ in results])
    assert_at_most(2, [later for _, later, _ in results])
    assert results[0][2]


def test_eager_on_a_process_group():
    results = launched(first_and_later, FCOLL_NATIVE="0")
    assert_at_most(15, [first for first, _, _ in results])
    assert_at_most(11, [later for _, later, _ in results])


def gradient(rank: int) -> set[str]:
    fcoll.all_reduce(torch.ones(4)).tolist()
    x = torch.ones(4, requires_grad=True)
    with files_run() as found:
        fcoll.all_reduce(x).sum().backward()
    return found


def test_gradient(shared2):
    assert_at_most(11, shared2.run(gradient))


def compiled_step(rank: int) -> set[str]:
    fcoll.all_reduce(torch.ones(4)).tolist()
    w = torch.ones(8, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        return fcoll.all_reduce(x @ w) + 1

    with files_run() as found, torch.no_grad():
        torch.compile(step, backend="fcoll", fullgraph=True)(torch.ones(8, 8))
    return found


def test_compiled(shared2):
    assert_at_most(45, shared2.run(compiled_step, timeout=100))


def test_trace_check_and_report():
    from fcoll.report import text
    from fcoll.scheduling.timeline import timeline

    def build(mesh: Any) -> tuple[Any, tuple[torch.Tensor]]:
        model = torch.nn.Linear(4, 4)
        return lambda x: fcoll.all_reduce(model(x)).sum(), (torch.ones(4, 4),)

    with files_run() as found:
        with fcoll.fake_world(tp=2):
            step, args = build(None)
            trace = fcoll.trace(step, *args)
        fcoll.check(build, {"tp": 2})
        shown = text.render(timeline(trace))
    assert "all_reduce" in shown
    # where it was imported, the trace is ready to tell stages of pipelines their shapes
    # and one file of batched simulations may run where other tests have used them: 42 alone
    assert_at_most(43 + ("torch.distributed.pipelining" in sys.modules), [found])
