"""What the passes of inductor_ext do to graphs, and that the graphs still compute the same."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
import inductor_ext
from fcoll import symm_mem
from fcoll.eager.ops import op_of
from fcoll.graph.nodes import arguments, collectives, is_wait
from fcoll.graph.soundness import verify
from fcoll.table.collectives import COLLECTIVES, row_of
from fcoll.transport import shared_memory
from inductor_ext import hooks
from inductor_ext._torch import wait_tensor
from inductor_ext.choice import choice_of
from inductor_ext.config import Config, config
from inductor_ext.lower import registry
from inductor_ext.passes import pipeline
from inductor_ext.passes.choose import choose
from inductor_ext.passes.normalize import normalize
from inductor_ext.passes.pipeline import PASSES, Passes
from inductor_ext.passes.schedule import schedule
from inductor_ext.passes.simplify import substitute
from inductor_ext.stock.inductor import add_rows

Tensor = torch.Tensor


# -- programs: what each leaves of its collectives is in EXPECTED ---


def a_second_wait(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.wait_tensor(fcoll.wait_tensor(fcoll.all_reduce(x))) + y


def returned_as_it_was_started(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """As the partitioner saves it for a backward pass that waits for it."""
    a = torch.ops.fcoll.all_reduce(x, "sum", dist.group.WORLD.group_name)
    return a, fcoll.wait_tensor(a) + y, fcoll.wait_tensor(a) * y


def max_of_a_sum(x: Tensor, y: Tensor) -> Tensor:
    """The maximum over equal values is that value."""
    total = fcoll.all_reduce(x)
    return fcoll.all_reduce(torch.relu(total), "max") + y


def mean_of_a_mean(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.all_reduce(fcoll.all_reduce(x, "avg"), "avg") * y


def max_of_two_sums(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.all_reduce(fcoll.all_reduce(x) + fcoll.all_reduce(y, "max"), "min")


def max_of_a_sum_and_its_own(x: Tensor, y: Tensor) -> Tensor:
    """y is another one on every rank: the maximum stays."""
    return fcoll.all_reduce(fcoll.all_reduce(x) + y, "max")


def sum_of_a_sum(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.all_reduce(fcoll.all_reduce(x)) + y


def max_of_a_share(x: Tensor, y: Tensor) -> Tensor:
    """Every rank takes a share of its own of what is equal: a constant in its graph."""
    r = dist.get_rank()
    share = fcoll.all_reduce(x)[r : r + 1]
    return fcoll.all_reduce(share, "max") + y


def max_of_a_multiple(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.all_reduce(fcoll.all_reduce(x) * (dist.get_rank() + 1.5), "max") + y


def gather_of_a_sum(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.all_gather_into_tensor(fcoll.all_reduce(x)) * 2


def gather_along_1_of_a_broadcast(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.all_gather_into_tensor(fcoll.broadcast(x, 1), dim=1) * 2


def gather_on_another_group(x: Tensor, y: Tensor) -> Tensor:
    """What is equal on a part of the ranks need not be equal on all of them."""
    part = fcoll.all_reduce(x, "sum", [dist.get_rank()])
    return fcoll.all_gather_into_tensor(part)


def scatter_then_gather(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.all_gather_into_tensor(fcoll.reduce_scatter_tensor(x, "avg")) + y


def scatter_then_gather_along_another(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.all_gather_into_tensor(fcoll.reduce_scatter_tensor(x), dim=1)


def scatter_used_and_gathered(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    part = fcoll.reduce_scatter_tensor(x)
    return part, fcoll.all_gather_into_tensor(part)


def three_small(x: Tensor, y: Tensor) -> Tensor:
    a, b, c = fcoll.all_reduce(x), fcoll.all_reduce(y[0]), fcoll.all_reduce(x.sum())
    return a * b + c


def small_ones_in_two_orders(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return fcoll.all_reduce(x), fcoll.all_reduce(y), fcoll.all_reduce(x, "max")


def one_needs_the_other(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.all_reduce(fcoll.all_reduce(x) * y)


def other_dtypes(x: Tensor, y: Tensor) -> Tensor:
    return fcoll.all_reduce(x) + fcoll.all_reduce(y.double())


def another_between(x: Tensor, y: Tensor) -> Tensor:
    a = fcoll.all_reduce(x)
    g = fcoll.all_gather_into_tensor(y)
    return fcoll.all_reduce(y) + a + g[:4]


def large_ones(x: Tensor, y: Tensor) -> Tensor:
    a, b = fcoll.all_reduce(x.repeat(1, 1000)), fcoll.all_reduce(y.repeat(1, 1000))
    return a + b


def torchs_own(x: Tensor, y: Tensor) -> Tensor:
    c10d, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    a = c10d.wait_tensor(c10d.all_reduce(x, "sum", name))
    return c10d.wait_tensor(c10d.all_gather_into_tensor(a * y, dist.get_world_size(), name))


def started_late(x: Tensor, y: Tensor) -> Tensor:
    h = x @ x
    z = y @ y
    a = torch.ops.fcoll.all_reduce(h, "sum", dist.group.WORLD.group_name)
    a = fcoll.wait_tensor(a)
    return z @ z + a


# Names of the collectives that are left before forms are chosen.
EXPECTED: dict[Callable, list[str]] = {
    a_second_wait: ["all_reduce"],
    returned_as_it_was_started: ["all_reduce"],
    max_of_a_sum: ["all_reduce"],
    mean_of_a_mean: ["all_reduce"],
    max_of_two_sums: ["all_reduce"] * 2,
    max_of_a_sum_and_its_own: ["all_reduce"] * 2,
    sum_of_a_sum: ["all_reduce"] * 2,
    max_of_a_share: ["all_reduce"] * 2,
    max_of_a_multiple: ["all_reduce"] * 2,
    gather_of_a_sum: ["all_reduce"],
    gather_along_1_of_a_broadcast: ["broadcast"],
    gather_on_another_group: ["all_reduce", "all_gather_into_tensor"],
    scatter_then_gather: ["all_reduce"],
    scatter_then_gather_along_another: ["reduce_scatter_tensor", "all_gather_into_tensor"],
    scatter_used_and_gathered: ["reduce_scatter_tensor", "all_gather_into_tensor"],
    three_small: ["all_reduce"],
    small_ones_in_two_orders: ["all_reduce"] * 2,
    one_needs_the_other: ["all_reduce"] * 2,
    other_dtypes: ["all_reduce"] * 2,
    another_between: ["all_reduce", "all_gather_into_tensor", "all_reduce"],
    large_ones: ["all_reduce"] * 2,
    torchs_own: ["all_reduce", "all_gather_into_tensor"],
    started_late: ["all_reduce"],
}
PROGRAMS = {f.__name__: f for f in EXPECTED}


def test_every_program_is_run():
    defined = [f for f in globals().values() if inspect.isfunction(f)]
    two = [f.__name__ for f in defined if list(inspect.signature(f).parameters) == ["x", "y"]]
    assert sorted(two) == sorted(PROGRAMS)


def graph_of(f: Callable, *args: Tensor, mode: str = "fake") -> GraphModule:
    """The graph of f, cleaned as AOTAutograd leaves it."""
    gm = make_fx(f, tracing_mode=mode)(*args)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def names(gm: GraphModule) -> list[str]:
    return [row.name for _, row in collectives(gm.graph)]


def run_passes(gm: GraphModule, which: Any = PASSES) -> list[str]:
    said = []
    for p in which:
        said += pipeline.run(p, gm.graph)
    gm.recompile()
    return said


def all_but_choose(rank: int, name: str, mode: str) -> tuple[list[str], Any, Any]:
    """What is left of the collectives, and the results without the passes and with them."""
    f = PROGRAMS[name]
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    y = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 + rank))
    gm = graph_of(f, x, y, mode=mode)
    before = gm(x, y)
    run_passes(gm, PASSES[: PASSES.index(choose)])
    return names(gm), before, gm(x, y)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pass_changes_no_value(ranks2, name):
    for left, before, after in ranks2.run(all_but_choose, name, "fake"):
        assert left == EXPECTED[PROGRAMS[name]]
        torch.testing.assert_close(after, before, rtol=0, atol=0)


# -- in one process, on groups that move nothing ---


@pytest.fixture
def world():
    with fcoll.fake_world(tp=2) as mesh:
        yield mesh


@pytest.fixture
def shared(world, monkeypatch):
    """The groups of the fake world pass for such with shared memory."""
    here = shared_memory.Status(1, "for the test")
    monkeypatch.setattr(shared_memory, "known_status", lambda group: here)
    return world


def square(n: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(n, n, dtype=dtype)


def forms_of(f: Callable, *args: Tensor, mode: str = "fake") -> list[tuple[str, str]]:
    gm = graph_of(f, *args, mode=mode)
    run_passes(gm)
    choices = [choice_of(node) for node, _ in collectives(gm.graph)]
    return [(choice.form, choice.why) for choice in choices]


def test_normalize_gives_every_target_its_row(world):
    name = dist.group.WORLD.group_name
    c10d = torch.ops._c10d_functional

    def f(x: Tensor) -> list[Tensor]:
        started = [
            c10d.all_reduce(x, "sum", name),
            c10d.all_gather_into_tensor(x, 2, name),
            c10d.reduce_scatter_tensor(x, "sum", 2, name),
            c10d.all_to_all_single(x, [2, 2], [2, 2], name),
            c10d.broadcast(x, 0, name),
            *c10d.all_reduce_coalesced([x, x], "sum", name),
            torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, name),
        ]
        return [c10d.wait_tensor(y) for y in started]

    gm = graph_of(f, square())
    before = [row_of(n.target).name for n, _ in collectives(gm.graph)]
    normalize(gm.graph)
    found = list(collectives(gm.graph))
    assert [row.name for _, row in found] == before
    assert all(node.target is op_of(row) for node, row in found)
    # every argument is where the op expects it
    assert all("group_name" in arguments(node) for node, _ in found)


def test_without_shared_memory_torchs_ops_stay_as_they_were(world, monkeypatch):
    status = shared_memory.Status(0, "a fake group moves no bytes")
    monkeypatch.setattr(shared_memory, "known_status", lambda group: status)
    gm = graph_of(torchs_own, square(), square())
    targets = [node.target for node, _ in collectives(gm.graph)]
    said = run_passes(gm)
    assert [node.target for node, _ in collectives(gm.graph)] == targets
    assert len(said) == 2
    assert all(line.endswith("stock (process group: a fake group moves no bytes)") for line in said)


def torchs_scatter_then_gather(x: Tensor) -> Tensor:
    c10d, name, n = torch.ops._c10d_functional, dist.group.WORLD.group_name, dist.get_world_size()
    part = c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", n, name))
    return c10d.wait_tensor(c10d.all_gather_into_tensor(part, n, name))


def simplified_without_shared_memory(rank: int) -> tuple[list[str], list[str], Any, Any]:
    x = torch.arange(16.0).reshape(4, 4) + rank
    gm = graph_of(torchs_scatter_then_gather, x)
    before = gm(x)
    symm_mem.status()
    run_passes(gm)
    chosen = [choice_of(node).form for node, _ in collectives(gm.graph)]
    return names(gm), chosen, before, gm(x)


def test_what_replaces_torchs_ops_is_no_op_that_was_there_before(ranks2):
    """The all_reduce that a scatter and a gather become is not put back as a gather."""
    for left, chosen, before, after in ranks2.run(simplified_without_shared_memory):
        assert (left, chosen) == (["all_reduce"], ["stock"])
        torch.testing.assert_close(after, before)


def test_schedule_starts_early_and_waits_late(shared):
    gm = graph_of(started_late, square(), square())
    before = [node.name for node in gm.graph.nodes]
    said = schedule(gm.graph)
    after = [node.name for node in gm.graph.nodes]
    assert sorted(after) == sorted(before) and after != before
    start, wait = after.index("all_reduce"), after.index("wait_tensor")
    assert after[start - 1] == "mm"  # what it sends
    assert after[wait + 1] == "add"  # what uses it
    assert {"mm_1", "mm_2"} <= set(after[start:wait])
    assert said == ["all_reduce: starts 1 kernel earlier, is waited for 1 kernel later"]
    with config.patch(schedule=None):
        gm = graph_of(started_late, square(), square())
        assert schedule(gm.graph) == []
        assert [node.name for node in gm.graph.nodes] == before


def test_schedule_keeps_the_order_of_starts(shared):
    name = dist.group.WORLD.group_name

    def f(x: Tensor, y: Tensor) -> Tensor:
        h = x @ x
        a = torch.ops.fcoll.all_gather_into_tensor(h @ h, 2, name)
        b = torch.ops.fcoll.all_reduce(y, "sum", name)  # y is there from the beginning
        c = torch.ops.fcoll.all_reduce(h, "max", name)  # and h before a is
        return fcoll.wait_tensor(a)[:4] + fcoll.wait_tensor(b) + fcoll.wait_tensor(c)

    gm = graph_of(f, square(), square())
    starts = [node.name for node, _ in collectives(gm.graph)]
    schedule(gm.graph)
    assert [node.name for node, _ in collectives(gm.graph)] == starts


def test_choose_takes_the_best_form(shared):
    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x @ x) + 1

    assert forms_of(f, square()) == [("fused", "")]
    with config.patch(form="opaque"):
        assert [form for form, _ in forms_of(f, square())] == ["opaque"]
    with config.patch(form="kernel"):
        assert [form for form, _ in forms_of(f, square())] == ["kernel"]
    assert forms_of(started_late, square(), square())[0][0] == "split"
    assert forms_of(returned_as_it_was_started, square(), square()) == [("fused", "")]
    with config.patch(schedule=None):
        assert forms_of(started_late, square(), square())[0][0] == "fused"


def test_choose_leaves_one_node_of_what_is_fused(shared):
    gm = graph_of(lambda x: fcoll.all_reduce(x @ x) + 1, square())
    run_passes(gm)
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == [
        "mm",
        "all_reduce",
        "add",
    ]


def of_a_view_before_the_wait(x: Tensor) -> Tensor:
    started = torch.ops.fcoll.all_reduce(x, "sum", dist.group.WORLD.group_name)
    shaped = started.view(-1)
    return fcoll.wait_tensor(started) + fcoll.wait_tensor(shaped)[0]


WHY_NOT = {
    "a scalar": lambda x: fcoll.all_reduce(x.sum()),
    "not along dim 0": lambda x: fcoll.reduce_scatter_tensor(x, "sum", dim=1),
    "differ in size": lambda x: fcoll.all_gather_into_tensor(x, sizes=[4, 4]),
    "bor of torch.int32 is left|bor is not": lambda x: fcoll.all_reduce(x.int(), "bor"),
    "torch.bool": lambda x: fcoll.all_reduce(x > 1, "max"),
    "torch.uint8": lambda x: fcoll.all_reduce(x.to(torch.uint8)),
    "torch.complex64": lambda x: fcoll.all_reduce(x.to(torch.complex64)),
    "bytes are more than": lambda x: fcoll.all_reduce(x.repeat(1024, 1024)),
    "has no form that is read": lambda x: fcoll.all_to_all_single(x),
    "used before its wait": of_a_view_before_the_wait,
}


@pytest.mark.parametrize("why", WHY_NOT)
def test_choose_says_why_not(shared, why):
    for form, said in forms_of(WHY_NOT[why], square()):
        assert form == "kernel"
        assert any(part in said for part in why.split("|")), said


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max"])
def test_floats_are_read_in_place_for_every_op(shared, op, dtype):
    assert forms_of(lambda x: fcoll.all_reduce(x, op), square(dtype=dtype)) == [("fused", "")]


def test_a_gather_is_read_in_place_along_any_dim(shared):
    for dim in (0, 1):
        f = partial(fcoll.all_gather_into_tensor, dim=dim)
        assert forms_of(f, square()) == [("fused", "")]


def test_the_limit_is_that_of_the_group_and_belongs_to_it(shared):
    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x)

    with config.patch(one_shot_bytes={2: 64}):
        assert [form for form, _ in forms_of(f, square(4))] == ["fused"]
        assert [form for form, _ in forms_of(f, square(5))] == ["kernel"]


def test_limits_go_by_the_next_smaller_group():
    made = Config(one_shot_bytes={2: 100, 8: 10})
    assert [made.one_shot_limit(n) for n in (1, 2, 7, 8, 64)] == [0, 100, 100, 10, 10]


def test_a_size_that_varies_is_guarded_by_the_limit(shared):
    gm = make_fx(lambda x: fcoll.all_reduce(x) + 1, tracing_mode="symbolic")(square())
    with config.patch(one_shot_bytes={2: 1024}):
        said = run_passes(gm)
    assert said[-1].endswith(": fused")
    guards = [str(guard.expr) for guard in gm.shape_env.guards]
    assert any("1024" in guard or "256" in guard for guard in guards), guards


def test_merge_is_bounded(shared):
    def f(x: Tensor, y: Tensor) -> Tensor:
        return fcoll.all_reduce(x) + fcoll.all_reduce(y)

    for limit, left in ((64, 1), (63, 2)):
        with config.patch(merge_bytes=limit):
            gm = graph_of(f, square(), square())
            run_passes(gm)
            assert len(names(gm)) == left


def test_verify_finds_a_result_that_nobody_waits_for(world):
    gm = graph_of(lambda x: fcoll.all_reduce(x) + 1, square())
    verify(gm.graph)
    wait = next(node for node in gm.graph.nodes if is_wait(node))
    substitute(wait, wait.args[0])
    with pytest.raises(AssertionError, match="nothing waits for all_reduce = all_reduce"):
        verify(gm.graph)


def test_verify_finds_a_use_before_the_value(world):
    gm = graph_of(lambda x: fcoll.all_reduce(x) + 1, square())
    wait = next(node for node in gm.graph.nodes if is_wait(node))
    start = wait.args[0]
    wait.append(start)
    with pytest.raises(RuntimeError):
        verify(gm.graph)


def test_the_log_says_what_each_pass_did_and_where(shared, caplog):
    gm = graph_of(max_of_a_sum, square(), square())
    with caplog.at_level(logging.INFO, logger="inductor_ext"):
        Passes()(gm.graph)
    lines = [r.getMessage() for r in caplog.records if r.name == "inductor_ext"]
    assert any(line.startswith("simplify: all_reduce_1 = all_reduce") for line in lines), lines
    assert "choose: all_reduce = all_reduce [4, 4] torch.float32" in lines[-1]
    assert lines[-1].endswith(": fused")


def test_graphs_without_collectives_are_left_alone(world, caplog):
    gm = graph_of(lambda x: x.repeat(2, 1) @ x, square())
    before = str(gm.graph)
    with caplog.at_level(logging.INFO, logger="inductor_ext"):
        Passes()(gm.graph)
    assert str(gm.graph) == before
    assert not [record for record in caplog.records if record.name == "inductor_ext"]


# -- registration ---


@pytest.fixture
def registered():
    from torch._inductor import lowering

    registry.unregister()  # a test before may have compiled something
    add_rows()  # or nothing: stock Inductor knows the ops from the first compile on
    before = dict(lowering.lowerings)
    registry.register()
    yield lowering
    registry.unregister()
    for op, lower in before.items():
        assert lowering.lowerings.get(op) is lower, op


@pytest.mark.parametrize("row", COLLECTIVES)
def test_every_row_has_a_lowering(registered, row):
    assert callable(registry.lowering_of(row))
    op = wait_tensor if row == "wait_tensor" else op_of(COLLECTIVES[row])
    assert op in registered.lowerings


def test_registration_is_idempotent_and_undone(registered):
    ops = [op_of(COLLECTIVES[row]) for row in COLLECTIVES if row != "wait_tensor"]
    once = [registered.lowerings[op] for op in ops]
    registry.register()
    assert [registered.lowerings[op] for op in ops] == once
    registry.unregister()
    assert not any(registered.lowerings.get(op) in once for op in ops)
    registry.unregister()
    registry.register()


def test_install_twice_is_once_and_uninstall_undoes_it(registered):
    from torch._inductor import config as inductor_config

    def others(graph: torch.fx.Graph) -> None:
        """A pass of a user's."""

    with inductor_config.patch(post_grad_custom_post_pass=others):
        inductor_ext.install()
        inductor_ext.install()
        assert inductor_config.post_grad_custom_post_pass == [others, hooks._passes]
        inductor_ext.uninstall()
        assert inductor_config.post_grad_custom_post_pass in (others, [others])
        inductor_ext.uninstall()
        patched = hooks.patches({})["post_grad_custom_post_pass"]
        assert patched == [others, hooks._passes]


