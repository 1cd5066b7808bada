"""torch.compile traces every function whole, with a wait after each collective."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import Call, examples, ring
from functorch.compile import (
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fcoll
from fcoll import functions
from fcoll.table.collectives import row_of

Tensor = torch.Tensor

FUNCTIONS = [
    name
    for name, f in vars(functions).items()
    if inspect.isfunction(f) and f.__module__ == functions.__name__ and not name.startswith("_")
]


@dataclass
class Capture:
    """A backend that runs what it is given, as aot_eager does, and keeps the graphs."""

    partition: Callable = min_cut_rematerialization_partition
    dynamo: list[torch.fx.GraphModule] = field(default_factory=list)
    forward: list[torch.fx.GraphModule] = field(default_factory=list)
    backward: list[torch.fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        self.dynamo.append(gm)
        return aot_autograd(
            fw_compiler=_keep_in(self.forward),
            bw_compiler=_keep_in(self.backward),
            partition_fn=self.partition,
        )(gm, inputs)


def _keep_in(graphs: list[torch.fx.GraphModule]) -> Callable:
    def compile(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    return compile


def collectives(gm: torch.fx.GraphModule) -> list[tuple[str, bool]]:
    """(name, is its result waited for before any use) of each collective of the graph, in order."""
    rows = [(node, row_of(node.target)) for node in gm.graph.nodes if node.op == "call_function"]
    return [(row.name, waited_for(node)) for node, row in rows if row and row.name != "wait_tensor"]


def waited_for(node: torch.fx.Node) -> bool:
    parts = [user for user in node.users if user.target is operator.getitem]
    if parts:
        return all(map(waited_for, parts))
    # AOTAutograd may save the result as it is; the backward waits for what it was given
    keeps = ("output", torch.ops.aten.detach.default)
    users = [user for user in node.users if user.op not in keeps and user.target not in keeps]
    rows = [row_of(user.target) for user in users]
    return bool(rows) and all(row is not None and row.name == "wait_tensor" for row in rows)


def compiled_and_eager(rank: int, name: str, dynamic: bool, partition: Callable) -> dict[str, Any]:
    """All examples of a function in one graph: results and gradients, compiled and not."""
    torch._dynamo.reset()
    calls = traced_examples(name)
    n = dist.get_world_size()
    counts = [len(call.inputs(rank, n)) for call in calls]

    def f(xs: list[Tensor]) -> list[Tensor]:
        ys = []
        for call, count in zip(calls, counts, strict=True):
            mine, xs = xs[:count], xs[count:]
            ys += [y * 3 for y in call([x * 2 for x in mine], rank, n)]
        return ys

    def results(f: Callable, scale: float) -> list[Tensor]:
        xs = [x * scale for call in calls for x in call.inputs(rank, n)]
        xs = [x.requires_grad_(differentiable) for x in xs]
        ys = f(xs)
        if differentiable:
            sum((y * y.conj()).real.sum() for y in ys).backward()
        return [y.detach() for y in ys] + [x.grad for x in xs]

    differentiable = name not in ("isend", "irecv", "batch_p2p")
    capture = Capture(partition)
    compiled = torch.compile(f, backend=capture, fullgraph=True, dynamic=dynamic)
    values = [(results(compiled, 1.0), results(f, 1.0))]
    times_compiled = len(capture.forward)
    values += [(results(compiled, 0.5), results(f, 0.5))]
    return {
        "values": values,
        "recompiled": len(capture.forward) - times_compiled,
        "dynamo": collectives(capture.dynamo[-1]),
        "forward": collectives(capture.forward[-1]),
        "backward": [c for gm in capture.backward for c in collectives(gm)],
    }


def traced_examples(name: str) -> list[Call]:
    # sub-groups of two ranks have one rank each, and nothing to wait for
    return [call for call in examples(name) if call.label != "sub"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example(name):
    assert traced_examples(name)


# Dynamo makes an instance of torch.autograd.Function, which warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("dynamic", "partition"),
    [
        pytest.param(False, default_partition, id="static"),
        pytest.param(True, min_cut_rematerialization_partition, id="dynamic"),  # as aot_eager
    ],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_traces_whole_with_waits_and_the_values_of_eager(ranks2, name, dynamic, partition):
    for got in ranks2.run(compiled_and_eager, name, dynamic, partition):
        for compiled, eager in got["values"]:
            torch.testing.assert_close(compiled, eager)
        assert got["recompiled"] == 0  # for other values
        for graph in ("dynamo", "forward", "backward"):
            assert [c for c in got[graph] if not c[1]] == []
        if name not in ("identity", "wait_tensor"):
            assert len(got["dynamo"]) >= len(traced_examples(name))
            assert name in {c[0] for c in got["dynamo"]} | {"batch_p2p"}


# -- collectives are neither repeated nor left behind by AOTAutograd ---


def used_twice(x: Tensor) -> Tensor:
    h = (x * 2).sin()  # saved for the backward, which so could run the all_reduce again
    fcoll.barrier()
    return fcoll.all_reduce(h, "product") + h.sin() + sum(fcoll.all_reduce_coalesced([h, h]))


def partitioned(rank: int, partition: Callable) -> tuple[list[str], int]:
    torch._dynamo.reset()
    capture = Capture(partition)
    x = torch.ones(2, requires_grad=True)
    torch.compile(used_twice, backend=capture, fullgraph=True)(x).sum().backward()
    graphs = [*capture.forward, *capture.backward]
    return sorted(name for gm in graphs for name, _ in collectives(gm)), len(graphs)


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_aot_runs_each_collective_once(ranks2, partition):
    once = ["all_gather_into_tensor", "all_reduce", "all_reduce", "all_reduce_coalesced"]
    for got in ranks2.run(partitioned, partition):
        assert got == ([*once, "all_reduce_coalesced", "barrier"], 2)


# -- groups and reduce ops, as a user writes them ---


def every_kind_of_group(rank: int) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    made, world = dist.new_group([0, 1]), dist.group.WORLD
    # in descending order, which tells them from the world
    groups = [None, world, made, mesh, mesh["tp"], (square, "dp"), (square, 0), world.group_name]
    groups += [[1, 0], (1, 0), [[1, 0]]]
    results = []
    for group in groups:
        torch._dynamo.reset()

        def of_closure(x: Tensor, group: Any = group) -> Tensor:
            return fcoll.all_gather_into_tensor(x, group)

        def of_argument(x: Tensor, group: Any) -> Tensor:
            return fcoll.all_gather_into_tensor(x, group)

        x = torch.tensor([float(rank)])
        eager = of_closure(x).tolist()
        for f, args in ((of_closure, ()), (of_argument, (group,))):
            got = torch.compile(f, backend="eager", fullgraph=True)(x, *args).tolist()
            assert got == eager, (group, got)
        results.append(eager)
    return results


def test_every_kind_of_group(ranks2):
    for results in ranks2.run(every_kind_of_group):
        assert results == [[0, 1]] * 8 + [[1, 0]] * 3


def every_kind_of_reduce_op(rank: int) -> list[list[float]]:
    torch._dynamo.reset()
    premul = dist._make_nccl_premul_sum(0.5)

    def f(x: Tensor, factor: float) -> list[Tensor]:
        return [
            fcoll.all_reduce(x, dist.ReduceOp.SUM),
            fcoll.all_reduce(x, dist.ReduceOp.AVG),
            fcoll.all_reduce(x, op=dist.ReduceOp.MAX),
            fcoll.all_reduce(x, "MIN"),
            fcoll.all_reduce(x, premul),
            fcoll.all_reduce(x, "premul_sum", factor=0.25),
            fcoll.all_reduce(x, "premul_sum", factor=factor),
            *fcoll.all_reduce_coalesced([x], dist.ReduceOp.PRODUCT),
        ]

    x = torch.tensor([rank + 1.0])
    values = []
    for dynamic in (False, True):
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for factor in (2.0, 3.0):  # the second makes Dynamo treat it as dynamic
            got = [y.item() for y in compiled(x, factor)]
            assert got == [y.item() for y in f(x, factor)]
            values.append(got)
    return values


def test_every_kind_of_reduce_op(ranks2):
    for results in ranks2.run(every_kind_of_reduce_op):
        two = [3, 1.5, 2, 1, 1.5, 0.75, 6, 2]
        assert results == [two, [*two[:6], 9, 2]] * 2


# -- dynamic shapes ---


def several_sizes(rank: int) -> int:
    torch._dynamo.reset()
    n = dist.get_world_size()

    def f(x: Tensor, output_splits: list[int], input_splits: list[int]) -> list[Tensor]:
        return [
            fcoll.all_reduce(x),
            fcoll.all_gather_into_tensor(x),
            fcoll.all_gather_into_tensor(x, dim=1),
            fcoll.reduce_scatter_tensor(x),
            fcoll.reduce_scatter_tensor(x, dim=1),
            fcoll.all_to_all_single(x),
            fcoll.all_to_all_single(x, None, output_splits, input_splits),
            fcoll.shard_dim_alltoall(x, 0, 1),
            fcoll.broadcast(x, 0),
            fcoll.reduce(x, 0),
            fcoll.gather(x, 0),
            fcoll.scatter(x, 0),
            fcoll.permute(x, ring(n)),
            fcoll.batch_p2p([("isend", x.detach(), 1 - rank), ("irecv", x.detach(), 1 - rank)])[1],
            *fcoll.all_reduce_coalesced([x, x]),
            *fcoll.all_gather_into_tensor_coalesced([x, x], dim=[0, 1]),
            *fcoll.reduce_scatter_tensor_coalesced([x, x], dim=[0, 1]),
        ]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    for k in (3, 4, 7):
        x = torch.arange(2.0 * k * 4 * k).reshape(2 * k, 4 * k) + rank
        splits = [[k - 1, k - 1], [k + 1, k + 1]][rank], [k - 1, k + 1]
        x.requires_grad_()
        got, want = compiled(x, *splits), f(x, *splits)
        torch.testing.assert_close([y.detach() for y in got], [y + 0 for y in want])
        sum(y.sum() for y in got).backward()
    return counter.frame_count


def test_other_sizes_do_not_recompile(ranks2):
    assert ranks2.run(several_sizes) == [1, 1]


def splits_from_data(rank: int) -> int:
    """A mixture of experts: how many rows go where is known only at run time."""
    torch._dynamo.reset()

    def exchange(x: Tensor, counts: Tensor) -> Tensor:
        received = fcoll.all_to_all_single(counts)
        y = fcoll.all_to_all_single(x, None, received.tolist(), counts.tolist())
        return fcoll.all_to_all_single(y * 2, None, counts.tolist(), received.tolist())

    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(exchange, backend=counter, fullgraph=True)
        for sent in ([[2, 1], [0, 3]], [[0, 2], [4, 1]], [[3, 3], [1, 1]]):
            counts = torch.tensor(sent[rank])
            x = torch.arange(3.0 * sum(sent[rank])).reshape(-1, 3).requires_grad_()
            y = compiled(x, counts)
            torch.testing.assert_close(y, x * 2)
            y.sum().backward()
            assert x.grad.eq(2).all()
    return counter.frame_count


def test_splits_that_are_data(ranks2):
    # once more when Dynamo sees that x's rows vary too
    assert ranks2.run(splits_from_data) == [2, 2]


# -- make_fx and checkpoint ---


def traced_by_make_fx(rank: int, mode: str) -> list[str]:
    def f(x: Tensor) -> list[Tensor]:
        y = fcoll.all_reduce(x)
        token, received = fcoll.isend(x, 1 - rank), fcoll.irecv(x, 1 - rank)
        fcoll.wait_tensor(token)
        return [y.t() * 2, received, *fcoll.all_gather_into_tensor_coalesced([x, y])]

    x = torch.arange(6.0).reshape(2, 3) + rank
    gm = make_fx(f, tracing_mode=mode)(x)
    names = [name for name, waited in collectives(gm) if waited]
    torch.testing.assert_close(gm(x + 1), [y + 0 for y in f(x + 1)])
    return names


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(ranks2, mode):
    want = ["all_reduce", "isend", "irecv", "all_gather_into_tensor_coalesced"]
    assert ranks2.run(traced_by_make_fx, mode) == [want] * 2


def gradients_with_checkpoint(rank: int) -> dict[str, tuple[list[float], int]]:
    torch._dynamo.reset()

    def block(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x.sin()).cos()

    def loss(x: Tensor, checkpointed: bool) -> Tensor:
        y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return (y * (rank + 1)).sum()

    results = {}
    for name, checkpointed, backend in (
        ("eager", False, None),
        ("eager, checkpoint", True, None),
        ("compiled", False, Capture()),
        ("compiled, checkpoint", True, Capture()),
    ):
        x = torch.tensor([0.5, rank + 1.0], requires_grad=True)
        f = torch.compile(loss, backend=backend, fullgraph=True) if backend else loss
        f(x, checkpointed).backward()
        backward = backend.backward if backend else []
        count = sum(len(collectives(gm)) for gm in backward)
        results[name] = [round(g, 5) for g in x.grad.tolist()], count
    return results


def test_checkpoint_recomputes_the_collective_and_keeps_the_gradient(ranks2):
    for results in ranks2.run(gradients_with_checkpoint):
        assert len({str(grad) for grad, _ in results.values()}) == 1
        assert results["compiled"][1] == 1  # that of the gradient
        assert results["compiled, checkpoint"][1] == 2


# -- Inductor ---


def by_inductor(rank: int) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Forward and backward of one graph; its generated code, and both results and gradients."""
    torch._dynamo.reset()
    world = dist.group.WORLD.group_name

    def f(x: Tensor) -> Tensor:
        h = x.sin()
        gathering = torch.ops.fcoll.all_gather_into_tensor(h, 2, world)
        z = x @ x  # could be written where h was, which is being sent
        y = fcoll.wait_tensor(gathering)
        part = fcoll.reduce_scatter_tensor(y.cos(), dim=0)
        parts = fcoll.all_reduce_coalesced([part * z, z], "avg")
        return fcoll.all_to_all_single(parts[0] + parts[1]) + fcoll.permute(z, [1, 0]).sum()

    def results(f: Callable) -> list[Tensor]:
        x = torch.arange(64.0 * 64, dtype=torch.float64).reshape(64, 64) / 4096 + rank
        x.requires_grad_()
        y = f(x)
        (y * y).mean().backward()
        return [y.detach(), x.grad]

    compiled = torch.compile(f, fullgraph=True)
    # the keys of torch's caches do not cover fcoll's lowerings
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        got, codes = run_and_get_code(results, compiled)
    again = results(compiled)
    torch.testing.assert_close(again, got)
    return codes, got, results(f)


