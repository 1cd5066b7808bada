"""A row's ``stacked`` rule gives, for all ranks at once, what the oracle computes for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cases
import pytest
import torch
from cases import DTYPES, REDUCE_OPS, REDUCING, ROWS, Case, default_case
from compare import bits, same, tolerance
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import expected

from fcoll.errors import NoStackedRule, RaggedRanks, RankOutOfGroup, UnknownGroup
from fcoll.reductions import REDUCTIONS, fold
from fcoll.table.collectives import COLLECTIVES, functional_row
from fcoll.table.partition import Partition

Tensor = torch.Tensor
Groups = Sequence[Sequence[int]]

MOVING = [op for op in ROWS if op not in cases.P2P]

PARTITIONS: dict[str, Groups] = {
    "all": [range(4)],
    "rows": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "columns": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "middle axis": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "listed backwards": [[6, 7], [4, 5], [2, 3], [0, 1]],
    "unsorted": [[2, 0, 3, 1]],
    "scrambled": [[3, 5], [0, 7], [6, 1], [4, 2]],
    "alone": [[0], [1], [2]],
    "one rank": [[0]],
}


@pytest.mark.parametrize("op", ROWS)
def test_row_has_a_rule(op):
    assert COLLECTIVES[op].stacked is not None, f"write stacked of {op}"


def arguments(case: Case, x: Tensor | None, n: int) -> dict[str, Any]:
    """The schema's arguments of a case, as a call gives them."""
    args = {"group_name": "unused", "group_size": n, **case.args}
    for name in {"dim", "gather_dim", "shard_dim"} & args.keys():
        args[name] %= max(x.dim(), 1)
    if case.op == "all_to_all_single":
        args["input_split_sizes"] = args["output_split_sizes"] = [x.shape[0] // n] * n
    return args


def stacked_inputs(case: Case, groups: Groups) -> tuple[dict[int, list[Tensor]], list[Tensor]]:
    inputs = {r: cases.inputs_of(case, r, g) for g in groups for r in g}
    stacks = []
    for i in range(len(inputs[0])):
        parts = [inputs[r][i] for r in range(len(inputs))]
        shape = (len(parts), *parts[0].shape)
        flat = torch.cat([bits(x) for x in parts])  # torch stacks not every dtype
        stacks.append(flat.view(parts[0].dtype).view(shape))
    return inputs, stacks


def run(case: Case, groups: Groups, xs_W: list[Tensor]) -> list[Tensor]:
    """The row's outputs, stacked."""
    row, n = case.row, len(groups[0])
    args = arguments(case, xs_W[0][0] if xs_W else None, n)
    given_ = xs_W if row.on_lists else (xs_W[0] if xs_W else None)
    out = row.stacked(given_, args, Partition.of(groups))
    return out if row.on_lists else [out]


def check(case: Case, groups: Groups) -> None:
    inputs, xs_W = stacked_inputs(case, groups)
    before = [bits(x) for x in xs_W]
    outs = run(case, groups, xs_W)
    assert all(torch.equal(bits(x), b) for x, b in zip(xs_W, before, strict=True))
    for members in groups:
        want = expected(case.op, inputs, case.args, members)
        allowed = tolerance(case, inputs, members) if xs_W else [0.0]
        for r in members:
            for i, (y, w) in enumerate(zip(outs, want[r], strict=True)):
                assert same(y[r], w, allowed[i]), (case, r, i, y[r], w)
    if case.op != "wait_tensor":
        for x in xs_W:  # new memory: a later write to an argument is not seen in a result
            x.view(torch.uint8).fill_(0) if x.dtype != torch.bool else x.fill_(False)
        again = run(case, groups, stacked_inputs(case, groups)[1])
        assert all(torch.equal(bits(y), bits(z)) for y, z in zip(outs, again, strict=True))


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("op", MOVING)
def test_partitions(op, name):
    groups = [list(g) for g in PARTITIONS[name]]
    for dtype in (torch.bfloat16, torch.int16):
        check(default_case(op, len(groups[0]), dtypes=(dtype,)), groups)


@pytest.mark.parametrize("op", MOVING)
def test_dtypes(op):
    reduce_ops = REDUCE_OPS if op in REDUCING else [None]
    for groups in ([[0, 1], [2, 3]], [[2, 0, 3], [4, 1, 5]]):
        for dtype in DTYPES if op in REDUCING else (*DTYPES, cases.SCALES):
            for reduce_op in reduce_ops:
                if reduce_op is None or cases.has_meaning(reduce_op, dtype):
                    args = {"reduce_op": reduce_op} if reduce_op else {}
                    check(default_case(op, len(groups[0]), dtypes=(dtype,), args=args), groups)


@pytest.mark.parametrize("op", [op for op in MOVING if "dim" in COLLECTIVES[op].position])
def test_dims(op):
    for dim in (1, 2, -1):
        case = default_case(op, 2, shapes=((2, 3, 4),), args={"dim": dim})
        check(case, [[0, 1], [2, 3]])


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (1, 1)])
def test_shard_dims(pair):
    case = default_case(
        "shard_dim_alltoall",
        2,
        shapes=((2, 3, 4),),
        args={"gather_dim": pair[0], "shard_dim": pair[1]},
    )
    check(case, [[0, 2], [1, 3]])


