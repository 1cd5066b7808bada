"""The gradient of every collective is that of the sum of all ranks' losses.

Each rank's loss is a weighted sum of a nonlinear function of the results, with weights of its own.
The oracle is central differences of the sum of those losses, where all ranks step together: one
element of one rank at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from calls import BY_ID, CALLS, Call, examples

import fcoll
from fcoll.errors import NoGradient
from fcoll.reductions import PREMUL_SUM, REDUCTIONS
from fcoll.table import p2p, writing
from fcoll.table.collectives import COLLECTIVES

Tensor = torch.Tensor

STEP = 1e-5  # central differences in float64: error about STEP**2 + 1e-16 / STEP
CLOSE = {"rtol": 1e-6, "atol": 1e-7}

REFUSES = (p2p._no_gradient, writing._no_gradient)
DIFFERENTIABLE = [r.name for r in COLLECTIVES.values() if r.adjoint not in (None, *REFUSES)]
WITHOUT_GRADIENT = [r.name for r in COLLECTIVES.values() if r.adjoint in REFUSES]
CHECKED = [call.id for call in CALLS if call.name in DIFFERENTIABLE]


def real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def weights(x: Tensor, seed: int) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))


def weighted(ys: list[Tensor], seed: int) -> Tensor:
    """A number that depends on all of ys, nonlinearly and differently for each seed."""
    ys = [real(y) for y in ys]
    terms = [(weights(y, seed + i) * (y.sin() + y * y)).sum() for i, y in enumerate(ys)]
    return torch.stack(terms).sum()


def loss(ys: list[Tensor], rank: int) -> Tensor:
    return weighted(ys, 100 * rank)


def loss_of_gradient(call: Call, xs: list[Tensor], rank: int, n: int) -> Tensor:
    xs = [x.requires_grad_() for x in xs]
    grads = torch.autograd.grad(loss(call(xs, rank, n), rank), xs, create_graph=True)
    return weighted(grads, 100 * rank + 50)


def steps(call: Call, rank: int, n: int) -> Iterator[list[Tensor]]:
    """This rank's inputs while one element of one rank after the other goes up, then down."""
    for stepping in range(n):
        for i, x in enumerate(call.inputs(stepping, n)):
            for element in range(real(x).numel()):
                for step in (STEP, -STEP):
                    xs = call.inputs(rank, n)
                    if rank == stepping:
                        real(xs[i]).view(-1)[element] += step
                    yield xs


def numerical(losses: list[Tensor], call: Call, rank: int, n: int) -> list[Tensor]:
    """The gradient of the sum over ranks of the losses at steps(), for this rank's inputs."""
    totals = torch.stack(losses).detach()
    dist.all_reduce(totals)
    slopes = (totals[0::2] - totals[1::2]) / (2 * STEP)
    counts = [sum(real(x).numel() for x in call.inputs(r, n)) for r in range(n)]
    mine = slopes.split(counts)[rank]
    xs = call.inputs(rank, n)
    parts = mine.split([real(x).numel() for x in xs])
    return [p.view(real(x).shape) for p, x in zip(parts, xs, strict=True)]


def both_gradients(rank: int, id: str) -> tuple[list[Tensor], list[Tensor]]:
    call, n = BY_ID[id], dist.get_world_size()
    xs = [x.requires_grad_() for x in call.inputs(rank, n)]
    ours = torch.autograd.grad(loss(call(xs, rank, n), rank), xs)
    in_flight = [call(xs, rank, n) for xs in steps(call, rank, n)]  # all at once: 3 times faster
    return list(map(real, ours)), numerical([loss(ys, rank) for ys in in_flight], call, rank, n)