@pytest.mark.slow
def test_inductor(ranks2):
    for codes, got, want in ranks2.run(by_inductor, timeout=150):
        torch.testing.assert_close(got, want)
        forward, backward = codes
        for name in (
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_reduce_coalesced",
            "all_to_all_single",
            "permute",
        ):
            assert f"torch.ops.fcoll.{name}.default(" in forward
        assert backward.count("torch.ops.fcoll.") >= 5
        # the input is not given up before the wait
        sent = re.search(r"(\w+) = torch.ops.fcoll.all_gather_into_tensor.default\((\w+),", forward)
        out, h = sent.groups()
        waited = forward.index(f"wait_tensor.default({out})")
        product = forward.index("extern_kernels.mm(")
        assert sent.start() < product < waited < re.search(rf"\bdel {h}\b", forward).start()


# -- guards ---


def test_no_guard_is_on_a_global_of_fcolls(solo):
    """Each would be looked at in every call of a compiled function. The modules themselves are."""
    guarded: list[str] = []

    def keep_all(guards: Any) -> list[bool]:
        guarded.extend(guard.name for guard in guards)
        return [True] * len(guards)

    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x) + 1

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="inductor", options={"guard_filter_fn": keep_all})
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert any("x" in name for name in guarded)
    assert not [name for name in guarded if re.search(r"import_fcoll\w*'\]\.", name)]