def test_lists_with_dims():
    for op in ("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"):
        check(default_case(op, 2, args={"dims": [1, 0]}), [[0, 1], [2, 3]])


@pytest.mark.parametrize("op", ["all_gather_into_tensor", "gather", "all_reduce", "broadcast"])
def test_scalars(op):
    check(default_case(op, 2, shapes=((),)), [[0, 1], [2, 3]])


@pytest.mark.parametrize("op", MOVING)
def test_nothing_in_a_tensor(op):
    shapes = ((0, 3),) * (2 if op in cases.LISTS else 1)
    check(default_case(op, 2, shapes=shapes), [[0, 1], [2, 3]])


def test_permute_to_nobody():
    check(default_case("permute", 3, args={"dst": [2, -1, 0]}), [[0, 2, 4], [5, 3, 1]])


# -- groups of different sizes ---

UNEVEN = [[0, 1, 3], [2]]


@pytest.mark.parametrize("op", ["all_reduce", "all_reduce_coalesced", "broadcast", "reduce"])
def test_uneven_groups_where_shapes_stay(op):
    args = {"src": 0} if op == "broadcast" else {"dst": 0} if op == "reduce" else {}
    for groups in (UNEVEN, [[4, 1], [0, 5, 2], [3]]):
        check(default_case(op, 1, args=args), groups)


@pytest.mark.parametrize("op", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_uneven_groups_where_shapes_differ(op):
    args = {"reduce_op": "sum"} if op in REDUCING else {}
    with pytest.raises(RaggedRanks, match=rf"{op}: its groups have 1 or 3 ranks.*simulate_ranks"):
        COLLECTIVES[op].stacked(torch.ones(4, 6), args, UNEVEN)


def test_a_root_that_not_every_group_has():
    with pytest.raises(RankOutOfGroup, match="src=1 is outside the group of 1 ranks"):
        COLLECTIVES["broadcast"].stacked(torch.ones(4, 6), {"src": 1}, UNEVEN)


@pytest.mark.parametrize(
    "groups", [[[0, 1], [1, 2]], [[0, 1]], [[0, 1, 2, 4]], [[0, 1, 2, 3], []], []]
)
def test_what_is_no_partition(groups):
    with pytest.raises(UnknownGroup, match="must be in one of them, once"):
        COLLECTIVES["all_reduce"].stacked(torch.ones(4), {"reduce_op": "sum"}, groups)


# -- what makes ranks differ in shape ---


def test_sizes_that_differ():
    x = torch.ones(2, 4)
    for op in ("all_gather_into_tensor", "scatter", "gather", "reduce_scatter_tensor"):
        args = {"sizes": [1, 3], "src": 0, "dst": 0, "reduce_op": "sum"}
        with pytest.raises(RaggedRanks, match=rf"{op}: sizes=\[1, 3\] differ"):
            COLLECTIVES[op].stacked(x, args, [[0, 1]])


def test_sizes_that_are_the_same():
    y = COLLECTIVES["all_gather_into_tensor"].stacked(torch.eye(2), {"sizes": [2, 2]}, [[0, 1]])
    assert y.tolist() == [[1, 0, 0, 1]] * 2


def test_splits_that_differ():
    args = {"input_split_sizes": [1, 3], "output_split_sizes": [1, 3]}
    with pytest.raises(RaggedRanks, match="its splits"):
        COLLECTIVES["all_to_all_single"].stacked(torch.ones(2, 4), args, [[0, 1]])


@pytest.mark.parametrize("op", cases.P2P)
def test_messages_between_two_ranks(op):
    with pytest.raises(NoStackedRule, match="permute, which names all of them"):
        COLLECTIVES[op].stacked(torch.ones(2, 4), {}, [[0, 1]])


# -- numbers ---


@pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.complex64])
@pytest.mark.parametrize("reduce_op", ["sum", "avg", "product"])
def test_rank_order_to_the_bit(dtype, reduce_op):
    """40 ranks: torch.sum would add in another order."""
    x_W = cases.values((40, 7), dtype, 3, exact=False)
    got = COLLECTIVES["all_reduce"].stacked(x_W, {"reduce_op": reduce_op}, [range(40)])
    assert torch.equal(bits(got[17]), bits(fold(REDUCTIONS[reduce_op], x_W)))


