"""trace: what a step issues, from which line, and that the trace leaves no marks."""

from __future__ import annotations

import gc
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll import groups
from fcoll.cli import demos
from fcoll.errors import BadOption, UnknownCollective
from fcoll.graph import _torch
from fcoll.graph.symbolic_sizes import from_text, to_text
from fcoll.table.collectives import COLLECTIVES

GOLDEN = Path(__file__).parent.parent / "golden"
MESHES: dict[str, dict[str, int]] = {
    "tiny": {"dp": 2, "tp": 2},
    "tiny-sp": {"dp": 2, "tp": 2},
    "tiny-ddp": {"dp": 2, "tp": 2},
    "tiny-moe": {"ep": 4},
    "tiny-pipeline": {"pp": 4},
}


def traced(name: str, rank: int = 0, **kwargs: Any) -> fcoll.Trace:
    with fcoll.fake_world(**MESHES[name], rank=rank) as mesh:
        step, args = demos.DEMOS[name](mesh)
        return fcoll.trace(step, *args, **kwargs)


def line_of(text: str, source: Any) -> int:
    lines, first = inspect.getsourcelines(source)
    return first + next(i for i, line in enumerate(lines) if text in line)


# -- what is seen ---


def test_both_namespaces_forward_and_backward():
    with fcoll.fake_world(dp=4, tp=2, rank=3) as mesh:
        weight = torch.ones(8, requires_grad=True)
        scatter = torch.ops._c10d_functional_autograd.reduce_scatter_tensor

        def step(x):
            y = fcoll.all_gather_into_tensor(x * weight, (mesh, "tp"))
            y = scatter(y, "sum", 4, groups.resolve((mesh, "dp")).name)
            return fcoll.wait_tensor(y).sum()

        found = fcoll.trace(step, torch.ones(8)).collectives
    assert [(c.op, c.axis, c.phase, c.target.partition("::")[0]) for c in found] == [
        ("all_gather_into_tensor", "tp", "fwd", "fcoll"),
        ("reduce_scatter_tensor", "dp", "fwd", "_c10d_functional_autograd"),
        ("all_gather_into_tensor", "dp", "bwd", "_c10d_functional"),
        ("reduce_scatter_tensor", "tp", "bwd", "fcoll"),
    ]
    assert found[0].ranks == (2, 3) and found[1].ranks == (1, 3, 5, 7)
    assert [c.bytes for c in found] == [64, 64, 64, 64]
    assert found[0].shapes == ((8,),) and found[0].dtypes == ("float32",)
    here = [line_of("all_gather_into_tensor(x", step), line_of("y = scatter", step)]
    lines = [int(c.source.partition(":")[2]) for c in found]
    assert lines == [here[0], here[1], here[1], here[0]]
    assert all(c.source.startswith("tests/tracing/test_trace.py") for c in found)


def test_every_row_of_the_table_is_recognised():
    calls = {
        "all_reduce": lambda x: fcoll.all_reduce(x),
        "broadcast": lambda x: fcoll.broadcast(x, 1),
        "permute": lambda x: fcoll.permute(x, [1, 0]),
        "shard_dim_alltoall": lambda x: fcoll.shard_dim_alltoall(x, 0, 1),
        "all_reduce_coalesced": lambda x: fcoll.all_reduce_coalesced([x, x])[1],
        "barrier": lambda x: fcoll.barrier(),
        "irecv": lambda x: fcoll.irecv(x, 1),
        "batch_p2p_ops": lambda x: fcoll.batch_p2p([("isend", x, 1), ("irecv", x, 1)]),
    }
    for name, call in calls.items():
        with fcoll.fake_world(tp=2):
            (found,) = fcoll.trace(call, torch.ones(2, 2)).collectives
        assert found.op == name and found.row is COLLECTIVES[name]
        assert found.wait is not None


def test_modules_and_hooks_of_parallelize_module():
    with fcoll.fake_world(tp=2) as mesh:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        x = torch.ones(4, 8, requires_grad=True)
        found = fcoll.trace(model, x).collectives
        here = inspect.currentframe().f_lineno - 1
    assert [(c.op, c.phase, c.module) for c in found] == [
        ("all_reduce", "fwd", "1"),
        ("all_reduce", "bwd", "0"),
    ]
    # no line of the user's is in between: then it is the line that asked for the trace
    assert {c.source for c in found} == {f"tests/tracing/test_trace.py:{here}"}


@pytest.mark.parametrize("name", MESHES)
def test_all_lines_of_the_demos_are_the_users(name):
    for c in traced(name, rank=1).collectives:
        assert c.source.startswith("fcoll/cli/demos.py:"), c
        line = Path(demos.__file__).read_text().splitlines()[int(c.source.partition(":")[2]) - 1]
        if c.target.startswith("fcoll::") and c.phase == "fwd":
            assert c.op.partition("_")[0] in line, (c, line)


