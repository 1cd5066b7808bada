"""Compiled graphs of ranks that do not agree, ranks that die, and graphs that come from a cache."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import compiled, forms, loaded, no_graph_cache, normal
from ranks import launch
from test_inductor_ext import COMPILE_S
from torch._dynamo.utils import counters

import fcoll
import inductor_ext
from fcoll import errors

pytestmark = pytest.mark.usefixtures("compiled")
Tensor = torch.Tensor
NATIVE = {"FCOLL_NATIVE": "1"}


# -- ranks that do not agree: each on a group of its own, since an error is the end of a group ---


def other_shape(rank: int, group: Any) -> None:
    x = torch.ones(4 + 4 * rank, 4)
    run(lambda x: fcoll.all_reduce(x @ torch.ones(4, 4), "sum", group) + 1, x)


def other_op(rank: int, group: Any) -> None:
    op = ("sum", "max")[rank]
    run(lambda x: fcoll.all_reduce(x @ x, op, group) + 1, torch.ones(4, 4))


def other_collective(rank: int, group: Any) -> None:
    call: Callable = (fcoll.all_reduce, fcoll.all_gather_into_tensor)[rank]
    run(lambda x: call(x @ x, group=group) + 1, torch.ones(4, 4))


def other_dtype(rank: int, group: Any) -> None:
    dtype = (torch.float32, torch.bfloat16)[rank]
    run(lambda x: fcoll.all_reduce(x @ x, "sum", group) + 1, torch.ones(4, 4, dtype=dtype))


def one_more(rank: int, group: Any) -> None:
    """Rank 1 issues one more, and rank 0 goes on to something else."""

    def f(x: Tensor) -> Tensor:
        y = fcoll.all_reduce(x @ x, "sum", group)
        return fcoll.all_reduce(y @ x, "sum", group) if rank else y + 1

    run(f, torch.ones(4, 4))
    fcoll.wait_tensor(fcoll.all_gather_into_tensor(torch.ones(3), group))


def one_in_eager(rank: int, group: Any) -> None:
    """Both ran it compiled; then rank 1 calls the function itself."""

    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x @ x, "sum", group) + 1

    x = torch.ones(4, 4)
    g = compiled(f)
    assert torch.equal(g(x), torch.full((4, 4), 9.0))
    (f if rank else g)(x) + 0


MISTAKES = {
    "other_shape": (other_shape, "all_reduce"),
    "other_op": (other_op, "all_reduce"),
    "other_collective": (other_collective, "all_gather_into_tensor"),
    "other_dtype": (other_dtype, "all_reduce"),
    "one_more": (one_more, "all_gather_into_tensor"),
    "one_in_eager": (one_in_eager, "all_reduce"),
}


def run(f: Callable, x: Tensor) -> None:
    compiled(f)(x)


def disagree(rank: int, names: list[str]) -> dict[str, tuple[str, str]]:
    seen = {}
    for name in names:
        group = dist.new_group([0, 1])
        with no_graph_cache(merge_bytes=0, compare=False):  # else they find out before they start
            try:
                MISTAKES[name][0](rank, group)
                seen[name] = ("nothing", "")
            except Exception as error:
                seen[name] = (type(error).__name__, str(error))
        dist.barrier()
    return seen


def test_ranks_that_compiled_different_graphs(shared2):
    for seen in shared2.run(disagree, list(MISTAKES), timeout=COMPILE_S):
        for name, (kind, message) in seen.items():
            assert kind == errors.CollectiveMismatch.__name__, (name, kind, message)
            assert MISTAKES[name][1] in message, (name, message)
            assert "rank 0 calls" in message and "rank 1 calls" in message, (name, message)


def dies(rank: int) -> tuple[str, str, float, int]:
    w = normal(16, 16, rank=rank)

    def f(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.relu(fcoll.all_reduce(x @ w))
        return x

    x = normal(8, 16, rank=rank)
    g = compiled(f)
    for _ in range(3):
        g(x)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    victim = pids[1]
    if rank == 1:
        while True:  # in the middle of a step when it ends
            g(x)
    for _ in range(50):
        g(x)
    start = monotonic()
    os.kill(victim, signal.SIGKILL)
    try:
        for _ in range(100000):
            g(x)
    except Exception as error:
        return type(error).__name__, str(error), monotonic() - start, getattr(error, "rank", -1)
    return "nothing", "", 0.0, -1


def test_a_rank_that_is_killed_in_a_compiled_step(tmp_path):
    done = launch(dies, 2, timeout=COMPILE_S, env=NATIVE)
    kind, message, seconds, victim = done.results[0]
    assert kind == "PeerDied", (kind, message)
    assert "rank 1" in message and victim == 1
    assert seconds < 0.5


# -- caches ---


def cached(rank: int, folder: str, changes: dict[str, Any], world: bool) -> dict[str, Any]:
    """One function compiled with its caches in a folder: how often Inductor's had the graph."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    group = None if world else [1, 0]

    def f(x: Tensor) -> Tensor:
        y = torch.relu(fcoll.all_reduce(x @ x))
        return fcoll.all_reduce(y @ x, "sum", group) + 1  # a second group

    counters.clear()
    before = loaded()
    x = normal(8, 8, rank=rank) / 8
    with inductor_ext.config.patch(**changes):
        g = compiled(f)
        for i in range(3):
            torch.testing.assert_close(g(x + i), f(x + i) + 0, rtol=1e-5, atol=1e-5)
    found = counters["inductor"]
    aot = counters["aot_autograd"]
    return {
        "hit": found["fxgraph_cache_hit"] + aot["autograd_cache_hit"] > 0,
        "miss": found["fxgraph_cache_miss"] > 0,
        "forms": {form for _, form in forms(before)},
    }