def both_second_gradients(rank: int, id: str) -> tuple[list[Tensor], list[Tensor]]:
    call, n = BY_ID[id], dist.get_world_size()
    xs = call.inputs(rank, n)
    ours = torch.autograd.grad(loss_of_gradient(call, xs, rank, n), xs)
    losses = [loss_of_gradient(call, xs, rank, n) for xs in steps(call, rank, n)]
    return list(map(real, ours)), numerical(losses, call, rank, n)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_row_has_an_example(name):
    labels = {call.label for call in examples(name)}
    assert labels
    if "reduce_op" in COLLECTIVES[name].schema:
        assert labels >= {r.name for r in REDUCTIONS.values() if r.share} | {PREMUL_SUM}


@pytest.mark.parametrize("id", CHECKED)
def test_gradient_is_that_of_the_sum_of_all_losses(ranks, id):
    for ours, want in ranks.run(both_gradients, id):
        torch.testing.assert_close(ours, want, **CLOSE)


@pytest.mark.parametrize("id", CHECKED)
def test_second_gradient(ranks2, id):
    for ours, want in ranks2.run(both_second_gradients, id):
        torch.testing.assert_close(ours, want, **CLOSE)


# -- min and max of parts that are equal: central differences say nothing there ---


def tied_part(rank: int, n: int) -> Tensor:
    """Ties between none, some and all of the ranks."""
    return torch.tensor([rank, rank // 2, 7, rank % 2] * n, dtype=torch.float64)[: 4 * n]


def tied_gradient(rank: int, name: str, op: str) -> Tensor:
    n = dist.get_world_size()
    x = tied_part(rank, n).requires_grad_()
    if name == "reduce":
        ys = [fcoll.reduce(x, 0, op)]
    elif name.endswith("coalesced"):
        ys = getattr(fcoll, name)([x], op)
    else:
        ys = [getattr(fcoll, name)(x, op)]
    return torch.autograd.grad(loss(ys, rank), x)[0]


def tied_gradients_of_one_process(n: int, name: str, op: str) -> Tensor:
    """torch.amax shares the gradient alike among equal elements."""
    parts = torch.stack([tied_part(r, n) for r in range(n)]).requires_grad_()
    y = parts.amax(0) if op == "max" else parts.amin(0)
    of_rank = {"reduce": lambda r: y * (r == 0)}.get(name, lambda r: y)
    if name.startswith("reduce_scatter"):
        of_rank = y.chunk(n).__getitem__
    return torch.autograd.grad(sum(loss([of_rank(r)], r) for r in range(n)), parts)[0]


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize(
    "name", [name for name in DIFFERENTIABLE if "reduce_op" in COLLECTIVES[name].schema]
)
def test_equal_parts_share_the_gradient_of_an_extreme(ranks, name, op):
    ours = torch.stack(ranks.run(tied_gradient, name, op))
    torch.testing.assert_close(ours, tied_gradients_of_one_process(len(ours), name, op))


# -- grad="identity" and identity: every rank computes the same loss ---


def arriving_gradients(rank: int) -> list[Tensor]:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, 10.0], dtype=torch.float64) * (rank + 1)

    def of(y: Tensor) -> Tensor:
        return torch.autograd.grad((y * weight).sum(), x)[0]

    return [
        of(fcoll.all_reduce(x)),
        of(fcoll.all_reduce(x, grad="identity")),
        of(fcoll.all_reduce(x, "avg", grad="identity")),
        of(fcoll.all_reduce_coalesced([x], grad="identity")[0]),
        of(fcoll.identity(x)),
    ]


def test_grad_identity_leaves_and_identity_sums_what_arrives(ranks2):
    for rank, got in enumerate(ranks2.run(arriving_gradients)):
        mine = torch.tensor([1.0, 10.0], dtype=torch.float64) * (rank + 1)
        whole = torch.tensor([3.0, 30.0], dtype=torch.float64)
        torch.testing.assert_close(got, [whole, mine, mine / 2, mine, whole])


