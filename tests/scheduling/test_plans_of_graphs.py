"""Plans of graphs: right orders give the same values, wrong ones are caught."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll.errors import BadPlan, BadPlanFile
from fcoll.graph.issued import collectives_of
from fcoll.graph.steps import steps_of
from fcoll.scheduling.verified_plan import verify_plan

SCHEDULERS = (
    "original",
    "safe",
    "sink_waits",
    "raise_comms",
    "reorder_compute",
    "overlap",
    "search",
)


c10d = torch.ops._c10d_functional


def all_reduce(x, group):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group.group_name))


def all_gather(x, group):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, group.size(), group.group_name))


def reduce_scatter(x, group):
    started = c10d.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)
    return c10d.wait_tensor(started)


def step(x, w, group):
    """Products, views, writes in place and random numbers around collectives of two kinds."""
    total = all_reduce(x @ w, group)
    state = torch.zeros_like(x)
    state.add_(x)
    noise = torch.rand_like(x)
    gathered = all_gather(w[:2].contiguous(), group)
    before = state * 2
    state.mul_(3)
    mixed = (x * noise) @ w.t()
    scattered = reduce_scatter(torch.cat([mixed, mixed]), group)
    state.copy_(total + state)
    more = torch.rand_like(x)
    buffer = x.clone()
    done = all_reduce(buffer, group)
    again = buffer + 1
    done = done * 2
    buffer.zero_()
    out = total @ w + before + mixed.view(-1).view_as(x) + more
    return out, state, gathered.sum(), scattered, again, done, buffer


def graph_of(group) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    return make_fx(lambda x, w: step(x, w, group), tracing_mode="fake")(x, w)


def prices(graph, seed: int = 0) -> dict[str, float]:
    rng = random.Random(seed)
    return {n.name: float(rng.randint(1, 30)) for n in graph.graph.nodes}


def planned(graph, scheduler="overlap", seed=0, **options):
    costs = {"costs": prices(graph, seed), "memory_cap": None, **options}
    return fcoll.schedule(graph, scheduler=scheduler, **costs)


def outputs(module, seed=1):
    torch.manual_seed(seed)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    torch.manual_seed(seed)
    return [t.clone() for t in module(x, w)]


# -- values ---


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_same_values_in_another_order(solo, scheduler):
    graph = graph_of(solo)
    before = outputs(graph)
    for seed in range(6):
        plan = planned(graph, scheduler, seed)
        module = plan.apply()
        assert [n.name for n in module.graph.nodes] == list(plan.order)
        assert all(map(torch.equal, before, outputs(module)))


def values_on_ranks(rank):
    """Planned and unplanned on real ranks; the plans of all ranks are one."""
    graph = graph_of(dist.group.WORLD)
    before = outputs(graph, 7 + rank)
    plans = [planned(graph, "overlap", seed) for seed in range(3)]
    assert any(p.order != tuple(n.name for n in graph.graph.nodes) for p in plans)
    for plan in plans:
        after = outputs(plan.apply(), 7 + rank)
        assert all(map(torch.equal, before, after))
    return [p.digest for p in plans]


def test_the_same_values_on_two_ranks(ranks2):
    one, other = ranks2.run(values_on_ranks)
    assert one == other


# -- what is read from a graph ---


def test_a_write_waits_for_what_is_sent(solo):
    graph = graph_of(solo)
    steps = {s.name: s for s in steps_of(graph, collectives_of(graph), fuse=False)}
    clone = next(
        s for s in steps.values() if s.op == "aten::clone" and s.name in used_by_zero(steps)
    )
    wait = next(s for s in steps.values() if s.kind == "wait" and clone.name in s.uses)
    assert any(s.op == "aten::zero_" and wait.name in s.inputs for s in steps.values())


def used_by_zero(steps):
    return {name for s in steps.values() if s.op == "aten::zero_" for name in s.uses}


def test_effects(solo):
    graph = graph_of(solo)
    steps = steps_of(graph, collectives_of(graph))
    assert [s.op for s in steps if s.effect == "random"] == ["aten::rand_like"] * 2
    assert {s.effect for s in steps} == {"", "random"}


def test_an_unknown_op_is_a_barrier(solo):
    library = torch.library.Library("stranger", "FRAGMENT")
    library.define("talk(Tensor x) -> Tensor")
    library.impl("talk", lambda x: x.clone(), "CompositeExplicitAutograd")
    try:

        def program(x):
            a, b = x @ x, all_reduce(x + 1, solo)
            c = torch.ops.stranger.talk(a)
            return c @ x, b @ c, (x + 2) @ x

        graph = make_fx(program, tracing_mode="fake")(torch.ones(4, 4))
        talk = next(n.name for n in graph.graph.nodes if "talk" in n.name)
        names = [s.name for s in steps_of(graph, collectives_of(graph), fuse=False)]
        for seed in range(5):
            plan = planned(graph, "overlap", seed)
            now = [s.name for s in plan.steps]
            at = names.index(talk)
            assert now.index(talk) == at and set(now[:at]) == set(names[:at])
    finally:
        library._destroy()


def test_messages_between_ranks_keep_all_collectives_in_order():
    with fcoll.fake_world(pp=2, rank=0) as mesh:

        def program(x):
            a = fcoll.all_reduce(x @ x, "sum", mesh)
            fcoll.batch_p2p([("isend", x + 1, 1)], mesh)
            b = fcoll.all_reduce(x, "sum", mesh)
            return a, b, x @ x

        trace = fcoll.trace(program, torch.ones(8, 8), mode="forward")
        starts = [s.name for s in trace.steps if s.kind == "start"]
        for seed in range(5):
            plan = planned(trace.graph_module, "overlap", seed)
            assert [s.name for s in plan.steps if s.kind == "start"] == starts


def test_fused_kernels_are_planned_as_one():
    with fcoll.fake_world(tp=4) as mesh:
        program = lambda x: (  # noqa: E731
            fcoll.all_reduce(x @ x, "sum", mesh).relu() + 1,
            ((x + 1).relu() * 2) @ x,
        )
        trace = fcoll.trace(program, torch.ones(256, 256), mode="forward")
    plan = fcoll.schedule(trace, memory_cap=None)
    assert plan.makespan_us < plan.original_us
    assert plan.original_us == pytest.approx(
        fcoll.schedule(trace, scheduler="original").makespan_us
    )
    kernels = [s.fused_with for s in plan.steps if s.fused_with]
    together = [k for i, k in enumerate(kernels) if i == 0 or kernels[i - 1] != k]
    assert len(together) == len(set(together)), "a kernel was torn apart"


def test_a_trace_from_a_file_is_planned_without_its_graph():
    with fcoll.fake_world(tp=4) as mesh:
        program = lambda x: (fcoll.all_reduce(x @ x, "sum", mesh), (x + 1) @ x)  # noqa: E731
        trace = fcoll.trace(program, torch.ones(64, 64), mode="forward")
        plan = fcoll.schedule(trace, memory_cap=None)
    again = fcoll.schedule(fcoll.Trace.from_json(trace.to_json()), memory_cap=None)
    assert [s.name for s in again.steps] == [s.name for s in plan.steps]
    assert again.makespan_us == plan.makespan_us


# -- wrong plans ---


def wrong_orders(graph, plan):
    """(what is wrong, the plan) : every way to break a dependency that the graph has."""
    nodes = {n.name: n for n in graph.graph.nodes}
    ops = {n.name: str(n.target) for n in graph.graph.nodes}
    order = list(plan.order)

    def moved(name, before):
        made = [x for x in order if x != name]
        made.insert(made.index(before), name)
        return replace(plan, order=tuple(made))

    def pairs(first, second):
        return [(a, b) for a in order for b in order if first in ops[a] and second in ops[b]]

    for name in order:
        for needed in nodes[name].all_input_nodes[:1]:
            if nodes[name].op != "output":
                yield f"{name} before its input", moved(name, needed.name)
    rand = [name for name in order if "rand_like" in ops[name]]
    yield "random numbers swapped", moved(rand[1], rand[0])
    for write in ("add_", "mul_", "copy_", "zero_"):
        for a, b in pairs("", f"aten.{write}"):
            reads = {n.name for n in nodes[b].all_input_nodes} & {
                n.name for n in nodes[a].all_input_nodes
            }
            if a != b and reads and order.index(a) < order.index(b) and "aten" in ops[a]:
                yield f"{b} before {a}, which reads what it writes", moved(b, a)
    yield "a node is missing", replace(plan, order=plan.order[:-1])
    yield "a node is there twice", replace(plan, order=(*plan.order[:-1], plan.order[0]))


def wrong_steps(plan):
    steps = list(plan.steps)
    for i, step in enumerate(steps):
        if step.inputs:
            at = min(j for j, s in enumerate(steps) if s.name in step.inputs)
            made = [*steps[:at], step, *steps[at:i], *steps[i + 1 :]]
            yield f"{step.name} before its input", replace(plan, steps=tuple(made))
    yield "a step is missing", replace(plan, steps=tuple(steps[1:]))
    yield "a step is there twice", replace(plan, steps=(*steps, steps[0]))
    yield "a stranger", replace(plan, steps=(*steps[:-1], replace(steps[-1], name="stranger")))
    yield "more memory than it says", replace(plan, peak_bytes=plan.peak_bytes - 1)
    yield "over the cap", replace(plan, cap_bytes=plan.peak_bytes - 1)


def test_wrong_plans_are_caught(solo):
    graph = graph_of(solo)
    caught = 0
    for scheduler in ("original", "overlap"):
        plan = planned(graph, scheduler)
        verify_plan(plan)
        for what, wrong in [*wrong_orders(graph, plan), *wrong_steps(plan)]:
            with pytest.raises(BadPlan):
                verify_plan(wrong)
                pytest.fail(f"{what} was not caught")
            caught += 1
    assert caught >= 40


def test_a_seeded_mistake_in_a_scheduler_is_caught(solo):
    """A scheduler that forgets one kind of dependency makes plans that never come out."""
    graph = graph_of(solo)
    for seed in range(20):
        rng = random.Random(seed)

        def forgetful(job, rng=rng):
            names = job.names(range(job.problem.n))
            u = rng.choice([u for u in range(job.problem.n) if job.problem.before[u]])
            name, needed = job.problem.names[u], job.problem.names[job.problem.before[u][-1]]
            names.remove(name)
            names.insert(names.index(needed), name)
            return names

        with pytest.raises(BadPlan):
            planned(graph, forgetful)


# -- keeping and comparing ---


def test_save_load_diff_explain(solo, tmp_path):
    graph = graph_of(solo)
    plan, before = planned(graph), planned(graph, "original")
    plan.save(tmp_path / "plan.json")
    again = fcoll.Plan.load(tmp_path / "plan.json", graph)
    assert again.digest == plan.digest and again.order == plan.order
    assert again.steps == plan.steps and again.makespan_us == plan.makespan_us
    assert all(map(torch.equal, outputs(again.apply()), outputs(graph)))
    assert plan.diff(again) == "the same plan"
    assert "makespan_us" in before.diff(plan) and "nodes stand elsewhere" in before.diff(plan)
    start = next(s.name for s in plan.steps if s.kind == "start")
    text = plan.explain(start)
    assert (
        f"{start}: starts all_reduce on" in text and "it needs mm" in text and "issued at" in text
    )
    for each in plan.steps:
        assert each.name in plan.explain(each.name)


@pytest.mark.parametrize("damage", ["", "{}", "order"])
def test_a_damaged_file(solo, tmp_path, damage):
    path = tmp_path / "plan.json"
    planned(graph_of(solo)).save(path)
    text = path.read_text()
    path.write_text(text.replace("mm", "nn", 1) if damage == "order" else damage)
    with pytest.raises(BadPlanFile, match=r"cannot read the plan .*plan.json"):
        fcoll.Plan.load(path)


def test_torchs_scheduler_for_comparison():
    with fcoll.fake_world(dp=4) as mesh:
        graph = graph_of(mesh.get_group("dp"))
        plan = planned(graph, "torch")
        assert plan.scheduler == "torch" and plan.cap_bytes is None
        assert sorted(plan.order) == sorted(n.name for n in graph.graph.nodes)


def in_place(x, w, group):
    """What Inductor's post-grad graphs have: forms that write, and lists."""
    name = group.group_name
    sums = x @ w
    started = c10d.all_reduce_(sums, "sum", name)
    other = (x + 1) @ w
    done = c10d.wait_tensor(started)
    first = done * other
    a, b = c10d.all_reduce_coalesced([x * 2, w * 3], "sum", name)
    more = torch.sin(x)
    second = c10d.wait_tensor(a) + more
    third = c10d.wait_tensor(b) @ second
    done.mul_(2)
    into = torch.empty_like(x)
    filled = c10d.all_gather_into_tensor_out(
        x[: 4 // group.size()].clone(), group.size(), name, out=into
    )
    last = (w + 2) @ w
    return first, second, third, done, c10d.wait_tensor(filled) + last, x


@pytest.mark.parametrize("scheduler", ["safe", "raise_comms", "overlap"])
def test_forms_that_write_and_lists(solo, scheduler):
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    graph = make_fx(lambda x, w: in_place(x, w, solo), tracing_mode="fake")(x, w)
    kinds = [s.kind for s in steps_of(graph, collectives_of(graph), fuse=False)]
    assert kinds.count("start") == 3 and kinds.count("wait") == 4
    before = [t.clone() for t in graph(x, w)]
    for seed in range(8):
        plan = planned(graph, scheduler, seed)
        assert all(map(torch.equal, before, plan.apply()(x, w)))
        assert plan.timeline.step_us == pytest.approx(plan.makespan_us)


def test_torchs_scheduler_where_kernels_are_fused(monkeypatch):
    """It orders nodes: the first result of a kernel may be used before its last one is made."""
    with fcoll.fake_world(dp=4) as mesh:
        group = mesh.get_group("dp")

        def step(x, w):
            first = x.exp()
            last = first.sin()
            return all_reduce(first @ w, group) + last @ w

        trace = fcoll.trace(step, torch.ones(4, 4), torch.ones(4, 4), mode="forward")
        names = [node.name for node in trace.graph_module.graph.nodes]
        sine = next(name for name in names if "sin" in name)
        product = next(i for i, name in enumerate(names) if name.startswith("mm"))
        assert names.index(sine) < product
        names.remove(sine)
        names.insert(product, sine)  # behind the product
        given = "fcoll.scheduling._torch.overlap_scheduler_order"
        monkeypatch.setattr(given, lambda *args: names)
        plan = fcoll.schedule(trace, scheduler="torch")
    assert sorted(s.name for s in plan.steps) == sorted(s.name for s in trace.steps)
