"""Schedules inside torch.compile: which order is taken, and that the generated code keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import compiled, no_graph_cache, normal
from steps import LAYERS, ddp, events, fsdp
from test_inductor_passes import graph_of, names, run_passes, square
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
import inductor_ext
from fcoll.costs.machine import Machine
from fcoll.errors import BadOption, PlanMismatch, UnknownMachine, UnknownScheduler
from fcoll.graph.nodes import is_start, is_wait
from fcoll.scheduling.scheduler_registry import SCHEDULERS
from fcoll.transport import shared_memory
from inductor_ext import graph_prices
from inductor_ext.choice import choice_of
from inductor_ext.config import config
from inductor_ext.errors import SchedulerFailed
from inductor_ext.passes.pipeline import Passes
from inductor_ext.passes.schedule import schedule

# Dynamo itself makes an instance of autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
Tensor = torch.Tensor
COMPILE_S = 600
SCHEDULES = (None, "safe", "overlap")


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


# -- on real ranks: the same values, and the planned order in the code ---


class Spy:
    """Keeps the order of the graphs that the passes leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[list[str]] = []
        stock = Passes.__call__

        def call(passes: Passes, graph: Graph) -> None:
            stock(passes, graph)
            self.seen.append([kind for node in graph.nodes if (kind := kind_of(node))])

        monkeypatch.setattr(Passes, "__call__", call)


def kind_of(node: torch.fx.Node) -> str:
    """As ``events`` calls it in the code."""
    if is_start(node):
        choice = choice_of(node)
        return "both" if choice is not None and choice.is_complete else "start"
    if is_wait(node):
        return "wait"
    return "mm" if node.target is torch.ops.aten.mm.default else ""


PROGRAMS: dict[str, Callable] = {"ddp": ddp, "fsdp": fsdp}


def step(rank: int, name: str, size: int, changes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A step of a program: result and gradients, the planned orders, and those of the code."""
    sharded = name == "fsdp"
    rows = size // dist.get_world_size() if sharded else size
    seed = rank if sharded else 0
    ws = [normal(rows, size, rank=seed, seed=i).requires_grad_() for i in range(LAYERS)]
    with pytest.MonkeyPatch.context() as patch, no_graph_cache(**changes):
        spy = Spy(patch)

        def run() -> list[Tensor]:
            y = compiled(PROGRAMS[name])(normal(8, size, rank=rank), ws)
            y.square().sum().backward()
            return [y.detach(), *(w.grad for w in ws)]

        values, codes = run_and_get_code(run)
    planned = [order for order in spy.seen if {"start", "both"} & set(order)]
    made = [order for order in map(events, codes) if {"start", "both"} & set(order)]
    return values, planned, made


def steps(rank: int, name: str) -> dict[Any, Any]:
    return {how: step(rank, name, 16, {"schedule": how, "memory_cap": None}) for how in SCHEDULES}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("pool", ["ranks2", "shared2"])
def test_steps_are_planned_and_the_code_keeps_the_plan(request, pool, name):
    for found in request.getfixturevalue(pool).run(steps, name, timeout=COMPILE_S):
        for how, (values, planned, made) in found.items():
            torch.testing.assert_close(values, found[None][0], rtol=0, atol=0)
            assert made == planned, how
        backward = found["safe"][1][-1]
        if name == "ddp":  # small all-reduces are one
            assert sum(kind in ("start", "both") for kind in backward) == 1
            assert sum(kind in ("start", "both") for kind in found[None][1][-1]) == LAYERS
        else:  # gathers start early, and what is scattered is waited for late
            forward = found["overlap"][1][0]
            assert not {"start", "both"} & set(forward[forward.index("mm") :])
            first = next(i for i, kind in enumerate(backward) if kind == "start")
            assert "mm" in backward[first : backward.index("wait", first)]


# -- without ranks ---


def gradients(x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
    """Four large all-reduces, each after a product of its own."""
    return tuple(fcoll.all_reduce(x @ w) for w in ws)


def test_overlap_makes_buckets_where_they_pay(world):
    """On gloo a message takes 300 us: one of 4 x 64 KiB takes less than four."""
    args = [square(128)] * 5
    for how, left in (("overlap", 1), ("safe", 4), (None, 4)):
        with config.patch(schedule=how, memory_cap=None):
            gm = graph_of(gradients, *args)
            run_passes(gm)
            assert len(names(gm)) == left, how


def test_overlap_keeps_the_cap(world):
    """A bucket needs all its parts at once."""
    with config.patch(schedule="overlap", memory_cap="+0%"):
        gm = graph_of(gradients, *[square(128)] * 5)
        run_passes(gm)
        assert len(names(gm)) == 4


def between(gm: torch.fx.GraphModule) -> int:
    """Products between the first start and its wait."""
    nodes = list(gm.graph.nodes)
    start = next(node for node in nodes if is_start(node))
    wait = next(node for node in nodes if is_wait(node))
    part = nodes[nodes.index(start) : nodes.index(wait)]
    return sum(node.target is torch.ops.aten.mm.default for node in part)


def two_products(x: Tensor, y: Tensor) -> Tensor:
    total = fcoll.all_reduce(x @ x)
    return total + (y @ y) @ y


def test_what_is_read_in_place_takes_no_memory(shared):
    """Its part lies in the arena, so the wait may be late; of a process group it holds the part."""
    gm = graph_of(two_products, square(), square())
    run_passes(gm, [schedule])
    assert between(gm) == 2


def test_what_a_process_group_sends_takes_memory(world):
    gm = graph_of(two_products, square(), square())
    run_passes(gm, [schedule])
    assert between(gm) < 2


def test_a_kernel_on_shared_memory_blocks(shared):
    """It is complete when it returns: to start it early hides nothing."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        h = x @ x
        z = y @ y
        return fcoll.all_to_all_single(h) + z @ z

    gm = graph_of(f, square(), square())
    before = [node.name for node in gm.graph.nodes if not is_wait(node)]
    run_passes(gm, [schedule])
    assert [node.name for node in gm.graph.nodes if not is_wait(node)] == before


def test_a_function_plans(world):
    calls = []

    def as_it_was(job: Any) -> list[str]:
        calls.append(len(job))
        return [s.name for s in job]

    with config.patch(schedule=as_it_was, merge_bytes=0):
        gm = graph_of(two_products, square(), square())
        before = [node.name for node in gm.graph.nodes]
        run_passes(gm, [schedule])
    assert calls and [node.name for node in gm.graph.nodes] == before


def test_a_scheduler_of_ones_own_by_name(world):
    @fcoll.scheduler("last to first")
    def mine(job: Any) -> list[str]:
        return job.names(range(job.problem.n))

    try:
        with config.patch(schedule="last to first"):
            assert config.schedule == "last to first"
    finally:
        del SCHEDULERS["last to first"]
    with pytest.raises(UnknownScheduler):
        config.schedule = "last to first"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda job: [s.name for s in reversed(job)], "comes before"),
        (lambda job: None, "gives None, which is no step or name"),
    ],
)
def test_a_wrong_plan_is_an_error(world, given, why):
    with config.patch(schedule=given):
        gm = graph_of(two_products, square(), square())
        with pytest.raises(fcoll.errors.BadPlan, match=why):
            run_passes(gm, [schedule])


