"""fcoll.simulate gives on all ranks what the oracle, real ranks and torch's LocalTensorMode do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from cases import DTYPES, REDUCE_OPS, REDUCING, ROWS, Case, default_case
from compare import bits, same, tolerance
from oracle import expected
from torch import nn
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh

import fcoll
from fcoll import groups

Tensor = torch.Tensor
MESH = {"dp": 2, "tp": 2}
CALLED = [op for op in ROWS if op not in (*cases.P2P, "barrier", "wait_tensor")]

# how a group is named inside -> the groups of all ranks
NAMED: dict[str, tuple[Any, list[list[int]]]] = {
    "None": (None, [[0, 1, 2, 3]]),
    "tp": ("tp", [[0, 1], [2, 3]]),
    "dp": ("dp", [[0, 2], [1, 3]]),
    "both": (("dp", "tp"), [[0, 1, 2, 3]]),
    "both, turned": (("tp", "dp"), [[0, 2, 1, 3]]),
    "lists": ([[3, 0], [1, 2]], [[3, 0], [1, 2]]),
    "one list": ([2, 0, 3, 1], [[2, 0, 3, 1]]),
}


def simulated(case: Case, group: Any, members: list[list[int]], op_level: bool) -> list[Tensor]:
    """The outputs of a case on four ranks, stacked."""
    inputs = {r: cases.inputs_of(case, r, g) for g in members for r in g}
    stacks = []
    for i in range(len(inputs[0])):
        parts = [inputs[r][i] for r in range(4)]
        flat = torch.cat([bits(x) for x in parts])  # torch stacks not every dtype
        stacks.append(flat.view(parts[0].dtype).view(4, *parts[0].shape))

    def fn(*xs: Tensor) -> list[Tensor]:
        named = cases.arguments(case, xs, group)
        outs = cases.prepared(case, named)(*xs)
        return [*outs]

    return fcoll.simulate(fn, mesh_shape=MESH)(*stacks)


def check(case: Case, how: str, op_level: bool) -> None:
    group, members = NAMED[how]
    case = Case(case.op, case.shapes, case.dtypes, case.args, op_level=op_level)
    outs = simulated(case, group, members, op_level)
    inputs = {r: cases.inputs_of(case, r, g) for g in members for r in g}
    for ranks in members:
        want = expected(case.op, inputs, case.args, ranks)
        allowed = tolerance(case, inputs, ranks)
        for r in ranks:
            for i, (y, w) in enumerate(zip(outs, want[r], strict=True)):
                assert same(y[r], w, allowed[i]), (case, how, r, y[r], w)


@pytest.mark.parametrize("how", NAMED)
@pytest.mark.parametrize("op", CALLED)
def test_every_row_and_group(op, how):
    n = len(NAMED[how][1][0])
    for op_level in (False, True):
        check(default_case(op, n), how, op_level)


@pytest.mark.parametrize("op", CALLED)
def test_every_dtype(op):
    for dtype in DTYPES:
        for reduce_op in REDUCE_OPS if op in REDUCING else [None]:
            if reduce_op is None or cases.has_meaning(reduce_op, dtype):
                args = {"reduce_op": reduce_op} if reduce_op else {}
                check(default_case(op, 2, dtypes=(dtype,), args=args), "tp", False)


def test_barrier_and_waits():
    def fn(x):
        fcoll.barrier()
        fcoll.barrier("tp")
        return fcoll.wait_tensor(fcoll.all_reduce(x, "max", "tp"))

    assert fcoll.simulate(fn, mesh_shape=MESH)(torch.arange(4)).tolist() == [1, 1, 3, 3]


def test_premul_sum():
    fn = fcoll.simulate(
        lambda x: fcoll.all_reduce(x, "premul_sum", "tp", factor=0.5), mesh_shape=MESH
    )
    assert fn(torch.arange(4.0)).tolist() == [0.5, 0.5, 2.5, 2.5]


# -- values that are the same on all ranks ---


@pytest.mark.parametrize("op", [op for op in CALLED if not fcoll.COLLECTIVES[op].mutates])
@pytest.mark.parametrize("how", ["None", "tp", "lists"])
def test_replicated_inputs(op, how):
    """A tensor made inside is what N equal ranks have."""
    group, members = NAMED[how]
    case = default_case(op, len(members[0]))
    xs = cases.inputs_of(case, members[0][0], members[0])

    def fn(unused):
        return cases.prepared(case, cases.arguments(case, xs, group))(*xs)

    outs = fcoll.simulate(fn, mesh_shape=MESH)(torch.zeros(4))
    for ranks in members:
        want = expected(op, dict.fromkeys(ranks, xs), case.args, ranks)
        for r in ranks:
            assert all(same(y[r], w) for y, w in zip(outs, want[r], strict=True))


def test_what_all_ranks_have_is_computed_once():
    """So it can also be decided by, as on real ranks."""

    def fn(x):
        total = fcoll.all_reduce(x)
        return total if total > 5 else -total

    assert fcoll.simulate(fn, world_size=4)(torch.arange(4)).tolist() == [6, 6, 6, 6]


# -- ranks as values ---


def test_rank_and_axis_index():
    def fn(x):
        groups = None, "tp", [[3, 0], [1, 2]]
        return [fcoll.rank(g) for g in groups] + [fcoll.axis_index("dp"), dist.get_rank()]

    got = fcoll.simulate(fn, mesh_shape=MESH)(torch.zeros(4))
    assert [y.tolist() for y in got] == [
        [0, 1, 2, 3],
        [0, 1, 0, 1],
        [1, 0, 1, 0],
        [0, 0, 1, 1],
        [0, 1, 2, 3],
    ]


def test_ranks_of_a_mesh_made_inside():
    def fn(x):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        group = mesh["b"].get_group()
        return (
            torch.stack(list(mesh.get_coordinate())),
            mesh.get_local_rank("b"),
            dist.get_rank(group),
            group.rank(),
            fcoll.all_reduce(x, "sum", (mesh, "a")),
            funcol.wait_tensor(funcol.all_reduce(x, "sum", group)),
        )

    got = fcoll.simulate(fn, mesh_shape=MESH)(torch.arange(4))
    want = [[[0, 0], [0, 1], [1, 0], [1, 1]], [0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1]]
    assert [y.tolist() for y in got] == [*want, [2, 4, 2, 4], [1, 1, 5, 5]]


def on_real_ranks(rank: int) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("line",))
    with pytest.raises(fcoll.errors.UnknownAxis, match="no mesh with one axis 'pp'"):
        fcoll.axis_index("pp")
    group = fcoll.rank([[3, 0], [1, 2]])
    axes = fcoll.axis_index("rows"), fcoll.axis_index("columns", mesh), fcoll.axis_index("line")
    del line
    return fcoll.rank(), group, *axes


def test_rank_and_axis_index_on_real_ranks(ranks4):
    got = ranks4.run(on_real_ranks)
    assert got == [(0, 1, 0, 0, 0), (1, 0, 0, 1, 1), (2, 1, 1, 0, 2), (3, 0, 1, 1, 3)]
    assert all(type(x) is int for row in got for x in row)


# -- the same program on real ranks, and under torch's LocalTensorMode ---


def program(x: Tensor, w: Tensor, tp: Any, dp: Any) -> tuple[Tensor, ...]:
    """Uses most collectives, through fcoll's functions."""
    y = fcoll.all_reduce(x @ w, "sum", tp)
    z = fcoll.all_gather_into_tensor(y.relu(), dp, dim=1)
    s = fcoll.reduce_scatter_tensor(z * z, "avg", dp, dim=1)
    t = fcoll.all_to_all_single(s, tp) + fcoll.broadcast(s, 1, tp)
    p = fcoll.permute(t, [1, 0], dp) - fcoll.reduce(t, 0, "max", dp)
    return y, z, s, t, p