def mlp_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2), (2, 8), (8, 2)]
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def penalty(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A loss of the gradient too, so that its gradient is a second one."""
    y = f(x).sin().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + (slope**2).sum()


def megatron_gradients(rank: int) -> list[Tensor]:
    n = dist.get_world_size()
    x, a, b = mlp_weights()
    a, b = a.chunk(n, 1)[rank].clone(), b.chunk(n, 0)[rank].clone()
    xs = [t.requires_grad_() for t in (x, a, b)]

    def split_mlp(x: Tensor) -> Tensor:
        return fcoll.all_reduce((fcoll.identity(x) @ a).tanh() @ b, grad="identity")

    return [*torch.autograd.grad(penalty(split_mlp, x), xs)]


def test_megatron_pair_gives_the_gradients_of_the_whole_mlp(ranks):
    got = ranks.run(megatron_gradients)
    n = len(got)
    x, a, b = [t.requires_grad_() for t in mlp_weights()]
    gx, ga, gb = torch.autograd.grad(penalty(lambda x: (x @ a).tanh() @ b, x), [x, a, b])
    for rank, ours in enumerate(got):
        torch.testing.assert_close(ours, [gx, ga.chunk(n, 1)[rank], gb.chunk(n, 0)[rank]])


# -- parts of results, mixed lists, and torch.func ---


def gradient_of_one_result(rank: int, name: str) -> list[Tensor]:
    xs = [torch.full((2,), rank + 1.0, requires_grad=True) for _ in range(2)]
    ys = getattr(fcoll, name)(xs)
    (ys[1] ** 2).sum().backward()
    return [x.grad for x in xs]


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name.endswith("coalesced")])
def test_unused_results_of_a_list_have_a_gradient_of_zero(ranks2, name):
    each = {  # of the squares of 3, of [1, 1, 2, 2], and of one 3 on each rank
        "all_reduce_coalesced": [12.0, 12.0],
        "all_gather_into_tensor_coalesced": [4.0, 8.0],
        "reduce_scatter_tensor_coalesced": [6.0, 6.0],
    }[name]
    for (unused, used), want in zip(ranks2.run(gradient_of_one_result, name), each, strict=True):
        assert unused.tolist() == [0, 0]
        assert used.tolist() == [want, want]


@pytest.mark.parametrize(
    ("name", "backwards"),
    [
        ("all_reduce_coalesced", "all_reduce_coalesced"),
        ("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
        ("reduce_scatter_tensor_coalesced", "all_gather_into_tensor_coalesced"),
    ],
)
def test_the_gradient_of_a_list_is_one_call_on_a_list(name, backwards):
    def gradients(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        outs = getattr(fcoll, name)([x, y])
        return torch.autograd.grad(outs[0].square().sum() + outs[1].sum(), (x, y))

    x, y = torch.ones(4, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    with fcoll.fake_world(tp=2):
        issued = [c.op for c in fcoll.trace(gradients, x, y).collectives]
    assert issued == [name, backwards]


def gradient_beside_integers(rank: int) -> tuple[Tensor, Tensor, bool]:
    x = torch.ones(2, requires_grad=True)
    counts = torch.full((3,), rank + 1)
    count, y = fcoll.all_reduce_coalesced([counts, x])
    (y * count[0]).sum().backward()
    return x.grad, count + 0, count.requires_grad


def test_a_list_may_mix_integers_with_what_has_a_gradient(ranks2):
    for grad, count, has_graph in ranks2.run(gradient_beside_integers):
        assert grad.tolist() == [6, 6]
        assert count.tolist() == [3, 3, 3]
        assert not has_graph


def functional_gradients(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """torch.func's gradients beside those of backward()."""

    def f(x: Tensor) -> Tensor:
        return (fcoll.all_reduce(x, "product") ** 2 * (rank + 1)).sum()

    def g(x: Tensor) -> Tensor:
        part, whole = fcoll.reduce_scatter_tensor(x), fcoll.all_gather_into_tensor(x)
        return (part.sin().sum() + whole.sin().sum()) * (rank + 1)

    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.stack([torch.autograd.grad(f(row), row)[0] for row in x])
    leaf = x.detach()
    second = torch.autograd.grad(torch.autograd.grad(f(x), x, create_graph=True)[0].sum(), x)[0]
    return {
        "grad": (torch.func.grad(f)(leaf), torch.autograd.grad(f(x), x)[0]),
        "grad of others": (torch.func.grad(g)(leaf.T), torch.autograd.grad(g(x.T), x)[0].T),
        "grad of grad": (
            torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(leaf),
            second,
        ),
        "vmap of grad": (torch.vmap(torch.func.grad(f))(leaf), rows),
        "grad of vmap": (torch.func.grad(lambda x: torch.vmap(f)(x).sum())(leaf), rows),
        "identity": (
            torch.vmap(torch.func.grad(lambda x: (fcoll.identity(x) ** 2).sum()))(leaf),
            fcoll.all_reduce(2 * leaf) + 0,
        ),
    }


def test_torch_func_gives_the_same_gradients(ranks2):
    for results in ranks2.run(functional_gradients):
        for name, (ours, want) in results.items():
            torch.testing.assert_close(ours, want, msg=lambda m, name=name: f"{name}: {m}")


def forward_mode(rank: int, functional: bool) -> None:
    x = torch.ones(2)
    if functional:
        torch.func.jvp(fcoll.all_reduce, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        fcoll.all_reduce(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_is_refused(ranks2, functional):
    for error in ranks2.run_expecting(forward_mode, functional):
        assert isinstance(error, NoGradient)
        assert "all_reduce" in str(error) and "forward-mode" in str(error)


# -- what has no gradient ---


def without_gradient(x: Tensor, name: str, rank: int) -> Tensor:
    """The result of a call of the row, in x's autograd graph."""
    ops, peer, world = torch.ops.fcoll, 1 - rank, dist.group.WORLD.group_name
    if name in ("isend", "irecv"):
        token, received = fcoll.isend(x, peer), fcoll.irecv(x, peer)
        fcoll.wait_tensor(token)
        return token if name == "isend" else received
    if name == "batch_p2p_ops":
        return fcoll.batch_p2p([("isend", x, peer), ("irecv", x, peer)])[1]
    y = x * 1  # autograd has no in-place changes of leaves
    pending = {
        "all_reduce_": lambda: ops.all_reduce_(y, "sum", world),
        "all_reduce_coalesced_": lambda: ops.all_reduce_coalesced_([y], "sum", world)[0],
        "broadcast_": lambda: ops.broadcast_(y, 0, world),
        "all_gather_into_tensor_out": lambda: ops.all_gather_into_tensor_out(
            y, 2, world, out=torch.empty(4)
        ),
        "reduce_scatter_tensor_out": lambda: ops.reduce_scatter_tensor_out(
            y, "sum", 2, world, out=torch.empty(1)
        ),
    }[name]()
    return fcoll.wait_tensor(pending)


def use_without_gradient(rank: int, name: str) -> Tensor:
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    y = without_gradient(x, name, rank)
    assert y.requires_grad
    return (y * 1).detach()


def backward_without_gradient(rank: int, name: str) -> None:
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    without_gradient(x, name, rank).sum().backward()


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_no_gradient_is_an_error_of_backward_and_not_before(ranks2, name):
    want = {
        "isend": [[], []],
        "irecv": [[2, 2], [1, 1]],
        "batch_p2p_ops": [[2, 2], [1, 1]],
        "broadcast_": [[1, 1], [1, 1]],
        "all_gather_into_tensor_out": [[1, 1, 2, 2]] * 2,
        "reduce_scatter_tensor_out": [[3], [3]],
    }.get(name, [[3, 3], [3, 3]])
    assert [y.tolist() for y in ranks2.run(use_without_gradient, name)] == want
    for error in ranks2.run_expecting(backward_without_gradient, name):
        assert isinstance(error, NoGradient)
        assert str(error).startswith(f"NoGradient: {name} has no gradient")
        why = "overwrites" if COLLECTIVES[name].mutates else "peer"
        assert why in str(error)