IN_GROUPS = {
    "rows": [range(20), range(20, 40)],
    "columns": [range(0, 40, 2), range(1, 40, 2)],
    "listed backwards": [range(20, 40), range(20)],
    "each backwards": [range(19, -1, -1), range(39, 19, -1)],
    "one backwards": [range(39, -1, -1)],
    "uneven": [range(3, 40), range(3)],
}


EVEN = [name for name in IN_GROUPS if name != "uneven"]  # where results have one shape
ORDERS = [("all_reduce", name) for name in IN_GROUPS]
ORDERS += [(op, name) for op in ("reduce", "reduce_scatter_tensor") for name in EVEN]


@pytest.mark.parametrize(("op", "name"), ORDERS)
def test_rank_order_in_every_group(op, name):
    groups = [list(g) for g in IN_GROUPS[name]]
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        x_W = cases.values((40, 40), dtype, 3, exact=False)
        if not dtype.is_complex:  # torch.add itself loses the sign of a complex zero
            x_W[:, :4] = -0.0
        y_W = COLLECTIVES[op].stacked(x_W, {"reduce_op": "sum", "dst": 1}, groups)
        for g in groups:
            want = fold(REDUCTIONS["sum"], x_W[g])
            for i, r in enumerate(g):
                if op == "reduce" and i != 1:
                    assert not y_W[r].any()
                    continue
                size = 40 // len(g)
                mine = want[i * size : (i + 1) * size] if op == "reduce_scatter_tensor" else want
                assert torch.equal(bits(y_W[r]), bits(mine)), (r, y_W[r], mine)


@pytest.mark.parametrize("name", ["rows", "columns", "each backwards"])
def test_gradients_are_added_in_rank_order(name):
    """As the adjoint's all_reduce, reduce_scatter and reduce do on real ranks."""
    groups = [list(g) for g in IN_GROUPS[name]]
    x_W, w_W = (cases.values((40, 20), torch.float32, seed, exact=False) for seed in (3, 4))
    wide_W = cases.values((40, 400), torch.float32, 5, exact=False)
    for op, weights in (
        ("all_reduce", w_W),
        ("all_gather_into_tensor", wide_W),
        ("broadcast", w_W),
    ):
        x = x_W.clone().requires_grad_()
        y_W = COLLECTIVES[op].stacked(x, {"reduce_op": "sum", "src": 2}, groups)
        (grad,) = torch.autograd.grad((y_W * weights).sum(), x)
        for g in groups:
            total = fold(REDUCTIONS["sum"], weights[g])
            for i, r in enumerate(g):
                want = total[i * 20 : (i + 1) * 20] if op == "all_gather_into_tensor" else total
                want = want if op != "broadcast" or i == 2 else torch.zeros(20)
                assert torch.equal(grad[r], want), (op, r)


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 3], [2, 1]]])
@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor"]
)
def test_results_that_need_a_gradient_can_be_written_to(op, groups):
    x_W = torch.ones(4, 4, requires_grad=True)

    def gradient(triple: Callable[[Tensor], Tensor]) -> Tensor:
        y_W = COLLECTIVES[op].stacked(x_W, {"reduce_op": "sum", "src": 0}, groups)
        y = y_W[0] if len(groups) == 1 else y_W  # of one group the ranks share a result
        return torch.autograd.grad(triple(y).sum(), x_W)[0]

    assert torch.equal(gradient(lambda y: y.mul_(3)), gradient(lambda y: y * 3))


@pytest.mark.parametrize("reduce_op", ["min", "max", "sum", "product", "avg"])
def test_nan_and_infinities(reduce_op):
    nan, inf = float("nan"), float("inf")
    x_W = torch.tensor([[nan, 1.0, inf, -0.0, inf], [2.0, nan, -inf, -0.0, 1.0]])
    got = COLLECTIVES["all_reduce"].stacked(x_W, {"reduce_op": reduce_op}, [[0, 1]])[0]
    want = fold(REDUCTIONS[reduce_op], x_W)
    assert torch.equal(bits(got)[12:], bits(want)[12:]), (got, want)  # from -0.0 on, to the bit
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("op", ["all_gather_into_tensor", "all_reduce", "broadcast"])
def test_one_group_is_expanded_not_copied(op):
    x_W = torch.ones(64, 1024)
    args = {"reduce_op": "sum", "src": 3}
    for groups in ([range(64)], [range(63, -1, -1)]):
        y = COLLECTIVES[op].stacked(x_W, args, groups)
        assert y.stride(0) == 0
        assert y.untyped_storage().nbytes() <= x_W.untyped_storage().nbytes()


