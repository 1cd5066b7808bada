"""Compiled steps in which ranks use different results: every rank still makes every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import compiled, no_graph_cache, results_and_gradients

import fcoll
from fcoll.errors import PlanMismatch

COMPILE_S = 170.0
Tensor = torch.Tensor
c10d = torch.ops._c10d_functional


def world() -> str:
    return dist.group.WORLD.group_name


def by_torch(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", world()))


# -- steps: (x, is this the rank that looks?) -> results ---


def logs_a_sum(x: Tensor, log: bool) -> Any:
    a = fcoll.all_reduce(x)
    b = fcoll.all_reduce(torch.relu(x) * 100)
    return (b, a.detach().square().mean()) if log else b


def logs_one_of_a_list(x: Tensor, log: bool) -> Any:
    a, b = fcoll.all_reduce_coalesced([x, x * 3])
    c = fcoll.all_gather_into_tensor(x + 1)
    return (c, b.detach().mean()) if log else (c, a.detach())


def logs_torchs_own(x: Tensor, log: bool) -> Any:
    a, b, c = by_torch(x), fcoll.all_reduce(x * 10), by_torch(x * 100)
    return (c, (a + b).detach()) if log else c


def uses_nothing(x: Tensor, log: bool) -> Any:
    fcoll.all_reduce(x)
    fcoll.reduce_scatter_tensor(x * 5)
    out = x.detach().new_empty(2 * x.shape[0], *x.shape[1:])
    torch.ops.fcoll.all_gather_into_tensor_out(x.detach() * 7, 2, world(), out=out)
    return x + 1


def sends_the_same_twice(x: Tensor, log: bool) -> Any:
    """Equal calls are one on a rank that does not know what the others send."""
    a, b, c = x.sin(), x.cos(), x.exp()
    sent = (a, a, b, c) if log else (a, b, b, c)
    return sum(fcoll.all_reduce(y) * i for i, y in enumerate(sent))


def logs_a_share(x: Tensor, log: bool) -> Any:
    part = fcoll.reduce_scatter_tensor(x)
    whole = fcoll.all_gather_into_tensor(part)
    return (whole, part.detach().mean()) if log else whole


class Watched(torch.autograd.Function):
    """The identity; its backward pass sums something that only some look at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: bool) -> Tensor:
        ctx.log = log
        ctx.save_for_backward(x.sin())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (seen,) = ctx.saved_tensors
        total = fcoll.all_reduce(seen)
        fcoll.all_reduce(g * 2)
        return (g + 0 * total if ctx.log else g), None


def watches_gradients(x: Tensor, log: bool) -> Any:
    h = Watched.apply(x, log) * x
    a = fcoll.all_reduce(h)
    return (fcoll.all_reduce(h.cos()), a.detach().mean()) if log else fcoll.all_reduce(h.cos())


# (step, with gradients?)
STEPS: list[tuple[Callable, bool]] = [
    (logs_a_sum, False),
    (logs_one_of_a_list, False),
    (logs_torchs_own, True),
    (uses_nothing, True),
    (sends_the_same_twice, True),
    (watches_gradients, True),
]


def differences(rank: int, steps: list[tuple[Callable, bool]], schedule: Any, n: int) -> list[str]:
    """What each step of n x n does otherwise when it is compiled."""
    wrong = []
    x = torch.arange(n * n * 1.0).reshape(n, n) / n**2 + rank
    for step, with_gradients in steps:
        run = results_and_gradients if with_gradients else results
        want = run(lambda x, step=step: step(x, rank == 0), x)
        with no_graph_cache(schedule=schedule):
            try:
                got = run(compiled(lambda x, step=step: step(x, rank == 0)), x)
            except PlanMismatch as error:
                wrong.append(f"{step.__name__}: {error}")
                continue
        for a, b in zip(got, want, strict=True):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
                wrong.append(f"{step.__name__}: {a.flatten()[0]} instead of {b.flatten()[0]}")
    return wrong


def results(f: Callable, x: Tensor) -> list[Tensor]:
    out = f(x)
    return [y + 0 for y in (out if isinstance(out, tuple) else (out,))]


# Dynamo makes an instance of torch.autograd.Function, which warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("pool", "schedule", "n"), [("shared2", "safe", 96), ("ranks2", None, 8)])
def test_every_rank_makes_every_call(request, pool, schedule, n):
    ranks = request.getfixturevalue(pool)
    assert ranks.run(differences, STEPS, schedule, n, timeout=COMPILE_S) == [[], []]


# -- ranks whose compilers leave out different calls, so that what is left looks alike ---


def largest_of_what_all_have(x: Tensor, log: bool) -> Any:
    a = fcoll.all_reduce(x)  # that all ranks have it is known on the rank that sends it on
    b = fcoll.all_reduce(a if log else x * 3, "max")
    return fcoll.all_reduce(x * 5 if log else a, "max") + b


def left_out(rank: int) -> str:
    x = torch.full((8, 8), rank + 1.0)
    step = largest_of_what_all_have
    want = step(x, rank == 0) + 0
    with no_graph_cache(schedule=None):
        torch.testing.assert_close(compiled(step)(x, rank == 0), want)
    with no_graph_cache(merge_bytes=0), pytest.raises(PlanMismatch) as caught:
        compiled(step)(x, rank == 0)
    return str(caught.value)


def test_ranks_that_leave_out_different_calls_are_told(shared2):
    for said in shared2.run(left_out, timeout=COMPILE_S):
        assert "call 3 of the graph" in said and "call 2 of the graph" in said, said
        assert "config.schedule = None" in said