def program_on_rank(rank: int, x_W: Tensor, w_W: Tensor) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w = x_W[rank].requires_grad_(), w_W[rank].requires_grad_()
    outs = program(x, w, (mesh, "tp"), (mesh, "dp"))
    sum((y * y).sum() for y in outs).backward()
    return [fcoll.wait_tensor(y).detach() for y in (*outs, x.grad, w.grad)]


def stacks() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4, 6, dtype=torch.float64), torch.randn(4, 6, 2, dtype=torch.float64)


def test_program_equals_real_ranks(ranks4):
    x_W, w_W = stacks()
    real = ranks4.run(program_on_rank, x_W, w_W)
    x, w = x_W.clone().requires_grad_(), w_W.clone().requires_grad_()
    outs = fcoll.simulate(lambda x, w: program(x, w, "tp", "dp"), mesh_shape=MESH)(x, w)
    sum((y * y).sum() for y in outs).backward()
    for r, want in enumerate(real):
        for got, y in zip((*outs, x.grad, w.grad), want, strict=True):
            torch.testing.assert_close(got[r].detach(), y)


def torchs(x: Tensor, mesh: Any) -> tuple[Tensor, ...]:
    """torch's own functional collectives."""
    y = funcol.all_reduce(x, "sum", (mesh, 1))
    z = funcol.all_gather_single(x, 0, (mesh, 0))
    s = funcol.reduce_scatter_single(x, "sum", 0, (mesh, 1))
    t = funcol.all_to_all_single(x, None, None, (mesh, 1))
    b = funcol.broadcast(x, 0, (mesh, 1))
    return tuple(funcol.wait_tensor(v) for v in (y, z, s, t, b))