def printed(program: str) -> str:
    """What a process of its own prints: nothing has been imported there before."""
    made = [sys.executable, "-c", program]
    done = subprocess.run(made, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOWERED_FIRST = """
from inductor_ext.lower import registry

@registry.lowers("broadcast")
def mine(*args):
    pass

registry.register()
print(registry.lowering_of("broadcast") is mine)
"""


def test_a_lowering_of_a_users_from_before_the_first_compile():
    assert printed(LOWERED_FIRST) == "True\n"


TRACED = """
import sys
import torch
from torch.fx.experimental.proxy_tensor import make_fx
import fcoll

with fcoll.fake_world(tp=2):
    make_fx(lambda x: fcoll.all_reduce(x), tracing_mode="fake")(torch.ones(2))
print("inductor_ext" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
"""


def test_a_trace_does_not_import_inductor():
    assert printed(TRACED) == "False False\n"


IMPORTED_FIRST = """
import functorch.compile
from torch._functorch import compile_utils, partitioners
from torch._inductor import compile_fx, lowering
import torch
import fcoll
import inductor_ext.lower.registry

print(fcoll.__name__ + ".all_reduce" in map(str, lowering.lowerings))
print(compile_utils.fx_graph_cse.__module__, partitioners.is_not_collective.__module__)

@torch.compile
def step(x):
    return x + 1

step(torch.ones(2))
print(torch.ops.fcoll.all_reduce.default in lowering.lowerings)
"""


@pytest.mark.parametrize("first", ["import fcoll", "import torch", "import torch._inductor"])
def test_stock_inductor_and_the_partitioner_know_the_ops_whichever_is_imported_first(first):
    knows = "False\ninductor_ext.stock._torch inductor_ext.stock._torch\nTrue\n"
    assert printed(first + IMPORTED_FIRST) == knows


def test_a_row_that_does_not_exist():
    with pytest.raises(ValueError, match="all_reduce_everything is no row"):
        registry.lowers("all_reduce_everything")


def test_the_key_of_caches_has_the_config_in_it():
    made = Passes()
    first = made.uuid()
    assert made.uuid() == first
    with config.patch(log=not config.log):
        assert made.uuid() == first
    for change in ({"form": "opaque"}, {"schedule": None}, {"merge_bytes": 1}):
        with config.patch(**change):
            assert made.uuid() != first
    with config.patch(one_shot_bytes={2: 1}):
        assert made.uuid() != first


def test_the_key_of_caches_has_the_sizes_of_groups_in_it():
    """The code for two ranks reads two parts: four ranks must not find it."""
    keys = []
    for n in (2, 4):
        with fcoll.fake_world(tp=n):
            symm_mem.status()
            keys.append(Passes().uuid())
    assert keys[0] != keys[1]


def test_the_key_of_caches_has_no_destroyed_groups_in_it(solo):
    """Whoever holds one, and whenever it is garbage collected."""
    before = Passes().uuid()
    group = dist.new_group([0])
    symm_mem.status(group)
    with_it = Passes().uuid()
    dist.destroy_process_group(group)
    assert Passes().uuid() == before != with_it
    assert group.size() == 1  # it is still there


def test_the_key_of_caches_has_all_sources_in_it(tmp_path):
    """Each file of a package can decide what is generated, those of its C++ too."""
    paths = [Path(name) for name in ("a.py", "deep/er/b.py", "native/c.cpp", "native/c.h")]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("1")
    keys = [pipeline.source_hash(tmp_path)]
    for path in paths:
        (tmp_path / path).write_text("2")
        keys.append(pipeline.source_hash(tmp_path))
    (tmp_path / "a.py").rename(tmp_path / "z.py")
    keys.append(pipeline.source_hash(tmp_path))
    (tmp_path / "new.py").touch()
    keys.append(pipeline.source_hash(tmp_path))
    assert len(set(keys)) == len(keys)
    (tmp_path / "notes.md").write_text("no code")
    assert pipeline.source_hash(tmp_path) == keys[-1]


def test_the_sources_are_those_of_both_packages():
    root = Path(fcoll.__file__).parent.parent
    listed = {file for folder in pipeline.PACKAGES for file in pipeline.source_files(folder)}
    for package in ("fcoll", "inductor_ext"):
        files = {Path(at, name) for at, _, found in os.walk(root / package) for name in found}
        sources = {file for file in files if file.suffix in (".py", ".cpp", ".h")}
        assert sources and sources <= listed
    assert {"arena.h", "compiled.cpp", "row.py", "choose.py"} <= {file.name for file in listed}


def test_the_key_of_caches_changes_with_a_source_of_fcolls(monkeypatch, tmp_path):
    shutil.copytree(pipeline.PACKAGES[0], tmp_path / "fcoll")
    keys = []
    for line in ("", "# one more line"):
        with (tmp_path / "fcoll" / "table" / "row.py").open("a") as file:
            file.write(line)
        monkeypatch.setattr(pipeline, "PACKAGES", (tmp_path / "fcoll", pipeline.PACKAGES[1]))
        pipeline.own_source_hash.cache_clear()
        keys.append(Passes().uuid())
    pipeline.own_source_hash.cache_clear()
    assert keys[0] != keys[1]
