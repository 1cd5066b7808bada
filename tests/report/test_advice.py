"""Advice: each claim is checked against the program with the change made by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fcoll
from fcoll.costs.machine import Link, Machine
from fcoll.costs.model import collective_us
from fcoll.report.advice import Advice, _program, advice
from fcoll.scheduling import step_changes, verify_order
from fcoll.scheduling.timeline import timeline

MACHINE = Machine(
    "small",
    {"float32": 60.0},
    3000.0,
    Link(2.0, 300.0),
    Link(6.0, 40.0),
    launch_us=0.5,
    collective_us=20.0,
)
LAYERS, WIDTH = 4, 512


def step_us(fn, *args, waits="first use", **axes):
    with fcoll.fake_world(**axes) as mesh:
        return timeline(fcoll.trace(fn(mesh), *args), MACHINE, waits=waits).step_us


def told(fn, *args, kind, waits="first use", **axes) -> Advice:
    """The one piece of advice of a kind on a program, with its sums checked."""
    with fcoll.fake_world(**axes) as mesh:
        trace = fcoll.trace(fn(mesh), *args)
        before = timeline(trace, MACHINE, waits=waits).step_us
        found = advice(trace, MACHINE, waits=waits)
    assert [a.saved_us for a in found] == sorted((a.saved_us for a in found), reverse=True)
    for one in found:
        assert one.saved_us > 0
        assert one.step_us == pytest.approx(before - one.saved_us)
        assert one.share == pytest.approx(one.saved_us / before)
    (one,) = [a for a in found if a.kind == kind]
    return one


# -- prefetch ---


def gathers(mesh, early=()):
    """A product a layer, with a gathered weight; ``early`` layers are gathered first of all."""

    def step(x, parts):
        ready = {i: fcoll.all_gather_into_tensor(parts[i], mesh) for i in early}
        for i, part in enumerate(parts):
            x = torch.relu(x @ x.T @ x)
            w = ready[i] if i in ready else fcoll.all_gather_into_tensor(part, mesh)
            x = x @ w.view(WIDTH, -1)
        return x

    return step


def parts(n=8):
    return [torch.ones(WIDTH * WIDTH // n) for _ in range(LAYERS)]


def test_prefetch_saves_what_it_saves_by_hand():
    args = torch.ones(2048, WIDTH), parts()
    one = told(gathers, *args, kind="prefetch", dp=8)
    by_hand = step_us(lambda mesh: gathers(mesh, range(LAYERS)), *args, dp=8)
    assert one.step_us == pytest.approx(by_hand, rel=0.01)
    assert one.source.rpartition(":")[0].endswith("test_advice.py")
    assert one.count == LAYERS and "prefetch" in str(one) and one.source in str(one)


def test_prefetch_moves_no_start_past_what_it_needs():
    with fcoll.fake_world(dp=8) as mesh:
        trace = fcoll.trace(gathers(mesh), torch.ones(2048, WIDTH), parts())
        program = _program(trace, MACHINE, None, "first use")
    for just_in_time in (True, False):
        made = step_changes.prefetched(program, program.collectives, just_in_time)
        assert made is not None and made.steps != program.steps
        verify_order.check_steps(program.steps, made.steps, pytest.fail)


def test_no_advice_to_start_what_is_not_there_yet():
    def chained(mesh):
        def step(x):
            for _ in range(4):
                x = fcoll.all_reduce(x @ x, "sum", mesh)
            return x + 1

        return step

    with fcoll.fake_world(tp=4) as mesh:
        found = advice(fcoll.trace(chained(mesh), torch.ones(64, 64)), MACHINE)
    assert [a.kind for a in found] == []


# -- buckets ---


def gradients(mesh, merged=False):
    """A sum of each small gradient, or one of all of them, copies included."""

    def step(x, weights):
        grads = [(x * w).sum(0) for w in weights]
        if not merged:
            return [g + 1 for g in [fcoll.all_reduce(g, "sum", mesh) for g in grads]]
        whole = fcoll.all_reduce(torch.cat(grads), "sum", mesh)
        return [g + 1 for g in whole.split([g.numel() for g in grads])]

    return step


def small_gathers(mesh, merged=False):
    """The same of gathers, each used in a product."""

    def step(x, shards):
        n = mesh.size()
        if merged:
            whole = fcoll.all_gather_into_tensor(torch.cat(shards), mesh).view(n, -1)
            sizes = [s.numel() for s in shards]
            full = [p.reshape(-1) for p in whole.split(sizes, 1)]
        else:
            full = [fcoll.all_gather_into_tensor(s, mesh) for s in shards]
        for w in full:
            x = x @ w.view(128, 128)
        return x

    return step


# gradients with waits in place: one is right behind each start, nothing can be merged
@pytest.mark.parametrize(
    "program, waits",
    [(gradients, "first use"), (small_gathers, "first use"), (small_gathers, "in place")],
)
def test_buckets_save_what_they_save_by_hand(program, waits):
    if program is gradients:
        args = torch.ones(64, 128), [torch.ones(128) for _ in range(6)]
    else:
        args = torch.ones(64, 128), [torch.ones(128 * 128 // 4) for _ in range(6)]
    one = told(program, *args, kind="bucket", waits=waits, dp=4)
    by_hand = step_us(lambda mesh: program(mesh, True), *args, waits=waits, dp=4)
    assert one.step_us == pytest.approx(by_hand, rel=0.02)
    assert "6" in one.what and "as 1" in one.what


# -- the rest ---


def test_another_order_of_the_mesh_is_priced_on_its_links():
    """16 ranks on two nodes: sums over the axis that comes first cross them."""

    def sums(mesh):
        def step(x):
            for _ in range(3):
                x = torch.relu(fcoll.all_reduce(x @ x, "sum", mesh["tp"]))
            return x

        return step

    one = told(sums, torch.ones(1024, 1024), kind="axis", tp=8, dp=2)
    assert one.step_us == pytest.approx(step_us(sums, torch.ones(1024, 1024), dp=2, tp=8))
    assert "(dp=2, tp=8)" in one.what and one.axis == "tp"
    with fcoll.fake_world(dp=2, tp=8) as mesh:  # it is there already
        found = advice(fcoll.trace(sums(mesh), torch.ones(1024, 1024)), MACHINE)
    assert "axis" not in [a.kind for a in found]


def block(mesh, by_hand=False):
    """Layers with a residual and a norm, their sum over tp; or written with shards of the rows."""

    def norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def step(x, weights):
        n, rows = mesh.size(), x.shape[0] // mesh.size()
        for i, (a, b) in enumerate(weights):
            h = norm(x)
            if by_hand and i:
                h = fcoll.all_gather_into_tensor(h, mesh)
            y = torch.relu(h @ a) @ b
            if by_hand:
                y = fcoll.reduce_scatter_tensor(y, "sum", mesh)
                x = y + (x if i else x.view(n, rows, -1)[0])
            else:
                x = x + fcoll.all_reduce(y, "sum", mesh)
        return fcoll.all_gather_into_tensor(x, mesh) * 1 if by_hand else x

    return step


@pytest.mark.parametrize("waits", ["first use", "in place"])
def test_shards_save_what_they_save_by_hand(waits):
    weights = [(torch.ones(WIDTH, 128), torch.ones(128, WIDTH)) for _ in range(3)]
    args = torch.ones(1 << 16, WIDTH), weights
    one = told(block, *args, kind="shard", waits=waits, tp=8)
    by_hand = step_us(lambda mesh: block(mesh, True), *args, waits=waits, tp=8)
    # by hand the result is read once more, so that there is a wait for it
    copy_us = timeline(([step_of_copy(args[0])], []), MACHINE).step_us
    assert one.step_us == pytest.approx(by_hand - copy_us, rel=0.02)
    assert one.op == "all_reduce" and "tp" in one.what


def step_of_copy(x):
    with fcoll.fake_world(tp=1):
        return fcoll.trace(lambda x: x * 1, x).steps[0]


def test_a_sum_of_all_rows_is_one_of_partial_sums():
    """Its all-reduce takes as long as the one that was there: nothing is saved."""

    def summed(mesh):
        return lambda x: (fcoll.all_reduce(x @ x, "sum", mesh) * 2).sum()

    with fcoll.fake_world(tp=4) as mesh:
        assert advice(fcoll.trace(summed(mesh), torch.ones(64, 64)), MACHINE) == ()


def test_rows_that_cannot_be_divided_are_left_alone():
    weights = [(torch.ones(WIDTH, 128), torch.ones(128, WIDTH)) for _ in range(3)]
    with fcoll.fake_world(tp=8) as mesh:
        trace = fcoll.trace(block(mesh), torch.ones((1 << 16) + 1, WIDTH), weights)
        assert "shard" not in [a.kind for a in advice(trace, MACHINE)]


def test_planning_is_as_good_as_the_plan():
    with fcoll.fake_world(dp=8) as mesh:
        trace = fcoll.trace(gathers(mesh), torch.ones(2048, WIDTH), parts())
        (one,) = [a for a in advice(trace, MACHINE) if a.kind == "plan"]
        plan = fcoll.schedule(trace, MACHINE, buckets=False)
        assert one.step_us == pytest.approx(plan.timeline.step_us, rel=0.01)
        assert one.source == "" and one.more_bytes <= 0
        assert "plan" not in [a.kind for a in advice(trace, MACHINE, plan=False)]


def test_a_saved_trace_and_measured_costs():
    with fcoll.fake_world(dp=8) as mesh:
        trace = fcoll.trace(gathers(mesh), torch.ones(2048, WIDTH), parts())
        whole = advice(trace, MACHINE)
    read = fcoll.Trace.from_json(trace.to_json())
    assert [a for a in whole if a.kind != "shard"] == list(advice(read, MACHINE))
    costs = {s.name: 100.0 if s.kind == "start" else 1.0 for s in trace.steps if s.kind != "wait"}
    (one,) = [a for a in advice(trace, MACHINE, costs) if a.kind == "bucket"]
    before = timeline(trace, MACHINE, costs, waits="first use")
    alone, whole = (collective_us("all_gather_into_tensor", 8, k << 20, MACHINE) for k in (1, 4))
    copies = one.step_us - before.compute_us - 100 * whole / alone  # of the machine's price
    assert 0 < copies < 20


# -- FSDP2, whose collectives write into tensors that are given ---


def units(mesh, size=1, prefetch=False):
    """Layers in units of so many; each unit's weights are gathered before it, or one unit ahead."""
    with torch.device("meta"):
        layers = [torch.nn.Linear(256, 256, bias=False) for _ in range(8)]
    layers = [layer.to_empty(device="cpu") for layer in layers]
    made = [torch.nn.Sequential(*layers[i : i + size]) for i in range(0, len(layers), size)]
    model = torch.nn.Sequential(*made)
    for unit in made:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for one, other in itertools.pairwise(made):
        if prefetch:
            one.set_modules_to_forward_prefetch([other])
    return torch.no_grad()(model)


