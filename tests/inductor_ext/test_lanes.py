"""The lanes of a compiled program: nested graphs, more parts than lanes, failures in between."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import fcoll
import inductor_ext
from inductor_ext.lower import ir

pytestmark = pytest.mark.usefixtures("compiled")


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return fcoll.all_reduce(x + 1, "sum") * 0.5


def nested(rank: int) -> float:
    """A graph that Inductor does not inline, called twice between a start and its use."""

    def program(x: torch.Tensor) -> torch.Tensor:
        y = fcoll.all_reduce(x * 2, "sum")
        return y + region(region(x))

    x = torch.full((512, 512), float(rank + 1))
    expected = 6.0 + (((2 + 3) * 0.5 + 1) * 2) * 0.5
    return float((torch.compile(program, backend="fcoll")(x) - expected).abs().max())


def test_nested_graphs_have_lanes_of_their_own(shared2):
    assert shared2.run(nested, timeout=170) == [0.0, 0.0]


def many(rank: int) -> list[int]:
    """More parts than an arena has lanes (256), all read at the end; 250 seem to be taken."""

    def program(xs: list[torch.Tensor]) -> torch.Tensor:
        parts = [fcoll.all_gather_into_tensor(x + 1) for x in xs]
        total = parts[0] * 0
        for part in reversed(parts):
            total = total * 0.5 + part
        return total

    taken = {lane: (None, None) for lane in range(250)}
    xs = [torch.full((4,), float(i % 7 + rank)) for i in range(14)]
    with torch.no_grad(), mock.patch.object(ir, "lanes", lambda: taken):
        assert torch.allclose(torch.compile(program, backend="fcoll")(xs), program(xs))
    return sorted(taken)


def test_more_parts_than_lanes(shared2):
    assert shared2.run(many, timeout=170) == [list(range(264))] * 2


def fails_in_between(rank: int) -> list[float]:
    """The step fails between the start and the wait, is caught, and is called again."""

    def program(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        y = fcoll.all_reduce(x @ x, "sum")
        return torch.linalg.cholesky(matrix).sum() + y

    step = torch.compile(program, backend="fcoll")
    good, bad = torch.eye(512), -torch.eye(512)  # large enough for a start and a wait apart
    wrong = []
    for i in range(40):
        x = torch.eye(64) * (i + 1)
        if i % 5 == 3:
            with pytest.raises(RuntimeError):
                step(x, bad)
            continue
        y = step(x, good)
        assert "split" in [c.form for c in inductor_ext.report()]
        wrong.append(float((y - (512 + 2 * (i + 1) ** 2 * torch.eye(64))).abs().max()))
    return wrong


def test_a_failure_between_start_and_wait_leaves_nothing_stale(shared2):
    for wrong in shared2.run(fails_in_between, timeout=170):
        assert max(wrong) == 0.0
