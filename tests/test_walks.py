"""How many files one follows to see what becomes of a call.

A walk is counted on the stack: the files of fcoll and inductor_ext that have a frame on it when the
call leaves Python for good (an engine, a kernel, a line of generated code), and those through which
the result comes back. The words that all share (WORDS) do not count, nor do helpers that return
before the call goes on. In C++ the walk is the chain of functions in CPP, each looked up in its
file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from ranks import launch

import fcoll

ROOT = Path(__file__).parent.parent
NATIVE = ROOT / "fcoll" / "transport" / "native"
WORDS = {"_torch", "errors", "groups", "reductions", "source", "units", "plugins", "__init__"}
WORDS |= {"nodes", "numbers"}  # of graphs, and arithmetic on sizes
WORDS |= {"imports"}  # what _torch files import by

# What an eager all-reduce and a compiled one pass through, from the extension on.
EAGER_CPP = {
    "python.cpp": "PyObject* all_reduce(Args args)",
    "served.cpp": "Result all_reduce(",
    "group.cpp": "uint64_t Group::start(",
    "collectives.cpp": "void publish_chunk(",
    "ring.cpp": "void Ring::publish(",
    "kernels.cpp": "void reduce(",
}
COMPILED_CPP = {
    "python.cpp": "PyObject* meet(Args args)",
    "compiled.cpp": "std::vector<Tensor> meet(",
    "arena.cpp": "Parts Arena::meet(",
}


def files_on_stack() -> set[str]:
    found, frame = set(), sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        inside = any((ROOT / package) in path.parents for package in ("fcoll", "inductor_ext"))
        if inside and path.stem not in WORDS:
            found.add(str(path.relative_to(ROOT)))
        frame = frame.f_back  # type: ignore[assignment]
    return found


@contextmanager
def seen_at(*points: tuple[Any, str]) -> Iterator[set[str]]:
    """The files on the stack whenever one of these functions (owner, name) is called."""
    found: set[str] = set()
    originals = [(owner, name, getattr(owner, name)) for owner, name in points]

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.update(files_on_stack())
            return original(*args, **kwargs)

        return call

    for owner, name, original in originals:
        setattr(owner, name, watched(original))
    try:
        yield found
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def cpp(chain: dict[str, str]) -> set[str]:
    for file, function in chain.items():
        assert function in (NATIVE / file).read_text(), f"{file} has no {function}"
    return set(chain)


# -- eager ---


def eager(rank: int) -> set[str]:
    """From the public function to the extension."""
    from fcoll.transport.native import build

    fcoll.all_reduce(torch.ones(4)).tolist()
    with seen_at((build.fast, "all_reduce")) as found:
        fcoll.all_reduce(torch.ones(4))
    return found


def test_eager_on_shared_memory(shared2):
    for found in shared2.run(eager):
        assert found and len(found | cpp(EAGER_CPP)) <= 7, found


def on_a_process_group(rank: int) -> tuple[set[str], list[str]]:
    """From the public function to gloo, with C++ loaded on one rank; what of that is called."""
    import os

    from fcoll.eager import async_tensor
    from fcoll.transport import process_group
    from fcoll.transport.native import build

    if rank == 1:
        os.environ["FCOLL_NATIVE"] = "0"
    fcoll.all_reduce(torch.ones(4)).tolist()
    assert not fcoll.symm_mem.status().shared and build.has_fast_path() == (rank == 0)
    entered: list[str] = []

    def watch(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and "fcoll" in str(getattr(called, "__module__", "")):
            entered.append(called.__name__)

    points = (process_group, "wire_form"), (async_tensor, "user_site")
    with seen_at(*points) as found:
        sys.setprofile(watch)
        y = fcoll.all_reduce(torch.ones(4))
        sys.setprofile(None)
    y.tolist()
    return found, entered


def test_eager_on_a_process_group_never_enters_cpp(compiled):
    done = launch(on_a_process_group, 2, env={"FCOLL_NATIVE": "1"}, timeout=100)
    assert all(error is None for error in done.errors), done.errors
    for found, entered in done.results:
        assert not entered
        assert "fcoll/transport/process_group.py" in found and len(found) <= 6, found


# -- traced and lowered ---


def compiled_walk(rank: int) -> set[str]:
    """From the public function to the line of generated code that calls the extension."""
    from fcoll.table import reduce
    from inductor_ext.lower import ir, one_shot
    from inductor_ext.passes import choose

    row = fcoll.COLLECTIVES["all_reduce"]
    assert row.check is reduce.check_all_reduce
    w = torch.ones(8, 8)
    points = (
        (choose, "set_choice"),
        (one_shot, "realize_as_comm_buffer"),
        (ir.ArenaKernel, "constants"),
    )

    def step(x: torch.Tensor) -> torch.Tensor:
        return fcoll.all_reduce(x @ w) + 1

    with seen_at(*points) as found, torch.no_grad():
        torch.compile(step, backend="fcoll", fullgraph=True)(torch.ones(8, 8))
    # Dynamo runs the functions of the first part by itself: they are on no stack
    return found | {"fcoll/functions.py", "fcoll/eager/door.py", "fcoll/eager/ops.py"}


def test_traced_and_lowered(shared2):
    for found in shared2.run(compiled_walk, timeout=100):
        walk = found | cpp(COMPILED_CPP)
        assert len(found) > 5 and len(walk) <= 14, sorted(walk)


# -- trace -> report ---


def test_trace_to_report():
    """Every file in which anything runs, this time, besides the program's own calls."""
    from fcoll.report import text
    from fcoll.scheduling.timeline import timeline

    assert fcoll.trace  # imported: what is watched is the call
    found: set[str] = set()

    def watch(frame: Any, event: str, called: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if (ROOT / "fcoll") in path.parents and path.stem not in WORDS:
                found.add(str(path.relative_to(ROOT / "fcoll")))

    with fcoll.fake_world(tp=2):
        model = torch.nn.Linear(4, 4)
        sys.setprofile(watch)
        trace = fcoll.trace(lambda x: fcoll.all_reduce(model(x)).sum(), torch.ones(4, 4))
        shown = text.render(timeline(trace))
        sys.setprofile(None)
    program = {f for f in found if re.match(r"(functions|eager/|table/|transport/)", f)}
    # DDP and pipelines are made ready to be traced, a report asks the planner for advice: apart
    others = r"(tracing/(ddp|pipel)|training/|scheduling/(plann|regis))"
    apart = {f for f in found if re.match(others, f)}
    walk = found - program - apart
    assert "all_reduce" in shown and "report/text.py" in walk
    assert len(walk) <= 17, "\n".join(sorted(walk))