def test_torchs_functional_collectives_equal_local_tensors():
    x_W = torch.randn(4, 4, 3)
    sim = fcoll.simulate(lambda x: torchs(x, sim.mesh), mesh_shape=MESH)
    outs = sim(x_W)
    with fcoll.fake_world(dp=2, tp=2) as mesh, LocalTensorMode(4) as mode:
        x = mode.rank_map(lambda r: x_W[r].clone())
        for got_W, y in zip(outs, torchs(x, mesh), strict=True):
            for r in range(4):
                torch.testing.assert_close(got_W[r], y._local_tensors[r])


# -- gradients and training ---


def test_grad_inside_equals_grad_outside():
    def loss(x, w):
        y = fcoll.all_reduce((x * w).tanh(), "product", "tp")
        z = fcoll.all_reduce(y + w, "avg", [[0, 1, 3], [2]])
        return fcoll.all_reduce(z, "max", None).sum()

    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    leaf = w.clone().requires_grad_()
    fcoll.simulate(loss, mesh_shape=MESH)(x, leaf).sum().backward()
    inside = fcoll.simulate(torch.func.grad(loss, argnums=1), mesh_shape=MESH)(x, w)
    torch.testing.assert_close(inside, leaf.grad)
    around = torch.func.grad(lambda w: fcoll.simulate(loss, mesh_shape=MESH)(x, w).sum())(w)
    torch.testing.assert_close(around, leaf.grad)


def test_own_gradient_inside_and_outside():
    def loss(x):
        h = fcoll.identity(x, "tp") * (fcoll.rank("tp") + 1)
        return fcoll.all_reduce(h * h, "sum", "tp", grad="identity").sum()

    x = torch.randn(4, 3, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    fcoll.simulate(loss, mesh_shape=MESH)(leaf).sum().backward()
    inside = fcoll.simulate(torch.func.grad(loss), mesh_shape=MESH)(x)
    torch.testing.assert_close(inside, leaf.grad)
    torch.testing.assert_close(leaf.grad[0], 2 * x[0] + 8 * x[1])  # 2 h k of both, not twice
    mapped = fcoll.simulate(torch.vmap(torch.func.grad(loss)), mesh_shape=MESH)(x[:, None])
    torch.testing.assert_close(mapped[:, 0], leaf.grad)


class Mlp(nn.Module):
    """Columns of the first layer and rows of the second on each rank of tp."""

    def __init__(self, whole: nn.Sequential, tp: int, n: int) -> None:
        super().__init__()
        self.up = nn.Parameter(whole[0].weight.detach().chunk(n)[tp].clone())
        self.down = nn.Parameter(whole[2].weight.detach().chunk(n, 1)[tp].clone())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(fcoll.identity(x, "tp") @ self.up.T)
        return fcoll.all_reduce(h @ self.down.T, "sum", "tp", grad="identity")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_equals_one_process(optimizer):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 6, bias=False))
    whole = whole.double()
    model = fcoll.stack_modules([Mlp(whole, r % 2, 2) for r in range(8)])
    ours = optimizer(model.parameters(), lr=0.1)
    theirs = optimizer(whole.parameters(), lr=0.1)
    average = fcoll.simulate(
        lambda g: fcoll.all_reduce(g, "avg", "dp"), mesh_shape={"dp": 4, "tp": 2}
    )

    def loss_of(model, x, y):
        return (model(x) - y).square().mean()

    step = fcoll.simulate(loss_of, mesh_shape={"dp": 4, "tp": 2})
    for _ in range(3):
        x, y = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(4, 5, 6, dtype=torch.float64)
        ours.zero_grad()
        losses = step(model, x.repeat_interleave(2, 0), y.repeat_interleave(2, 0))
        losses.sum().backward()
        for p in model.parameters():
            p.grad = average(p.grad)
        ours.step()
        theirs.zero_grad()
        loss = (whole(x.flatten(0, 1)) - y.flatten(0, 1)).square().mean()
        loss.backward()
        theirs.step()
        torch.testing.assert_close(losses.view(4, 2)[:, 0].mean(), loss)
    for r in range(8):
        torch.testing.assert_close(model.up[r], whole[0].weight.chunk(2)[r % 2])
        torch.testing.assert_close(model.down[r], whole[2].weight.chunk(2, 1)[r % 2])


