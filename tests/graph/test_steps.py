"""Steps of graphs against what torch counts and what really happens in memory."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import fcoll
from fcoll.graph.steps import Step, input_bytes, sizes_of, steps_of
from fcoll.scheduling.timeline import timeline


def traced(fn, *args, mode="forward", **axes) -> fcoll.Trace:
    with fcoll.fake_world(**(axes or {"tp": 4})) as mesh:
        return fcoll.trace(lambda *xs: fn(mesh, *xs), *args, mode=mode)


def steps(fn, *args, **axes) -> list[Step]:
    return list(traced(lambda mesh, *xs: fn(*xs), *args, **axes).steps)


def by_op(found) -> dict[str, Step]:
    return {s.op.removeprefix("aten::"): s for s in found}


X = torch.ones(256, 256)
SIZE = X.nbytes


# -- flops ---


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return self.down(F.gelu(self.up(x))).sum()


def test_flops_are_those_that_torch_counts():
    net, x = Net(), torch.ones(2, 3, 10, 10)
    with FlopCounterMode(display=False) as counted:
        net(x).backward()
    net.zero_grad()
    found = traced(lambda mesh, x: net(x), x, mode="joint").steps
    # torch has no formula for the CPU form of attention: there it counts its parts, or nothing.
    others = [s for s in found if "attention" not in s.op]
    parts = {
        k: v for k, v in counted.get_flop_counts()["Global"].items() if "attention" not in f"{k}"
    }
    assert sum(s.flops for s in others) == sum(parts.values()) > 0
    attention = [s.flops for s in found if "attention" in s.op]
    if attention:  # two products of (64, 8) and (8, 64) for 2 heads; backward has five
        assert attention[0] == 2 * 2 * 2 * 64 * 64 * 8
        assert attention[1] == attention[0] * 5 // 2


# -- bytes and fusion ---


def test_a_chain_reads_its_input_and_writes_its_result_once():
    found = steps(lambda x: ((x + 1).relu() * 2).exp(), X)
    assert len(found) == 4
    assert {s.fused_with for s in found} == {found[0].name}
    assert sum(s.read_bytes for s in found) == sum(s.write_bytes for s in found) == SIZE
    assert sum(s.out_bytes for s in found) == SIZE


def test_a_norm_is_one_kernel():
    found = steps(lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5), X)
    assert len({s.fused_with for s in found}) == 1
    assert sum(s.read_bytes for s in found) == sum(s.write_bytes for s in found) == SIZE


def test_a_product_ends_a_kernel():
    found = steps(lambda x: ((x + 1) @ x).relu(), X)
    add, mm, relu = found
    assert (add.read_bytes, add.write_bytes, add.out_bytes) == (SIZE, SIZE, SIZE)
    assert (mm.read_bytes, mm.write_bytes, mm.fused_with) == (2 * SIZE, SIZE, None)
    assert relu.fused_with == relu.name and relu.read_bytes == SIZE


def test_a_result_that_is_used_outside_is_written_and_not_read_back():
    found = steps(lambda x: ((y := x + 1), (y * 2) @ x), X)
    add, mul, _ = found
    assert add.fused_with == mul.fused_with == add.name
    assert (add.write_bytes, mul.read_bytes, mul.write_bytes) == (SIZE, 0, SIZE)


def test_what_a_product_used_is_not_joined_later():
    """Else the product would need a kernel that needs the product."""
    found = steps(lambda x: ((y := x + 1), y * (y @ x)), X)
    add, _, mul = found
    assert add.fused_with == add.name and mul.fused_with == mul.name
    assert mul.read_bytes == 2 * SIZE


def test_loops_of_other_lengths_are_other_kernels():
    found = steps(lambda x: torch.cat([(x + 1).flatten(), torch.ones(7)]).sin(), X)
    assert by_op(found)["add"].fused_with != by_op(found)["sin"].fused_with


def test_an_embedding_reads_the_rows_it_takes():
    table = torch.ones(10_000, 16)
    (found,) = steps(lambda t: F.embedding(torch.arange(4), t), table)[-1:]
    assert found.write_bytes == 4 * 16 * 4
    assert found.read_bytes < 1000


def test_halves_of_a_tensor_are_read_as_the_whole():
    found = steps(lambda x: torch.sin(x[:128]) * torch.cos(x[128:]), X)
    assert sum(s.read_bytes for s in found) == SIZE


def test_a_value_for_a_whole_row_counts_once():
    row = torch.ones(256)
    (found,) = steps(lambda r: r.expand(256, 256).sin(), row)
    assert (found.read_bytes, found.write_bytes) == (row.nbytes, SIZE)


def test_allocating_takes_no_time_and_filling_in_place_is_one_write():
    found = steps(lambda x: torch.empty_like(x).fill_(3).add_(x), X)
    assert sum(s.write_bytes for s in found) == sum(s.read_bytes for s in found) == SIZE
    line = timeline((tuple(steps(lambda x: torch.empty_like(x), X)), ()), "h100")
    assert line.step_us == 0 and line.peak_bytes == SIZE


def test_optimizers_on_lists_are_loops():
    ps = [torch.ones(64, 64), torch.ones(64, 64)]
    found = steps(lambda *p: torch._foreach_add(torch._foreach_mul(list(p), 2.0), 1.0), *ps)
    assert len(found) == 2 and {s.fused_with for s in found} == {found[0].name}
    assert sum(s.read_bytes for s in found) == sum(s.write_bytes for s in found) == 2 * 64 * 64 * 4


# -- dependencies ---


def test_dependencies_pass_through_views():
    found = steps(lambda x: (x + 1).view(-1)[:10].view(2, 5).sum(), X)
    add, total = found
    assert total.inputs == (add.name,)


def test_a_write_comes_after_the_reads_of_the_old_value():
    def program(x):
        y = x @ x
        z = y @ x
        y.add_(1)
        return y @ z

    first, read, write, last = steps(program, X)
    assert set(write.inputs) == {first.name, read.name}
    assert set(last.inputs) == {write.name, read.name}


def test_starts_and_waits():
    def program(mesh, x):
        y = fcoll.all_reduce(x @ x, "sum", mesh)
        z = x @ x
        return y @ z

    trace = traced(program, X)
    mm, start, wait, other, last = trace.steps
    assert [s.kind for s in trace.steps] == ["compute", "start", "wait", "compute", "compute"]
    assert (start.stream, start.inputs, start.collective) == ("tp", (mm.name,), 0)
    assert (wait.inputs, wait.collective, wait.out_bytes) == ((start.name,), 0, 0)
    assert set(last.inputs) == {wait.name, other.name}
    assert start.last_use_of == () and start.out_bytes == SIZE
    assert wait.last_use_of == (mm.name,), "what is sent must stay until it has arrived"
    assert (start.name, wait.name) == (trace.collectives[0].start, trace.collectives[0].wait)


def test_a_list_has_one_start_and_a_wait_for_each():
    def program(mesh, x):
        return [y @ x for y in fcoll.all_reduce_coalesced([x @ x, x @ x], "sum", mesh)]

    found = traced(program, X).steps
    waits = [s for s in found if s.kind == "wait"]
    assert [s.kind for s in found].count("start") == 1 and len(waits) == 2
    assert {s.collective for s in waits} == {0}


def test_a_stream_for_each_group():
    def program(mesh, x):
        return fcoll.all_reduce(fcoll.all_reduce(x, "sum", mesh["tp"]), "sum", mesh["dp"])

    found = traced(program, X, dp=2, tp=4).steps
    assert [s.stream for s in found if s.kind == "start"] == ["tp", "dp"]


# -- memory ---


def test_memory_is_freed_after_the_last_use_of_any_view():
    def program(x):
        y = x @ x
        view = y.t()[:4]
        z = x @ x
        return view @ z, x @ x

    first, second, product, third = steps(program, X)
    assert set(product.last_use_of) == {first.name, second.name}
    assert third.last_use_of == ()


class Storages(torch.fx.Interpreter):
    """Runs a graph on real tensors and writes down which storages each node takes and gives."""

    def run_node(self, n):
        out = super().run_node(n)
        found = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.held.extend(found)  # so that no address is given twice
        self.of[n] = {x.untyped_storage().data_ptr() for x in found}
        return out


def test_lifetimes_are_those_of_real_storages():
    def program(x, w):
        a, b = (x @ w).split(128)
        c = (a @ w).t()
        d = torch.empty(256, 256)
        d[:128].copy_(c.t())
        d[128:].copy_(b)
        e = d.view(-1).view(256, 256) @ w
        x.mul_(2)
        return e.sum() + (x @ w).max(), c[0]

    graph = make_fx(program)(X.clone(), X.clone())
    found = {s.name: s for s in steps_of(graph, ())}
    run = Storages(graph)
    run.of, run.held = {}, []
    run.run(X.clone(), X.clone())
    users: dict[int, list[str]] = {}
    makers: dict[int, str] = {}
    for node, storages in run.of.items():
        for storage in storages:
            makers.setdefault(storage, node.name)
        for used in {s for i in node.all_input_nodes for s in run.of[i]}:
            if node.name in found or node.op == "output":
                users.setdefault(used, []).append(node.name)
    freed = {name: s.name for s in found.values() for name in s.last_use_of}
    for storage, maker in makers.items():
        if maker in found:
            last = users.get(storage, [maker])[-1]
            assert freed.get(maker) == (None if last == "output" else last), maker


def test_inputs_are_held_all_along():
    trace = traced(lambda mesh, x, y: (x @ y).sum(), X, X.double().float())
    assert trace.input_bytes == input_bytes(trace.graph_module) == 2 * SIZE
    line = timeline(trace, "h100")
    assert line.memory[0][1] >= 2 * SIZE and line.peak_bytes == 3 * SIZE + 4


def test_steps_survive_json():
    def program(mesh, x):
        return fcoll.all_reduce(x @ x, "sum", mesh).relu()

    trace = traced(program, X)
    again = fcoll.Trace.from_json(trace.to_json())
    assert again.steps == trace.steps and again.input_bytes == trace.input_bytes
    assert timeline(again, "h100").spans == timeline(trace, "h100").spans


# -- symbolic shapes ---


def test_symbolic_shapes_stay_symbolic():
    graph = make_fx(lambda x, w: torch.relu(x @ w).sin(), tracing_mode="symbolic")(
        torch.ones(12, 64), torch.ones(64, 32)
    )
    found = steps_of(graph, ())
    mm = by_op(found)["mm"]
    batch, sizes = next(iter(mm.flops.free_symbols & mm.write_bytes.free_symbols)), sizes_of(graph)
    assert set(sizes.values()) == {12, 64, 32}
    known = {s: sizes[str(s)] for s in mm.flops.free_symbols}
    assert mm.flops.subs(known) == 2 * 12 * 64 * 32
    assert isinstance(sympy.diff(mm.flops, batch), sympy.Basic)
    line = timeline((found, ()), "h100", sizes=sizes)
    larger = timeline((found, ()), "h100", sizes={k: 1000 * v for k, v in sizes.items()})
    assert larger.step_us > line.step_us
    with pytest.raises(fcoll.errors.MissingSize):
        timeline((found, ()), "h100")


def chosen(mesh):
    """Sizes that depend on the data: of a mask, and of splits that are read from a tensor."""

    def masked(x, counts):
        return fcoll.all_gather_into_tensor(x[x[:, 0] > 0] * 2, mesh) @ x.new_ones(8, 8)

    def split(x, counts):
        splits = counts.tolist()
        return fcoll.all_to_all_single(x, mesh, splits, [4] * 4) * 2

    return masked, split


def test_sizes_that_only_a_run_knows_are_as_large_as_they_can_be():
    with fcoll.fake_world(ep=4) as mesh:
        masked, _ = chosen(mesh)
        trace = fcoll.trace(masked, torch.ones(16, 8, requires_grad=True), torch.ones(4))
        (gather, _) = trace.collectives
        (symbol,) = gather.bytes.free_symbols
        assert gather.bytes == 4 * 16 * 8 * symbol / 4  # what comes out: 4 ranks' parts
        assert trace.sizes == {str(symbol): 16}
        product = next(s for s in trace.steps if s.op == "aten::mm" and s.phase == "fwd")
        assert product.flops.subs({symbol: 16}) == 2 * 64 * 8 * 8
        assert product.out_bytes == 64 * 8 * 4
        half = timeline(trace, "h100", sizes={str(symbol): 8})
        assert half.step_us < timeline(trace, "h100").step_us
        assert half.peak_bytes < timeline(trace, "h100").peak_bytes


def test_splits_that_are_read_are_taken_to_be_even():
    with fcoll.fake_world(ep=4) as mesh:
        _, split = chosen(mesh)
        counts = torch.empty(4, dtype=torch.long, device="meta")
        trace = fcoll.trace(split, torch.ones(16, 8), counts)
        assert trace.sizes == {f"u{i}": 4 for i in range(4)}
        even = timeline(trace, "h100").step_us
        assert timeline(trace, "h100", sizes={"u0": 10**6}).step_us > even
        assert next(s for s in trace.steps if s.op == "aten::mul").out_bytes == 16 * 8 * 4


def test_parts_that_are_read_are_taken_to_be_as_large_as_this_ranks():
    def uneven(x):
        rows = x[x[:, 0] > 0]
        sizes = fcoll.all_gather_into_tensor(torch.tensor([rows.shape[0]]), mesh).tolist()
        return fcoll.all_gather_into_tensor(rows, mesh, sizes=sizes) * 2

    with fcoll.fake_world(dp=3) as mesh:
        trace = fcoll.trace(uneven, torch.ones(8, 4))
        assert trace.sizes == {f"u{i}": 8 for i in range(4)}
        assert next(s for s in trace.steps if s.op == "aten::mul").out_bytes == 3 * 8 * 4 * 4


def test_sizes_without_a_bound_must_be_given():
    def repeated(x, count):
        return fcoll.all_reduce(x.expand(count.item(), 8) * 2, "sum", mesh) * 2

    with fcoll.fake_world(ep=4) as mesh:
        count = torch.empty((), dtype=torch.long, device="meta")
        trace = fcoll.trace(repeated, torch.ones(1, 8), count)
        with pytest.raises(fcoll.errors.MissingSize, match=r"u0.*sizes="):
            _ = trace.steps
        with pytest.raises(fcoll.errors.MissingSize):
            timeline(trace, "h100")
        assert timeline(trace, "h100", sizes={"u0": 16}).step_us > 0
        trace.sizes["u0"] = 16
        assert next(s for s in trace.steps if s.op == "aten::mul").out_bytes == 16 * 8 * 4