def test_a_writing_form_has_the_rule_of_its_functional_row():
    for row in COLLECTIVES.values():
        if row.mutates:
            assert row.stacked is functional_row(row).stacked


# -- properties ---


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    world = draw(st.integers(1, 12))
    ranks = draw(st.permutations(range(world)))
    n = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return [list(ranks[i : i + n]) for i in range(0, world, n)]


@given(partitions())
@settings(max_examples=60)
def test_cutting_and_placing_are_inverse(groups):
    p = Partition.of(groups)
    x_W = torch.randn(p.world, 3)
    parts = p.members(x_W)
    assert torch.equal(p.placed(parts), x_W)
    total = p.spread(parts.sum(0))
    for g in groups:
        for i, r in enumerate(g):
            torch.testing.assert_close(total[r], x_W[g].sum(0))
            assert p.rank_in_group[r] == i
    only = p.only_on(len(groups[0]) - 1, parts.sum(0))
    assert {r for r in range(p.world) if only[r].any()} == {g[-1] for g in groups}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=60)
def test_axes_of_a_mesh(shape, data):
    axes = data.draw(
        st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True)
    )
    p = Partition.along(shape, *axes)
    coordinates = [divmod_all(r, shape) for r in range(p.world)]
    for g in p.groups:
        others = {tuple(c for i, c in enumerate(coordinates[r]) if i not in axes) for r in g}
        assert len(others) == 1  # members differ only along the axes
        along = [tuple(coordinates[r][a] for a in axes) for r in g]
        assert along == sorted(along)
        assert len(along) == len(set(along))
    if len(axes) == 1:
        assert p.grid is not None


def divmod_all(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        rank, at = divmod(rank, size)
        found.append(at)
    return tuple(reversed(found))


# -- gradients: autograd through a rule is the derivative; test_gradients.py has the adjoints' ---

SMOOTH = [op for op in MOVING if op not in ("barrier",) and not COLLECTIVES[op].mutates]


@pytest.mark.parametrize("op", SMOOTH)
@pytest.mark.parametrize("name", ["rows", "scrambled", "all"])
def test_derivative(op, name):
    groups = [list(g) for g in PARTITIONS[name]]
    for reduce_op in ("sum", "avg", "product", "max") if op in REDUCING else [None]:
        args = {"reduce_op": reduce_op} if reduce_op else {}
        case = default_case(op, len(groups[0]), args=args, exact=False)
        case = Case(op, case.shapes, (torch.float64,) * len(case.dtypes), case.args, exact=False)
        xs_W = [x.requires_grad_() for x in stacked_inputs(case, groups)[1]]
        torch.autograd.gradcheck(lambda *xs: tuple(run(case, groups, list(xs))), xs_W)  # noqa: B023


@pytest.mark.parametrize(
    ("reduce_op", "share"),
    [("sum", 1.0), ("avg", 0.5), ("product", 3.0), ("max", 0.0)],
)
def test_own_gradient(reduce_op, share):
    """grad="identity": rank 0's gradient is its own times its share, not the group's sum."""
    x_W = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64, requires_grad=True)
    args = {"reduce_op": reduce_op, "grad": "identity"}
    y = COLLECTIVES["all_reduce"].stacked(x_W, args, [[0, 1], [2, 3]])
    plain = COLLECTIVES["all_reduce"].stacked(x_W, {"reduce_op": reduce_op}, [[0, 1], [2, 3]])
    assert torch.equal(y, plain)
    w = torch.tensor([10.0, 100.0, 1.0, 1.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad((y * w).sum(), x_W)
    assert grad[0] == 10 * share


def test_own_gradient_again():
    """The gradient of identity is summed: twice differentiated, as the adjoints have it."""
    x_W = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    args = {"reduce_op": "sum", "grad": "identity"}
    y = COLLECTIVES["all_reduce"].stacked(x_W, args, [[0, 1]])
    (g,) = torch.autograd.grad((y**2).sum(), x_W, create_graph=True)
    assert g.tolist() == [10.0, 10.0]  # 2 y, each rank's own
    (gg,) = torch.autograd.grad(g[0], x_W)
    assert gg.tolist() == [2.0, 2.0]