def test_functional_sgd_inside():
    def step(w, x):
        grad = torch.func.grad(lambda w: ((x @ w) ** 2).sum())(w)
        return w - 0.1 * fcoll.all_reduce(grad, "avg")

    w, x = torch.randn(3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    got = fcoll.simulate(step, world_size=4, in_dims=(None, 0))(w, x)
    want = w - 0.1 * torch.stack([2 * (r @ w) * r for r in x]).mean(0)
    torch.testing.assert_close(got, want.expand(4, 3))


def test_dropout_is_each_ranks_own():
    x = torch.ones(4, 1000)
    y = fcoll.simulate(lambda x: nn.functional.dropout(x, 0.5), world_size=4)(x)
    assert len({tuple(row.tolist()) for row in y}) == 4
    same_on_all = fcoll.simulate(
        lambda x: nn.functional.dropout(x, 0.5), world_size=4, randomness="same"
    )(x)
    assert len({tuple(row.tolist()) for row in same_on_all}) == 1


def test_in_place_forms():
    def fn(x):
        y = x.clone()
        torch.ops.fcoll.all_reduce_(y, "sum", groups.group_name("tp"))
        return y

    assert fcoll.simulate(fn, mesh_shape=MESH)(torch.arange(4)).tolist() == [1, 1, 5, 5]


# -- arguments ---


def test_arguments_of_all_kinds():
    def fn(batch, scale, *, bias):
        assert isinstance(scale, float)
        return {"y": batch["x"] * scale + bias, "n": 3, "none": None}

    x = torch.randn(2, 4)
    got = fcoll.simulate(fn, world_size=4, in_dims=({"x": 1}, None))(
        {"x": x}, 2.0, bias=torch.ones(4)
    )
    torch.testing.assert_close(got["y"], x.T * 2 + 1)
    assert got["n"] == 3
    assert got["none"] is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda f: f(torch.ones(3)),
            r"tensor 0 of the arguments has shape \(3,\), which has not 4",
        ),
        (lambda f: f(torch.tensor(1.0)), "in_dims=None for what is the same"),
    ],
)
def test_arguments_that_are_not_stacked(call, message):
    with pytest.raises(fcoll.errors.BadStack, match=message):
        call(fcoll.simulate(lambda x: x, world_size=4))


def test_meshes_that_are_none():
    for mesh in ({}, {"dp": 0}, {"dp": "4"}):
        with pytest.raises(fcoll.errors.BadMesh):
            fcoll.simulate(lambda x: x, mesh_shape=mesh)
    with pytest.raises(fcoll.errors.BadMesh, match="both or neither"):
        fcoll.simulate(lambda x: x)


def test_a_stacked_module_outside():
    model = fcoll.stack_modules([nn.Linear(2, 2) for _ in range(4)])
    with pytest.raises(fcoll.errors.BadStack, match="Pass it to the simulated function"):
        model(torch.ones(4, 2))
    fcoll.simulate(lambda m, x: m(x), world_size=4)(model, torch.ones(4, 2))
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.shape == (4, 2, 2)
    with pytest.raises(fcoll.errors.BadStack, match="rank 1 has not the parameters of rank 0"):
        fcoll.stack_modules([nn.Linear(2, 2), nn.Linear(2, 3)])


# -- what a batch cannot do ---

REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "branch": (lambda x: x if x.sum() > 0 else -x, "Python decides by a value"),
    "branch on rank": (lambda x: x if fcoll.rank() == 0 else -x, "Python decides by a value"),
    "branch on get_rank": (lambda x: x if dist.get_rank() == 0 else -x, "Python decides"),
    "item": (lambda x: x.sum().item(), "Python reads a value"),
    "nonzero": (lambda x: x.nonzero(), "shape of a result would differ"),
    "backward": (lambda x: x.sum().backward(), r"backward\(\) is called inside"),
    "write": (lambda x: fcoll.all_reduce(x).add_(x), "is written to with values that differ"),
    "message": (lambda x: dist.send(x, 1), "is a message"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_the_line(what):
    fn, message = REFUSED[what]
    line = rf"test_batched.py:{fn.__code__.co_firstlineno}"
    with pytest.raises(fcoll.errors.NotInBatch, match=rf"{line}: .*{message}.*simulate_ranks"):
        fcoll.simulate(fn, world_size=4)(torch.randn(4, 2, requires_grad=True))
    assert_nothing_left()
    assert fcoll.simulate(fcoll.all_reduce, world_size=4)(torch.ones(4)).tolist() == [4.0] * 4


def test_calls_of_one_simulation_that_differ_in_one_thing():
    """What was checked for one call is used again for calls that look the same, no others."""

    def fn(x: Tensor) -> list[Tensor]:
        calls = [(x, "sum", None), (x, "max", None), (x, "sum", "tp"), (x, "sum", "dp")]
        return [fcoll.all_reduce(*call) for call in calls]

    sim = fcoll.simulate(fn, mesh_shape=MESH)
    for _ in range(2):
        found = [y.tolist() for y in sim(torch.tensor([1.0, 2.0, 4.0, 8.0]))]
        assert found == [[15.0] * 4, [8.0] * 4, [3.0, 3.0, 12.0, 12.0], [5.0, 10.0, 5.0, 10.0]]
    mean = fcoll.simulate(lambda x: fcoll.all_reduce(x, "avg"), world_size=4)
    assert mean(torch.arange(4.0)).tolist() == [1.5] * 4
    with pytest.raises(fcoll.errors.WrongDtype):
        mean(torch.arange(4))


def test_threads_simulate_one_after_another():
    """Each puts a world of its own in torch.distributed's place."""

    def totals(i: int) -> list[list[float]]:
        def fn(x: Tensor) -> Tensor:
            return fcoll.all_reduce(x, "sum", "tp") + dist.get_world_size()

        return [fcoll.simulate(fn, mesh_shape=MESH)(torch.ones(4) * i).tolist() for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for i, found in enumerate(pool.map(totals, range(4))):
            assert found == [[2.0 * i + 4] * 4] * 20
    assert_nothing_left()


def test_ragged_results():
    for fn in (
        lambda x: fcoll.all_gather_into_tensor(x, [[0, 1, 3], [2]]),
        lambda x: fcoll.all_gather_into_tensor(x, sizes=[1, 2, 1, 2]),
        lambda x: fcoll.all_to_all_single(x, None, [1, 2, 0, 1], [1, 0, 1, 2]),
    ):
        with pytest.raises(fcoll.FcollError):
            fcoll.simulate(fn, world_size=4)(torch.ones(4, 4))


def test_groups_that_are_none():
    for group, message in (
        ("pp", r"The axes of this simulation are \['dp', 'tp'\]"),
        (("dp", "pp"), "The axes of this simulation"),
        ([0, 1], r"All 4 simulated ranks make this call.*simulate_ranks"),
        ([[0, 1], [1, 2, 3]], "must be in one of them"),
    ):
        with pytest.raises(fcoll.errors.UnknownGroup, match=message):
            fcoll.simulate(lambda x, g=group: fcoll.all_reduce(x, "sum", g), mesh_shape=MESH)(
                torch.ones(4)
            )
        assert_nothing_left()


def test_messages_between_two_ranks():
    with pytest.raises(fcoll.errors.NoStackedRule, match="Use permute"):
        fcoll.simulate(lambda x: fcoll.isend(x, 1), world_size=2)(torch.ones(2))


# -- around it ---

BEFORE = (dist.get_rank, dist.ProcessGroup.rank, vars(dist.ProcessGroup)["rank"])


def assert_nothing_left() -> None:
    assert not dist.is_initialized()
    assert not groups.resolvers
    assert dist.get_rank is BEFORE[0]
    assert vars(dist.ProcessGroup)["rank"] is BEFORE[2]


def test_an_exception_in_the_middle():
    def fn(x):
        fcoll.all_reduce(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fcoll.simulate(fn, world_size=4)(torch.ones(4))
    assert_nothing_left()


def test_names_are_forgotten():
    sim = fcoll.simulate(lambda x: fcoll.all_reduce(x, "sum", [[1, 0]]), world_size=2)
    sim(torch.ones(2))
    mine = [name for name in groups.stacked_groups if name.startswith(sim.name)]
    assert len(mine) == 2
    del sim
    assert not groups.stacked_groups.keys() & set(mine)


def test_a_real_process_group(solo):
    before = dist.group.WORLD
    fn = fcoll.simulate(lambda x: fcoll.all_reduce(x) + dist.get_world_size(), world_size=4)
    assert fn(torch.ones(4)).tolist() == [8.0] * 4
    assert dist.group.WORLD is before
    assert dist.get_world_size() == 1
    assert fcoll.all_reduce(torch.ones(1)).item() == 1


def test_nested():
    """Each of two ranks simulates three."""
    inner = fcoll.simulate(lambda x: fcoll.all_reduce(x) + fcoll.rank(), world_size=3)
    outer = fcoll.simulate(lambda x: fcoll.all_reduce(inner(x)) + fcoll.rank(), world_size=2)
    assert outer(torch.ones(2, 3)).tolist() == [[6, 8, 10], [7, 9, 11]]
    assert_nothing_left()


def test_vmap_inside_and_outside():
    fn = fcoll.simulate(lambda x: torch.vmap(lambda r: fcoll.all_reduce(r))(x), world_size=4)
    x = torch.randn(4, 3, 2)
    torch.testing.assert_close(fn(x), x.sum(0).expand(4, 3, 2))
    plain = fcoll.simulate(lambda x: fcoll.all_reduce(x), world_size=4)
    torch.testing.assert_close(
        torch.vmap(plain)(x.transpose(0, 1)), x.sum(0)[:, None].expand(3, 4, 2)
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    model = fcoll.stack_modules([nn.Linear(4, 4) for _ in range(4)])

    def step(model, x):
        y = fcoll.all_reduce(model(x).relu(), "sum", "tp") * (1 + fcoll.axis_index("dp"))
        return fcoll.all_reduce(y.square().mean(), "avg", "dp")

    sim = fcoll.simulate(step, mesh_shape=MESH)
    x = torch.randn(4, 3, 4)
    want = sim(model, x)
    want.sum().backward()
    grad, model.weight.grad = model.weight.grad, None
    got = torch.compile(sim, backend=backend, fullgraph=True)(model, x)
    got.sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(model.weight.grad, grad)
    assert_nothing_left()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_with_the_mesh(backend, capfd):
    """The mesh is asked for inside fn, and was not made before."""
    sim = fcoll.simulate(lambda x: funcol.all_reduce(x, "sum", (sim.mesh, 1)) * 2, mesh_shape=MESH)
    got = torch.compile(sim, backend=backend, fullgraph=True)(torch.arange(4.0))
    assert got.tolist() == sim(torch.arange(4.0)).tolist() == [2.0, 2.0, 10.0, 10.0]
    assert "batching rule" not in capfd.readouterr().err  # which vmap would have none of for waits
    assert_nothing_left()


def test_an_error_while_compiling():
    def bad(x):
        fcoll.all_reduce(x, "sum", "tp")
        return fcoll.all_reduce(x, "sum", "pp")

    compiled = torch.compile(fcoll.simulate(bad, mesh_shape=MESH), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="no process group 'pp'"):
        compiled(torch.ones(4))
    with pytest.raises(fcoll.errors.NotInitialized):
        fcoll.all_reduce(torch.ones(1))
    assert_nothing_left()


def test_a_row_without_a_rule(solo):
    from dataclasses import replace

    row = replace(
        fcoll.COLLECTIVES["broadcast"], name="no_rule_here", stacked=None, targets=(), native=_NONE
    )
    call = fcoll.register(row)
    try:
        with pytest.raises(fcoll.errors.NoStackedRule, match="'no_rule_here' has no `stacked`"):
            fcoll.simulate(lambda x: call(x, 0), world_size=2)(torch.ones(2))
    finally:
        del fcoll.COLLECTIVES["no_rule_here"]  # other tests go through the table


_NONE = fcoll.table.row.Native()