def table(name: str) -> str:
    """The printed table, with the code in place of line numbers, and single spaces."""
    lines = Path(demos.__file__).read_text().splitlines()
    text = re.sub(
        r"demos\.py:(\d+)",
        lambda found: f"demos.py `{lines[int(found[1]) - 1].strip()}`",
        str(traced(name)),
    )
    return "\n".join(" ".join(line.split()) for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("name", MESHES)
def test_table(name):
    assert table(name) == (GOLDEN / f"trace_{name}.txt").read_text()


def test_in_place_calls_of_torch_distributed():
    with fcoll.fake_world(dp=2):

        def step(x):
            out = x.new_empty(8)
            handle = dist.all_gather_single(out, x, async_op=True)
            y = x * 2
            handle.wait()
            dist.all_reduce(y)
            return out + 1, y

        t = fcoll.trace(step, torch.ones(4))
    assert [c.op for c in t.collectives] == ["all_gather_into_tensor_out", "all_reduce_"]
    names = [n.name for n in t.graph_module.graph.nodes]
    gather = t.collectives[0]
    # it runs while y is computed: the wait comes with the first use
    assert names.index(gather.start) < names.index("mul_tensor") < names.index(gather.wait)
    assert gather.bytes == 32


def test_fsdp2_hooks():
    with fcoll.fake_world(dp=4) as mesh:
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(3)])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        before = [p.to_local().clone() for p in model.parameters()]
        t = fcoll.trace(lambda x: model(x).sum().backward(), torch.ones(2, 16))
        assert all(p.grad is None for p in model.parameters())
        for old, new in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, new.to_local())
    kinds = [(c.op.removesuffix("_out"), c.phase) for c in t.collectives]
    assert kinds.count(("all_gather_into_tensor", "fwd")) == 3
    assert kinds.count(("all_gather_into_tensor", "bwd")) == 3
    assert kinds.count(("reduce_scatter_tensor", "bwd")) == 3
    assert {c.bytes for c in t.collectives} == {16 * 16 * 4}


# -- modes ---


def test_modes_agree():
    """The compiled step has other graphs and other orders, but the same messages."""
    joint, compiled = traced("tiny"), traced("tiny", mode="compiled")
    key = [(c.op, c.axis, c.phase, c.bytes, c.module, c.source) for c in joint.collectives]
    assert sorted(key) == sorted(
        (c.op, c.axis, c.phase, c.bytes, c.module, c.source) for c in compiled.collectives
    )


def test_forward():
    with fcoll.fake_world(tp=2):
        x = torch.ones(2, requires_grad=True)
        found = fcoll.trace(fcoll.all_reduce, x, mode="forward").collectives
        both = fcoll.trace(fcoll.all_reduce, x).collectives
    assert [c.phase for c in found] == ["fwd"] and [c.phase for c in both] == ["fwd", "bwd"]


def test_unknown_mode():
    with pytest.raises(BadOption):
        fcoll.trace(torch.sin, torch.ones(1), mode="eager")


# -- the graph ---


def test_graph_computes_what_the_program_does():
    torch.manual_seed(0)
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4)

    def step(x):
        return (x @ weight).relu().square().sum()

    graph = fcoll.trace(step, x).graph_module
    names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    value, grad = graph(*({"weight": weight.detach(), "arg": x}[name] for name in names))
    loss = step(x)
    loss.backward()
    torch.testing.assert_close(value, loss.detach())
    torch.testing.assert_close(grad, weight.grad)


def test_gradients_are_not_copied():
    """The engine takes a new gradient as it is, though the recorder holds on to it."""
    weight = torch.ones(4, requires_grad=True)
    graph = fcoll.trace(lambda x: (x * weight).sum(), torch.ones(4)).graph_module.graph
    assert not any("copy" in n.name or "empty" in n.name for n in graph.nodes)


def test_phases():
    phases = {c.phase for c in traced("tiny").collectives}
    assert phases == {"fwd", "bwd"}
    with fcoll.fake_world(dp=2) as mesh:
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x):
            (x * weight).sum().backward()
            weight.grad = fcoll.all_reduce(weight.grad, "avg", mesh)
            optimizer.step()
            return fcoll.broadcast(weight.detach(), 0, mesh)

        found = fcoll.trace(step, torch.ones(4)).collectives
    assert [c.phase for c in found] == ["bwd", "opt"]


# -- no marks left ---