def test_prefetch_of_fsdp2_saves_what_its_own_prefetch_saves():
    x = torch.ones(1 << 14, 256)  # a layer takes longer than its gather
    one = told(units, x, kind="prefetch", dp=4)
    by_hand = step_us(lambda mesh: units(mesh, prefetch=True), x, dp=4)
    assert one.step_us == pytest.approx(by_hand, rel=0.02)
    assert "set_modules_to_forward_prefetch" in one.what and one.count == 8


def test_buckets_of_fsdp2_save_what_larger_units_save():
    """256 KiB a layer: a message is mostly latency on this machine."""
    x = torch.ones(16, 256)
    one = told(units, x, kind="bucket", dp=4)
    left = int(one.what.partition(" as ")[2].partition(",")[0])
    assert "fewer, larger modules" in one.what and left in (1, 2, 4)
    by_hand = step_us(lambda mesh: units(mesh, size=8 // left), x, dp=4)
    launches = 2 * (8 - left) * MACHINE.launch_us  # of copies in and out, which stay as they are
    assert one.step_us == pytest.approx(by_hand + launches, rel=0.02)


# -- messages: the rank at the other end does the same ---


def ring(mesh, early=False):
    """Blocks go round a ring; the exchange comes after the compute on a block, or before it."""
    n, rank = mesh.size(), fcoll.rank(mesh)

    def pass_on(block):
        both = [("isend", block, (rank + 1) % n), ("irecv", block, (rank - 1) % n)]
        return fcoll.batch_p2p(both, mesh)[1]

    def step(x, block):
        out = torch.zeros(())
        for i in range(n):
            if early and i < n - 1:
                following = pass_on(block)
            out = out + torch.relu(x @ block.T) @ block
            if not early and i < n - 1:
                following = pass_on(block)
            block = following
        return out

    return step


@pytest.mark.parametrize("kind", ["prefetch", "plan"])
def test_messages_that_start_earlier_save_what_they_save_by_hand(kind):
    args = torch.ones(8192, 128), torch.ones(1024, 128)
    one = told(ring, *args, kind=kind, cp=4)
    by_hand = step_us(lambda mesh: ring(mesh, early=True), *args, cp=4)
    assert one.step_us == pytest.approx(by_hand, rel=0.01)
    assert "on both ranks of each message" in one.what
    # and so it is with all ranks against each other
    everyone = fcoll.timeline(
        lambda mesh: (ring(mesh, True), args), mesh={"cp": 4}, machine=MACHINE
    )
    assert everyone.step_us == pytest.approx(one.step_us, rel=0.01)


def halves(mesh, merged=False, between=False):
    """Two parts of a result go to the other rank, and two come from it; or one each way."""
    other = 1 - fcoll.rank(mesh)

    def step(x, w):
        h = x @ w
        if merged:
            sent = [fcoll.isend(torch.cat([h[:64], h[64:]]), other, mesh)]
            parts = fcoll.irecv(h, other, mesh).split(64)
        elif between:
            sent = [
                fcoll.isend(f(h), other, mesh) for f in (lambda h: h[:64], lambda h: (h @ w)[64:])
            ]
            parts = [torch.relu(fcoll.irecv(h[:64], other, mesh)) for _ in range(2)]
        else:
            sent = [fcoll.isend(part, other, mesh) for part in (h[:64], h[64:])]
            parts = [fcoll.irecv(h[:64], other, mesh) for _ in range(2)]
        for token in sent:
            fcoll.wait_tensor(token)
        return (parts[0] + parts[1]) @ w

    return step


def test_messages_side_by_side_are_sent_as_one():
    args = torch.ones(128, 128), torch.ones(128, 128)
    with fcoll.fake_world(pp=2) as mesh:
        trace = fcoll.trace(halves(mesh), *args)
        found = {a.op: a for a in advice(trace, MACHINE) if a.kind == "bucket"}
        before = timeline(trace, MACHINE, waits="first use").step_us
    assert found.keys() == {"isend", "irecv"} and "receive" in found["irecv"].what
    by_hand = step_us(lambda mesh: halves(mesh, merged=True), *args, pp=2)
    saved = sum(a.saved_us for a in found.values())
    assert before - saved == pytest.approx(by_hand, rel=0.02)


def test_messages_with_work_between_them_are_not():
    """The second one may need, on the other rank, what is computed in between."""
    with fcoll.fake_world(pp=2) as mesh:
        trace = fcoll.trace(halves(mesh, between=True), torch.ones(128, 128), torch.ones(128, 128))
    assert "bucket" not in [a.kind for a in advice(trace, MACHINE)]


def test_messages_to_and_fro_are_not():
    """What is sent second may be what the other rank made of the first."""

    def to_and_fro(mesh):
        def step(x):
            pairs = [(fcoll.isend(x, 1, mesh), fcoll.irecv(x, 1, mesh)) for _ in range(2)]
            for token, _ in pairs:
                fcoll.wait_tensor(token)
            return pairs[0][1] + pairs[1][1]

        return step

    with fcoll.fake_world(pp=2) as mesh:
        trace = fcoll.trace(to_and_fro(mesh), torch.ones(128, 128))
    assert "bucket" not in [a.kind for a in advice(trace, MACHINE)]


def test_a_message_that_cannot_start_earlier():
    def build(mesh):
        def step(x):
            return fcoll.irecv(x @ x, 1, mesh) @ x

        return step

    with fcoll.fake_world(pp=2) as mesh:
        assert advice(fcoll.trace(build(mesh), torch.ones(256, 256)), MACHINE) == ()


def test_a_step_without_collectives():
    with fcoll.fake_world(dp=2):
        assert advice(fcoll.trace(lambda x: x @ x, torch.ones(64, 64)), MACHINE) == ()
