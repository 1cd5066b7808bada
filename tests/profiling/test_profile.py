"""fcoll.profile(): what it sees of real runs, and that nothing is left of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import compiled, normal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fcoll
from fcoll.eager import dispatch
from fcoll.profiling.timers import COMPILED, timers
from fcoll.table.collectives import COLLECTIVES
from fcoll.transport.native import build

Seen = tuple[Any, ...]


def line_of(function: Any, mark: str) -> str:
    """Where in this file the function has a mark."""
    first, code = function.__code__.co_firstlineno, function.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()[first - 1 :]
    return f"test_profile.py:{first + next(i for i, x in enumerate(lines) if mark in x)}"


def seen(p: fcoll.Profile) -> list[Seen]:
    """What does not depend on the clock; and the times are such as they must be."""
    for c in p.calls:
        assert c.start_us >= 0 and c.wait_us >= 0 and c.total_us > 0
        assert c.total_us == c.start_us + c.wait_us
    assert sum(c.sum_us for c in p.collectives) == pytest.approx(p.sum_us)
    assert 0 <= p.sum_us <= p.wall_us and p.share == p.sum_us / p.wall_us
    return [
        (c.op, c.group, c.n, c.bytes, c.dtype, c.phase, c.way, c.calls, c.source.split("/")[-1])
        for c in p.collectives
    ]


def hooks() -> list[Any]:
    """All that a profile puts something else in the place of."""
    rows = [row.name for row in COLLECTIVES.values() if row.native.fast]
    names = (*rows, *COMPILED, "wait_tensor", "collect")
    fast = [getattr(build.fast, name) for name in names] if build.has_fast_path() else []
    ops = torch._C._dispatch_get_registrations_for_dispatch_key("BackendSelect")
    ours = [op for op in ops if op.startswith(("c10d::", "_c10d_functional::", "fcoll"))]
    return [
        *fast,
        dispatch.start_eager,
        dispatch.run,
        build.load,
        vars(dist.Work)["wait"],
        ours,
    ]


# -- eager ---


def eager(rank: int) -> list[Seen]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, weight = torch.ones(8), torch.ones(8, requires_grad=True)
    fcoll.all_reduce(x, "sum", mesh)
    before = hooks()
    with fcoll.profile() as p:
        for _ in range(3):
            fcoll.wait_tensor(fcoll.all_reduce(x, "sum", mesh))  # in a loop
        y = fcoll.all_gather_into_tensor(weight, mesh)  # with a gradient
        y.sum().backward()
        z = fcoll.permute(x.to(torch.complex64), [1, 0], mesh)  # not fast
        z.add(1)
        fcoll.all_reduce_coalesced([x, x.bfloat16()], "sum", mesh)[0].add(1)  # a list
        fcoll.barrier(mesh)
    assert len(json.loads(p.to_json())["collectives"]) == len(p.collectives)
    assert hooks() == before and not timers.listeners
    fcoll.wait_tensor(fcoll.all_reduce(x, "sum", mesh))
    assert len(p.calls) == 8
    table = str(p).splitlines()
    assert table[0].startswith("8 collectives, ") and "all_gather_into_tensor" in table[3]
    return seen(p)


def expected_of_eager(ways: tuple[str, str]) -> list[Seen]:
    fast, op = ways
    at = {mark: line_of(eager, f"# {mark}") for mark in ("in a loop", "with", "not fast", "a list")}
    barrier = line_of(eager, "fcoll.barrier(")
    label = "mesh_default"
    return [
        ("all_reduce", label, 2, 32, "float32", "fwd", fast, 3, at["in a loop"]),
        ("all_gather_into_tensor", label, 2, 64, "float32", "fwd", op, 1, at["with"]),
        ("reduce_scatter_tensor", label, 2, 64, "float32", "bwd", op, 1, at["with"]),
        ("permute", label, 2, 64, "complex64", "fwd", op, 1, at["not fast"]),
        ("all_reduce_coalesced", label, 2, 48, "float32, bfloat16", "fwd", fast, 1, at["a list"]),
        ("barrier", label, 2, 0, "", "fwd", fast, 1, barrier),
    ]


def without_label(rows: list[Seen]) -> list[Seen]:
    return [(row[0], *row[2:]) for row in rows]


def test_eager_on_shared_memory(shared2):
    wanted = without_label(expected_of_eager(("fast", "op")))
    for found in shared2.run(eager):
        assert without_label(found) == wanted


def test_eager_on_process_groups(ranks2):
    """Also where the results are waited for: every wait is found its start."""
    wanted = without_label(expected_of_eager(("op", "op")))
    for found in ranks2.run(eager):
        assert without_label(found) == wanted


def implicit_waits(rank: int) -> list[tuple[str, int]]:
    with fcoll.profile() as p:
        y = fcoll.all_reduce(torch.ones(4))
        y + 1
        a, b = fcoll.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
        a.add(b.sum())
        token = fcoll.isend(torch.ones(2), 1 - rank)
        fcoll.irecv(torch.ones(2), 1 - rank).tolist()
        fcoll.wait_tensor(token)
    return [(c.op, c.waits) for c in p.calls]


def test_waits_belong_to_their_starts(ranks2):
    wanted = [("all_reduce", 1), ("all_reduce_coalesced", 2), ("isend", 1), ("irecv", 1)]
    assert ranks2.run(implicit_waits) == [wanted] * 2


# -- torch's own ---


def torchs(rank: int) -> list[Seen]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.ones(8)
    with fcoll.profile() as p:
        dist.all_reduce(x)
        work = dist.all_gather([torch.empty(8), torch.empty(8)], x, async_op=True)
        work.wait()
        sharded = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)
        sharded.full_tensor()  # by gloo
        with fcoll.accelerate_c10d():
            sharded.full_tensor()  # by shared memory
    assert [c.waits for c in p.calls][:3] == [1, 1, 1]  # the last may be complete when it returns
    return [(c.op, c.bytes, c.way, c.source.split("/")[-1]) for c in p.calls]


def test_torchs_collectives(shared2):
    gathers = [line_of(torchs, "# by gloo"), line_of(torchs, "# by shared")]
    for found in shared2.run(torchs):
        assert found == [
            ("all_reduce_", 32, "c10d", line_of(torchs, "dist.all_reduce")),
            ("all_gather_into_tensor", 64, "c10d", line_of(torchs, "work =")),
            *[("all_gather_into_tensor", 32, "op", line) for line in gathers],
        ]


def fsdp(rank: int) -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.ReLU())
    fully_shard(model, mesh=mesh)
    with fcoll.profile() as p:
        model(torch.ones(2, 4)).sum().backward()
    return [(c.op, c.phase) for c in p.calls]


def test_fsdp2(ranks2):
    for found in ranks2.run(fsdp):
        assert ("all_gather_into_tensor_out", "fwd") in found
        assert ("reduce_scatter_tensor_out", "bwd") in found


# -- compiled ---


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = fcoll.all_reduce(x @ w)  # read in place
    z = fcoll.all_to_all_single(y * 2)  # a kernel
    return (y + z).relu()


def in_a_graph(rank: int) -> list[Seen]:
    x, w = normal(4, 8, rank=rank), normal(8, 8, rank=rank).requires_grad_()
    f = compiled(block)
    with fcoll.profile():  # while it is compiled, and by the first call
        f(x, w).sum().backward()
    with fcoll.profile() as p:
        for _ in range(2):
            f(x, w).sum().backward()
    eagerly = block(x, w).sum()
    assert torch.isfinite(eagerly)
    return seen(p)


def test_compiled(shared2):
    reduce_line, exchange_line = line_of(block, "# read in"), line_of(block, "# a kernel")
    for found in shared2.run(in_a_graph, timeout=170.0):
        rows = {(row[0], row[5]): row for row in found}
        assert {key: row[7] for key, row in rows.items()} == {
            ("all_reduce", "fwd"): 2,
            ("all_to_all_single", "fwd"): 2,
            ("all_to_all_single", "bwd"): 2,
            ("all_reduce", "bwd"): 2,
        }
        for (op, _), row in rows.items():
            assert row[3:5] == (128, "float32")
            assert row[8] == (reduce_line if op == "all_reduce" else exchange_line)
            assert row[6] == ("compiled" if op == "all_reduce" else "op")


# -- on and off ---


def nested(rank: int) -> list[int]:
    x = torch.ones(4)
    fcoll.all_reduce(x)
    before = hooks()
    with fcoll.profile() as outer:
        fcoll.all_reduce(x).add(1)
        with fcoll.profile() as inner:
            late = fcoll.all_reduce(x.to(torch.complex64))
        assert hooks() != before
        late.add(1)
    assert hooks() == before
    with pytest.raises(ZeroDivisionError), fcoll.profile() as broken:
        fcoll.all_reduce(x).add(1)
        raise ZeroDivisionError
    assert hooks() == before
    with pytest.raises(fcoll.errors.UnevenShard), fcoll.profile() as refused:
        fcoll.reduce_scatter_tensor(torch.ones(3))
    assert hooks() == before
    assert inner.calls[0].waits == 0
    return [len(p.calls) for p in (outer, inner, broken, refused)]


@pytest.mark.parametrize("pool", ["shared2", "ranks2"])
def test_profiles_nest_and_end(pool, request):
    assert request.getfixturevalue(pool).run(nested) == [[2, 1, 1, 0]] * 2


def before_the_library(rank: int) -> tuple[bool, list[tuple[str, str]]]:
    was_loaded = build.loaded()
    with fcoll.profile() as p:
        for _ in range(2):
            fcoll.wait_tensor(fcoll.all_reduce(torch.ones(4)))
    return was_loaded, [(c.op, c.way) for c in p.calls]


def test_the_first_collective_loads_the_library(compiled):
    from conftest import ON_SHARED_MEMORY
    from ranks import RankPool

    with RankPool(2, ON_SHARED_MEMORY) as pool:
        for was_loaded, calls in pool.run(before_the_library):
            assert not was_loaded
            assert calls == [("all_reduce", "op"), ("all_reduce", "fast")]


def test_a_wait_for_what_was_issued_before(ranks2):
    assert ranks2.run(late) == [[("wait_tensor", 1)]] * 2


def late(rank: int) -> list[tuple[str, int]]:
    y = fcoll.all_reduce(torch.ones(4))
    with fcoll.profile() as p:
        fcoll.wait_tensor(y)
        fcoll.wait_tensor(y)
    return [(c.op, c.waits) for c in p.calls]


# -- predictions ---


def test_predictions(solo, tmp_path, monkeypatch):
    monkeypatch.setenv("FCOLL_MACHINE_DIR", str(tmp_path))
    with fcoll.profile() as p:
        fcoll.all_reduce(torch.ones(4))
    assert p.collectives[0].predicted_us is None
    assert "fcoll calibrate" in str(p).splitlines()[-1]
    with fcoll.profile(machine="h100") as p:
        fcoll.all_reduce(torch.ones(4))
    assert p.collectives[0].predicted_us == 0.0  # a group of one
    assert "H100" in str(p).splitlines()[-1]
    with pytest.raises(fcoll.errors.NotCalibrated):
        fcoll.profile(machine="local")