def test_parameters_gradients_and_optimizer_stay():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.full((4,), 2.0)
    optimizer.step()
    state = {k: v.clone() for k, v in optimizer.state[weight].items()}
    value = weight.detach().clone()

    def step(x):
        optimizer.zero_grad()
        (x * weight).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5

    fcoll.trace(step, torch.ones(4))
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert torch.equal(weight, value) and weight.grad.tolist() == [2.0] * 4
    assert type(weight) is torch.nn.Parameter
    for key, old in state.items():
        assert torch.equal(optimizer.state[weight][key], old)


def test_meta_model_stays_on_meta():
    with torch.device("meta"):
        model = torch.nn.Linear(8, 8)
        x = torch.empty(2, 8)
    weight = model.weight
    t = fcoll.trace(model, x)
    assert model.weight is weight and weight.is_meta and weight.grad is None
    assert all(not n.meta["val"].is_meta for n in t.graph_module.graph.nodes if n.op != "output")


def test_after_an_error_all_is_as_before():
    with torch.device("meta"):
        model = torch.nn.Linear(8, 8)

    def step(x):
        raise KeyError(model(x))

    with pytest.raises(KeyError):
        fcoll.trace(step, torch.empty(2, 8, device="meta"))
    assert model.weight.is_meta
    assert torch.ones(2).add(1).tolist() == [2.0, 2.0]  # no mode is left


def test_large_models_take_no_memory():
    """A layer of 70B's size is 3.5 GB; the trace keeps its shapes only."""
    with fcoll.fake_world(dp=8, tp=8) as mesh:
        step, args = demos.llama(mesh, replace(demos.LLAMA3_70B, layers=2))
        t = fcoll.trace(step, *args)
    assert max(c.bytes for c in t.collectives) > 100_000_000
    gc.collect()


# -- JSON and diff ---


def test_json_round_trip():
    t = traced("tiny")
    again = fcoll.Trace.from_json(t.to_json())
    assert again.collectives == t.collectives and again.steps == t.steps
    assert (again.rank, again.mesh) == (t.rank, t.mesh)
    assert again.graph_module is None and str(again) == str(t)
    assert again.to_json() == t.to_json()


def test_diff():
    a, b = traced("tiny"), traced("tiny-sp")
    assert a.diff(a).same and "same collectives" in str(a.diff(a))
    found = a.diff(b)
    assert not found.same
    assert {c.op for c in found.removed} == {"all_reduce"}
    assert "+" in str(found) and "reduce_scatter_tensor" in str(found)
    back = b.diff(a)
    assert (back.removed, back.added) == (found.added, found.removed)
    turned = fcoll.Trace(None, a.collectives[::-1], a.rank, a.mesh)
    assert str(a.diff(turned)) == "the same collectives in another order"


def test_a_collective_that_is_not_known_is_said_not_to_be():
    def step(x):
        dist.recv(x)  # from anybody: which message that is shows only when it runs
        return x

    with fcoll.fake_world(dp=2), pytest.raises(UnknownCollective, match="cannot be traced"):
        fcoll.trace(step, torch.empty(4, device="meta"), mode="forward")


@pytest.mark.parametrize("name", MESHES)
def test_a_trace_from_json_is_equal(name):
    t = traced(name)
    assert fcoll.Trace.from_json(t.to_json()) == t
    assert t != traced(name, rank=1)


def test_symbolic_sizes_are_equal_after_json():
    def masked(x):
        return fcoll.all_gather_into_tensor(x[x[:, 0] > 0] * 2, mesh)

    with fcoll.fake_world(tp=2) as mesh:
        t = fcoll.trace(masked, torch.ones(12, 8))
        assert t.collectives[0].bytes.free_symbols and t.sizes == {"u0": 12}
        again = fcoll.Trace.from_json(t.to_json())
    assert again == t
    assert again.collectives[0].bytes == t.collectives[0].bytes


def test_torchs_own_functions_of_sizes_come_back_from_text():
    graph = make_fx(lambda x: x.view(-1, 2)[::3].flatten(), tracing_mode="symbolic")(torch.ones(12))
    found = [size for n in graph.graph.nodes for size in getattr(n.meta.get("val"), "shape", ())]
    exprs = [_torch.size_expr(size) for size in found if isinstance(size, torch.SymInt)]
    assert any("//" in str(e) for e in exprs)
    for e in exprs:
        assert from_text(to_text(e)) == e and e.free_symbols


def test_torch_logs_show_traces(monkeypatch, capsys):
    """TORCH_LOGS="+fcoll", which torch reads when it is imported."""
    from torch._logging import _internal

    try:
        with monkeypatch.context() as here:
            here.setenv("TORCH_LOGS", "+fcoll")
            _internal._init_logs()
        with fcoll.fake_world(tp=4) as mesh:
            fcoll.trace(lambda x: fcoll.all_reduce(x, "sum", mesh), torch.ones(8))
    finally:
        _internal.log_state.clear()
        _internal._init_logs()
    assert "1  all_reduce  tp" in capsys.readouterr().err
