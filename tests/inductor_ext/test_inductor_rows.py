"""Rows that write to lists, and rows that users add: lowered, and with the values of eager."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import compiled, forms, loaded, no_graph_cache, normal
from test_inductor_ext import COMPILE_S
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
import inductor_ext
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective, Native
from inductor_ext import hooks

pytestmark = pytest.mark.usefixtures("compiled")
Tensor = torch.Tensor


# -- rows that write to their arguments ---


def written_lists(namespace: str) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """All-reduces that write to a list of tensors that are computed, and to one of the caller's."""
    op = getattr(torch.ops, namespace).all_reduce_coalesced_
    world = dist.group.WORLD.group_name

    def f(x: Tensor, y: Tensor) -> list[Tensor]:
        made = [x @ x, (y * 2).relu()]
        for out in op(made, "sum", world):
            fcoll.wait_tensor(out)
        for out in op([x, y], "max", world):
            fcoll.wait_tensor(out)
        return [made[0] + 1, made[1] - x]

    return f


def by_inductor_alone(f: Callable, args: list[Tensor]) -> list[Tensor]:
    """f by the passes and lowerings of "fcoll", but not by AOTAutograd: that refuses all ops of
    torch.ops.X whose schema says that what they return is what they were given."""
    gm = make_fx(f, tracing_mode="fake")(*args)
    with inductor_config.patch(hooks.patches({})):
        made = compile_fx_inner(gm, args)
        return list(made(list(args)))


def all_reduced_lists(rank: int, namespace: str) -> list[list[Tensor]]:
    f, seen = written_lists(namespace), []
    fcoll.symm_mem.status()
    for run in (by_inductor_alone, lambda f, args: f(*args)):
        args = [normal(4, 4, rank=rank), normal(4, 4, rank=rank, seed=1)]
        with no_graph_cache(), torch.no_grad():
            results = run(f, args)
        seen.append([*results, *args])
    return seen


@pytest.mark.parametrize("namespace", ["_c10d_functional", "fcoll"])
@pytest.mark.parametrize("pool", ["shared2", "ranks2"])
def test_an_in_place_all_reduce_of_a_list(request, pool, namespace):
    ranks = request.getfixturevalue(pool).run(all_reduced_lists, namespace, timeout=COMPILE_S)
    xs = [normal(4, 4, rank=r) for r in range(2)]
    ys = [normal(4, 4, rank=r, seed=1) for r in range(2)]
    largest = [torch.maximum(*xs), torch.maximum(*ys)]
    products, doubled = sum(x @ x for x in xs) + 1, sum((y * 2).relu() for y in ys)
    want = [products, doubled - largest[0], *largest]
    for compiled_values, eager_values in ranks:
        torch.testing.assert_close(eager_values, want)
        torch.testing.assert_close(compiled_values, want)


def written_back(rank: int) -> list[Tensor]:
    """What torch.compile makes of a list that is reduced and written to its arguments."""
    c10d, world = torch.ops._c10d_functional, dist.group.WORLD.group_name

    def f(x: Tensor, y: Tensor) -> Tensor:
        outs = c10d.all_reduce_coalesced([x, y], "sum", world)
        for arg, out in zip((x, y), outs, strict=True):
            arg.copy_(c10d.wait_tensor(out))
        return x * y

    args = [normal(4, 4, rank=rank), normal(4, 4, rank=rank, seed=1)]
    with no_graph_cache():
        return [compiled(f)(*args), *args]


@pytest.mark.parametrize("pool", ["shared2", "ranks2"])
def test_a_list_that_is_reduced_and_written_back(request, pool):
    x, y = (sum(normal(4, 4, rank=r, seed=seed) for r in range(2)) for seed in (0, 1))
    for got in request.getfixturevalue(pool).run(written_back, timeout=COMPILE_S):
        torch.testing.assert_close(got, [x * y, x, y])


# -- rows of users ---


def _row(name: str) -> Collective:
    """all_reduce with another name, as a user would write a collective."""
    return replace(
        COLLECTIVES["all_reduce"],
        name=name,
        schema="(Tensor input, str reduce_op, str group_name) -> Tensor",
        adjoint=None,
        saves=None,
        targets=(),
        own_args=(),
        native=Native(),
    )


def registered_late(rank: int, backend: str) -> dict[str, Any]:
    """Compile something, register a row, and compile a call of it."""
    x = normal(4, 4, rank=rank)
    seen: dict[str, Any] = {}
    if backend == "inductor":
        inductor_ext.install()
    try:
        with no_graph_cache():
            compiled(lambda x: fcoll.all_reduce(x @ x) + 1, backend=backend)(x)
            late = fcoll.register(_row(f"late_sum_{backend}"))
            before = loaded()
            seen["got"] = compiled(lambda x: late(x @ x, "sum") + 1, backend=backend)(x)
            seen["forms"] = forms(before)
    finally:
        inductor_ext.uninstall()
    seen["want"] = late(x @ x, "sum") + 1
    return seen


@pytest.mark.parametrize("backend", ["fcoll", "inductor"])
def test_a_row_that_is_registered_after_a_compile(shared2, backend):
    for seen in shared2.run(registered_late, backend, timeout=COMPILE_S):
        torch.testing.assert_close(seen["got"], seen["want"])
        assert seen["forms"] == [(f"late_sum_{backend}", "kernel")]


def under_stock_inductor(rank: int) -> tuple[str, Tensor, Tensor]:
    """The same without inductor_ext's backend: the generated code, and both results."""
    x = normal(4, 4, rank=rank)
    with no_graph_cache(), torch.no_grad():
        compiled(lambda x: fcoll.all_reduce(x @ x) + 1, backend="inductor")(x)
        late = fcoll.register(_row("late_sum_stock"))
        f = compiled(lambda x: late(x @ x, "sum") + 1, backend="inductor")
        got, (code,) = run_and_get_code(f, x)
    return code, got, late(x @ x, "sum") + 1


def test_a_row_that_is_registered_late_under_stock_inductor(ranks2):
    """It is known as a collective: what it sends is not given up before the wait."""
    for code, got, want in ranks2.run(under_stock_inductor, timeout=COMPILE_S):
        torch.testing.assert_close(got, want)
        sent = re.search(r"(\w+) = torch.ops.fcoll.late_sum_stock.default\((\w+),", code)
        out, product = sent.groups()
        waited = code.index(f"wait_tensor.default({out})")
        assert sent.start() < waited < re.search(rf"\bdel {product}\b", code).start()