@pytest.mark.parametrize(
    ("given", "why"),
    [(lambda job: 1 / 0, "ZeroDivisionError"), (lambda job: len(None), "TypeError")],
)
def test_a_scheduler_that_fails_is_named(world, given, why):
    gm = graph_of(two_products, square(), square())
    with config.patch(schedule=given), pytest.raises(SchedulerFailed, match=why) as caught:
        Passes()(gm.graph)
    assert "the scheduler '<lambda>' failed" in str(caught.value)
    assert "test_schedule.py:" in str(caught.value)


def test_sizes_that_vary_are_planned_by_their_hints(world):
    gm = make_fx(two_products, tracing_mode="symbolic")(square(), square())
    gm.graph.eliminate_dead_code()
    assert run_passes(gm, [schedule])


def test_sizes_that_only_a_run_knows_are_left_as_they_are(world):
    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(torch.nonzero(x).double()) @ torch.ones(2, 2).double()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        gm = make_fx(f, tracing_mode="symbolic")(square())
    before = [node.name for node in gm.graph.nodes]
    said = run_passes(gm, [schedule])
    assert len(said) <= 1 and [node.name for node in gm.graph.nodes] == before


# -- settings ---


def test_settings_are_checked_when_they_are_set():
    for name, value, error in (
        ("schedule", "nosuch", UnknownScheduler),
        ("machine", "nosuch", UnknownMachine),
        ("network", "nosuch", UnknownMachine),
        ("memory_cap", "a lot", BadOption),
    ):
        before = getattr(config, name)
        with pytest.raises(error):
            setattr(config, name, value)
        assert getattr(config, name) == before


def test_overlap_is_a_short_word_for_a_schedule():
    assert config.overlap and config.schedule == "safe"
    with config.patch(overlap=False):
        assert config.schedule is None and not config.overlap
        with config.patch(schedule="overlap"):
            config.overlap = True
            assert config.schedule == "overlap"
    assert config.schedule == "safe"