def cached_twice(rank: int, folder: str, elsewhere: str) -> list[dict[str, Any]]:
    """Cold, warm, with another config, and warm on one rank only."""
    mine = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    seen = []
    try:
        for where, changes in (
            (folder, {}),
            (folder, {}),
            (folder, {"form": "opaque"}),
            (folder if rank else elsewhere, {}),
        ):
            dist.barrier()  # else a rank that is late finds what the other has just compiled
            seen.append(cached(rank, where, changes, True))
        return seen
    finally:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = mine


def test_graphs_from_caches(shared2, tmp_path):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for rank, seen in enumerate(shared2.run(cached_twice, *folders, timeout=COMPILE_S)):
        cold, warm, other, half = seen
        assert cold["miss"] and not cold["hit"]
        assert warm["hit"] and not warm["miss"]
        assert other["miss"]
        assert half["hit"] == (rank == 1)
        assert cold["forms"] == {"fused"} and other["forms"] == {"opaque"}


def fresh(rank: int, folder: str, elsewhere: str) -> dict[str, Any]:
    return cached(rank, folder if rank else elsewhere, {}, False)


def test_fresh_processes_of_which_one_has_the_graph(shared2, shared4, tmp_path):
    """Neither has used its groups before: that one of them compiles must not keep the other
    waiting in a collective that it is not at yet."""
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for _ in range(2):
        done = launch(fresh, 2, *folders, timeout=COMPILE_S, env=NATIVE)
        assert done.errors == [None, None], done.stderr
        hits = [r["hit"] for r in done.results]
        folders[1] = str(tmp_path / "c")
    assert hits == [False, True]


def of_the_world(rank: int, folder: str) -> bool:
    mine = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    try:
        cached(rank, folder, {}, True)
    finally:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = mine
    return True


def test_worlds_of_other_sizes_do_not_share_graphs(shared2, shared4, tmp_path):
    for pool in (shared2, shared4, shared2):
        assert all(pool.run(of_the_world, str(tmp_path), timeout=COMPILE_S))
