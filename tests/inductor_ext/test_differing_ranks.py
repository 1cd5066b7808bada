"""Compiled programs on ranks with other settings, and of torch's own collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from programs import compiled, loaded, no_graph_cache, normal

import fcoll
import inductor_ext
from fcoll.errors import PlanMismatch

Tensor = torch.Tensor
COMPILE_S = 600


def with_other_settings(rank: int) -> str:
    """Small all-reduces are one on rank 1 only; then the ranks have the same settings again."""
    group = dist.new_group().group_name

    def sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return fcoll.all_reduce(x @ w, "sum", group), fcoll.all_reduce(x @ w.T, "sum", group)

    x, w = normal(4, 4, rank=rank), normal(4, 4, rank=0)
    want = sums(x, w)
    with no_graph_cache(merge_bytes=rank * 1024), pytest.raises(PlanMismatch) as caught:
        compiled(sums)(x, w)
    for got, right in zip(compiled(sums)(x, w), want, strict=True):
        torch.testing.assert_close(got, right + 0)
    return str(caught.value)


def test_settings_that_differ_are_an_error_on_all_ranks(ranks2):
    for said in ranks2.run(with_other_settings, timeout=COMPILE_S):
        assert "number 1 is" in said and "Their settings differ" in said


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