@pytest.mark.parametrize(("given", "found"), [("overlap", "'overlap'"), ("none", "None")])
def test_the_environment_names_a_schedule(given, found):
    program = "import inductor_ext; print(repr(inductor_ext.config.schedule))"
    env = {**os.environ, "INDUCTOR_EXT_SCHEDULE": given}
    made = [sys.executable, "-c", program]
    done = subprocess.run(made, capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout.strip() == found, done.stderr


def plain(job: Any) -> list[str]:
    return [step.name for step in job]


def test_the_key_of_caches_has_the_plan_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FCOLL_MACHINE_DIR", str(tmp_path))
    keys = [Passes().uuid()]
    other = Machine.preset("a100")
    for change in ({"schedule": "overlap"}, {"memory_cap": None}, {"schedule": plain}):
        with config.patch(**change):
            keys.append(Passes().uuid())
    for change in ({"machine": "h100"}, {"network": other}, {"machine": other}):
        with config.patch(**change):
            keys.append(Passes().uuid())
    (tmp_path / "local.toml").write_text(Machine.preset("a100").to_toml())  # it was calibrated
    keys.append(Passes().uuid())
    assert len(set(keys)) == len(keys) and None not in keys


def test_a_function_with_a_state_of_its_own_is_not_cached():
    size = 3

    def closure(job: Any) -> list[str]:
        return [s.name for s in job][: size * len(job)]

    class Mine:
        def __call__(self, job: Any) -> list[str]:
            return plain(job)

    class Named(Mine):
        def uuid(self) -> str:
            return "mine 1"

    for given in (closure, Mine()):
        with config.patch(schedule=given):
            assert Passes().uuid() is None
    with config.patch(schedule=Named()):
        assert Passes().uuid() is not None


def test_prices_are_those_of_the_way_that_a_group_takes(tmp_path, monkeypatch):
    monkeypatch.setenv("FCOLL_MACHINE_DIR", str(tmp_path))
    assert graph_prices.machine_for(()).name == "cpu"
    assert graph_prices.network().name == "cpu-gloo"
    (tmp_path / "local.toml").write_text(Machine.preset("a100").to_toml())
    assert graph_prices.machine_for(()).name == "a100"
    assert graph_prices.network().name == "cpu-gloo"
    with config.patch(machine="h100"):
        assert graph_prices.network().name == graph_prices.machine_for(()).name == "h100"
        with config.patch(network="b200"):
            assert graph_prices.network().name == "b200"


def test_the_table_says_what_the_schedule_did():
    entry = inductor_ext.lowered.Lowered(
        *("all_reduce", "0", (4,), "float32", 16, "fused", "", "model.py:1"),
        plan="a, b as one all_reduce",
    )
    assert "a, b as one all_reduce" in inductor_ext.table([entry])


# -- ranks that compile different graphs ---


def one_of_two(rank: int) -> list[str]:
    """Ranks that compile different programs, then the same one, then load it from the cache."""

    def program(op: str) -> Callable:
        return lambda x, w: fcoll.all_reduce(x @ w, op, group) + 1

    group = dist.new_group().group_name
    x, w = normal(4, 4, rank=rank), normal(4, 4, rank=0)
    said = []
    with pytest.raises(PlanMismatch) as caught:
        compiled(program("max" if rank else "sum"))(x, w)
    said.append(str(caught.value))
    for _ in range(2):  # compiled by both, then loaded by both
        torch.compiler.reset()
        want = fcoll.all_reduce(x @ w, "sum", group) + 1
        torch.testing.assert_close(compiled(program("sum"))(x, w), want, rtol=0, atol=1e-6)
    with pytest.raises(PlanMismatch) as caught:  # one loads, the other compiles something new
        group = dist.new_group().group_name
        compiled(program("min" if rank else "sum"))(x, w)
    said.append(str(caught.value))
    with no_graph_cache(compare=False):
        codes = run_and_get_code(compiled(program("sum")), x, w)[1]
    assert "fcoll_begins" not in codes[0]
    return said


def test_ranks_that_compile_different_graphs(ranks2):
    for first, second in ranks2.run(one_of_two, timeout=COMPILE_S):
        assert "rank 0: all_reduce(sum)" in first and "rank 1: all_reduce(max)" in first
        assert "test_schedule.py" in first
        assert "rank 0: all_reduce(sum)" in second and "rank 1: all_reduce(min)" in second


def in_cpp(rank: int) -> bool:
    """The C++ wrapper compares by an op."""
    group = dist.new_group().group_name
    x, w = normal(4, 4, rank=rank), normal(4, 4, rank=0)
    with torch._inductor.config.patch(cpp_wrapper=True), no_graph_cache(), torch.no_grad():
        f = compiled(lambda x, w: fcoll.all_reduce(x @ w, "sum", group) @ w)
        got, want = f(x, w), fcoll.all_reduce(x @ w, "sum", group) @ w
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(f(x, w), want, rtol=1e-5, atol=1e-5)
        with pytest.raises(PlanMismatch, match=r"rank 0: all_reduce\(min\)"):
            compiled(lambda x, w: fcoll.all_reduce(x @ w, "max" if rank else "min", group))(x, w)
    return True


def test_the_cpp_wrapper_compares_too(ranks2):
    assert ranks2.run(in_cpp, timeout=COMPILE_S) == [True, True]
