"""Compiled programs with mistakes on one rank: a scheduler that fails, settings that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import compiled, loaded, no_graph_cache, normal
from torch._inductor.exc import InductorError

import fcoll
import inductor_ext
from fcoll.errors import OtherGraph, PlanMismatch

Tensor = torch.Tensor
COMPILE_S = 600


def broken(job: Any) -> list[str]:
    raise ValueError("no such step")


def gives_nothing(job: Any) -> Any:
    return None


def one_rank_is_wrong(rank: int) -> dict[str, str]:
    """Each mistake on rank 0 alone; after each all is well again. What each rank was told."""
    group = dist.new_group().group_name

    def sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return fcoll.all_reduce(x @ w, "sum", group), fcoll.all_reduce(x @ w.T, "sum", group)

    x, w = normal(4, 4, rank=rank), normal(4, 4, rank=0)
    want = sums(x, w)
    said = {}
    for name, wrong in (
        ("broken", {"schedule": broken}),
        ("nothing", {"schedule": gives_nothing}),
        ("settings", {"merge_bytes": 0}),
    ):
        with (
            no_graph_cache(**({} if rank else wrong)),
            pytest.raises((InductorError, PlanMismatch)) as caught,
        ):
            compiled(sums)(x, w)
        said[name] = f"{type(caught.value).__name__} {caught.value}"
        assert isinstance(caught.value, OtherGraph) is (rank == 1 and name != "settings")
        for got, right in zip(compiled(sums)(x, w), want, strict=True):
            torch.testing.assert_close(got, right + 0)
    return said


def test_a_mistake_on_one_rank_is_an_error_on_all(ranks2):
    first, second = ranks2.run(one_rank_is_wrong, timeout=COMPILE_S)
    assert "SchedulerFailed" in first["broken"] and "'broken'" in first["broken"]
    assert "ValueError: no such step" in first["broken"]
    assert "test_differing_ranks.py" in first["broken"]
    assert "'gives_nothing' failed" in first["nothing"]
    for name in ("broken", "nothing"):
        assert "rank 0 could not compile its graph" in second[name]
    assert "ValueError: no such step" in second["broken"]
    for said in (first, second):
        assert "PlanMismatch" in said["settings"] and "Their settings differ" in said["settings"]


def torchs_own(rank: int) -> list[tuple[str, str, str]]:
    """Calls of torch's own on a process group, as DTensor makes them."""
    c10d, group = torch.ops._c10d_functional, dist.group.WORLD.group_name

    def f(x: Tensor, w: Tensor) -> Tensor:
        total = c10d.wait_tensor(c10d.all_reduce(x @ w, "sum", group))
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group))
        return whole @ total

    x, w = normal(4, 4, rank=rank), normal(4, 4, rank=0)
    before = loaded()
    with no_graph_cache():
        torch.testing.assert_close(compiled(f)(x, w), f(x, w))
    return [(e.op, e.form, e.source) for e in inductor_ext.report()[before:]]


def test_torchs_own_collectives_are_in_the_table(ranks2):
    for found in ranks2.run(torchs_own, timeout=COMPILE_S):
        made = {(op.rstrip("_"), form) for op, form, _ in found}  # all_reduce_ is in place
        assert made == {("all_reduce", "stock"), ("all_gather_into_tensor", "stock")}
        assert all("test_differing_ranks.py:" in source for *_, source in found)
