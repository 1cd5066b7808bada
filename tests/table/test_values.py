"""Every collective on real ranks gives what the oracle computes in one process."""

from __future__ import annotations

import cases
import pytest
import strategies
import torch
import torch.distributed as dist
from cases import COMPLEX, DTYPES, FLOATS, FORMS, REDUCE_OPS, REDUCING, ROWS, default_case
from compare import bits, check, same
from hypothesis import given, settings
from oracle import ORACLES, expected, reduced, rounding, wide

import fcoll
from fcoll._torch import work_registry_size

Tensor = torch.Tensor


# -- every row: a failure names it ---


@pytest.mark.parametrize("op", ROWS)
def test_row_has_an_oracle(op):
    assert op in ORACLES, f"write the oracle of {op} in oracle.py"


@pytest.mark.parametrize("op", ROWS)
def test_dtypes(ranks, op):
    n = ranks.world_size
    if op in REDUCING:
        reduce_ops = REDUCE_OPS if n == 2 else ("sum", "avg", "product")  # the rest as with two
        wanted = [
            default_case(op, n, dtypes=(dtype,), args={"reduce_op": reduce_op})
            for dtype in DTYPES
            for reduce_op in reduce_ops
            if cases.has_meaning(reduce_op, dtype)
        ]
    else:
        wanted = [default_case(op, n, dtypes=(dtype,)) for dtype in (*DTYPES, cases.SCALES)]
    check(ranks, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_groups(ranks, form):
    n = cases.size_of(form, ranks.world_size)
    # bfloat16 goes as it is, int16 is folded here
    wanted = [
        default_case(op, n, dtypes=(dtype,), group=form, op_level=op_level)
        for op in ROWS
        if n > 1 or op not in cases.P2P  # nobody sends to itself
        for op_level in (False, True)
        for dtype in (torch.bfloat16, torch.int16)
    ]
    check(ranks, wanted)


@pytest.mark.parametrize("op", ROWS)
def test_shapes_dims_and_layouts(ranks, op):
    every = 1 if ranks.world_size == 2 else 3  # on four ranks of five layouts each in its turn
    check(ranks, list(strategies.grid(op, ranks.world_size))[::every])


@pytest.mark.parametrize(
    "op", [op for op in ROWS if strategies.takes(op, "sizes") or op == "all_to_all_single"]
)
def test_uneven_parts(ranks, op):
    check(ranks, list(strategies.uneven(op, ranks.world_size)))


@pytest.mark.parametrize("op", REDUCING)
def test_rounding(ranks, op):
    """Values that need rounding: each step of the reduction may round once."""
    wanted = [
        default_case(
            op, ranks.world_size, dtypes=(dtype,), args={"reduce_op": reduce_op}, exact=False
        )
        for dtype in (*FLOATS, *COMPLEX)
        for reduce_op in ("sum", "avg", "product")
    ]
    check(ranks, wanted)


@pytest.mark.parametrize("op", ROWS)
def test_any_call(ranks, op):
    @settings(max_examples=12, derandomize=True, database=None)
    @given(strategies.a_case(op, ranks.world_size))
    def property(case):
        check(ranks, [case])

    property()


# -- ways to say which reduction ---


NAMED = ["sum", "SUM", "Sum", "avg", "Product", "mIn", "MAX", "band", "BOR", "BXOR"]
ENUMS = [getattr(dist.ReduceOp, name.upper()) for name in REDUCE_OPS]


def reduce_in_every_way(rank: int, named: bool) -> list[tuple[str, Tensor]]:
    ways = NAMED if named else [*ENUMS, *map(dist.ReduceOp, ENUMS)]
    results = []
    for way in ways:
        name = way.lower() if named else REDUCE_OPS[int(getattr(way, "op", way)) % len(ENUMS)]
        results.append((name, fcoll.wait_tensor(fcoll.all_reduce(part_of(name, rank), way))))
    return results


def part_of(reduce_op: str, rank: int) -> Tensor:
    dtype = torch.int32 if cases.has_meaning(reduce_op, torch.int32) else torch.float32
    return cases.values((4, 3), dtype, rank)


@pytest.mark.parametrize("named", [True, False], ids=["strings", "ReduceOp"])
def test_reduce_op_names(ranks2, named):
    for results in ranks2.run(reduce_in_every_way, named):
        assert {name for name, _ in results} == set(REDUCE_OPS)
        for name, got in results:
            assert same(got, reduced([part_of(name, r) for r in (0, 1)], name)), name


PREMUL_ROWS = [op for op in REDUCING if hasattr(fcoll, op)]


def premul(rank: int, op: str) -> list[Tensor]:
    n = dist.get_world_size()
    ways = [
        {"op": "premul_sum", "factor": 0.5},
        {"op": "PreMul_Sum", "factor": 0.5},
        {"op": dist.ReduceOp.PREMUL_SUM, "factor": 0.5},
        {"op": dist._make_nccl_premul_sum(0.5)},
        {"op": dist._make_nccl_premul_sum(torch.tensor([0.5]))},
    ]
    outputs = []
    for dtype in PREMUL_DTYPES:
        case = default_case(op, n, dtypes=(dtype,))
        for way in ways:
            xs = cases.inputs_of(case, rank, range(n))
            outs = cases.prepared(case, cases.arguments(case, xs, None) | way)(*xs)
            outputs.append([(y.dtype, wide(y)) for y in outs])
    return outputs


PREMUL_DTYPES = (*FLOATS, *COMPLEX, torch.float8_e4m3fn)


@pytest.mark.parametrize("op", PREMUL_ROWS)
def test_premul_sum(ranks2, op):
    answers = ranks2.run(premul, op)
    for i, dtype in enumerate(PREMUL_DTYPES):
        args = {"reduce_op": "premul_sum", "factor": 0.5}
        case = default_case(op, 2, dtypes=(dtype,), args=args)
        inputs = {r: cases.inputs_of(case, r, [0, 1]) for r in (0, 1)}
        want = expected(op, inputs, case.args, [0, 1])
        for r in (0, 1):
            for way in answers[r][5 * i : 5 * i + 5]:
                assert [y.tolist() for _, y in way] == [wide(w).tolist() for w in want[r]]
                assert [d for d, _ in way] == [dtype] * len(way)


def premul_by_an_integer(rank: int) -> Tensor:
    return fcoll.wait_tensor(fcoll.all_reduce(torch.arange(3) + rank, "premul_sum", factor=3))


def test_premul_sum_of_integers(ranks2):
    assert [y.tolist() for y in ranks2.run(premul_by_an_integer)] == [[3, 9, 15]] * 2


# -- lists, transfers, special values ---


def test_coalesced_mixes_dtypes_shapes_and_dims(ranks):
    shapes = ((2, 3), (), (3,), (2, 0), (1, 2, 2), (2, 2), (4,), (2, 1))
    dtypes = (torch.float32, torch.int8, torch.bool, torch.float32, torch.bfloat16, torch.complex64)
    dtypes = (*dtypes, torch.uint32, torch.float32)
    dims = [1, 0, -1, 0, 2, -2, 0, 1]
    wanted = []
    for op in cases.LISTS:
        kept = [i for i, s in enumerate(shapes) if s or op not in cases.SCATTERS]
        args = {"dims": [dims[i] for i in kept]} if strategies.takes(op, "dims") else {}
        for layout in strategies.layouts(op):
            wanted.append(
                default_case(
                    op,
                    ranks.world_size,
                    shapes=tuple(shapes[i] for i in kept),
                    dtypes=tuple(dtypes[i] for i in kept),
                    args=args,
                    layout=layout,
                )
            )
    check(ranks, wanted)


def transfers_out_of_order(rank: int) -> list:
    """Tags, not the order, say which transfer is which; results may be waited for in any order."""
    peer, before = 1 - rank, work_registry_size()
    xs = [torch.full((i + 1,), 10.0 * rank + i) for i in range(3)]
    tokens = [fcoll.isend(x, peer, tag=i) for i, x in enumerate(xs)]
    got = [fcoll.irecv(xs[i], peer, tag=i) for i in (2, 0, 1)]
    values = [y.tolist() for y in reversed(got)]
    sent = [tuple(fcoll.wait_tensor(token).shape) for token in reversed(tokens)]
    return [values, sent, work_registry_size() - before]


def test_transfers_out_of_order(ranks2):
    for rank, (values, sent, left) in enumerate(ranks2.run(transfers_out_of_order)):
        first = 10.0 * (1 - rank)
        assert values == [[first + 1] * 2, [first], [first + 2] * 3]
        assert sent == [(0,)] * 3
        assert left == 0


def transfers_of_mixed_dtypes(rank: int) -> list:
    peer = 1 - rank
    xs = [torch.tensor([rank, 2], dtype=torch.int64), torch.tensor(rank == 1), torch.ones(2, 2)]
    receives = [("irecv", x, peer) for x in xs]
    sends = [("isend", x, peer) for x in xs]
    order = [*receives, *sends] if rank else [*sends, *receives]
    outs = [fcoll.wait_tensor(y).tolist() for y in fcoll.batch_p2p(order)]
    return outs[:3] if rank else outs[3:]


def test_batch_p2p_of_mixed_dtypes(ranks2):
    assert ranks2.run(transfers_of_mixed_dtypes) == [
        [[1, 2], True, [[1.0, 1.0]] * 2],
        [[0, 2], False, [[1.0, 1.0]] * 2],
    ]


def reduce_special_values(rank: int) -> dict:
    inf, nan = float("inf"), float("nan")
    table = [[nan, 1.0, inf, -inf, inf, -0.0], [1.0, nan, inf, -inf, -inf, -0.0]]
    results = {}
    for dtype in (*FLOATS, torch.float8_e5m2):
        x = torch.tensor(table[rank]).to(dtype)
        for op in ("sum", "product", "min", "max"):
            y = fcoll.wait_tensor(fcoll.all_reduce(x, op))
            results[str(dtype), op] = (y.double().tolist(), bits(y).tolist())
    return results


def test_special_values(ranks2):
    """The bits are the same on all ranks, with NaN too; NaN and infinities go through a sum."""
    first, second = ranks2.run(reduce_special_values)
    for key, (values, raw) in first.items():
        assert raw == second[key][1], key
        if key[1] == "sum":
            assert str(values) == "[nan, nan, inf, -inf, nan, -0.0]", key


def big_sums(rank: int) -> list[bytes]:
    """Messages that a backend cuts into segments."""
    raws = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        y = fcoll.all_reduce(cases.values((100_003,), dtype, rank, exact=False))
        raws.append(bits(fcoll.wait_tensor(y)).numpy().tobytes())
    return raws


def test_same_bits_of_a_big_sum(ranks):
    answers = ranks.run(big_sums)
    assert all(raws == answers[0] for raws in answers)
    parts = [cases.values((100_003,), torch.float32, r, exact=False) for r in range(len(answers))]
    got = torch.frombuffer(bytearray(answers[0][0]), dtype=torch.float32)
    assert same(got, reduced(parts, "sum"), rounding(parts, "sum"))


def write_through_a_view(rank: int) -> list:
    """In-place ops write the argument's elements and no others."""
    base = torch.arange(12.0).reshape(3, 4) + rank
    fcoll.wait_tensor(torch.ops.fcoll.all_reduce_(base[:, ::2], "sum", dist.group.WORLD.group_name))
    other = torch.arange(6.0).reshape(2, 3) * (rank + 1)
    fcoll.wait_tensor(torch.ops.fcoll.broadcast_(other.t()[1:], 1, dist.group.WORLD.group_name))
    return [base.tolist(), other.tolist()]


def test_in_place_writes_through_a_view(ranks2):
    for rank, (base, other) in enumerate(ranks2.run(write_through_a_view)):
        whole = torch.arange(12.0).reshape(3, 4)
        want = whole + rank
        want[:, ::2] = 2 * whole[:, ::2] + 1
        assert base == want.tolist()
        want = torch.arange(6.0).reshape(2, 3) * (rank + 1)
        want[:, 1:] = torch.arange(6.0).reshape(2, 3)[:, 1:] * 2
        assert other == want.tolist()


def arrive_in_turn(rank: int, form: str) -> list[int]:
    """Each rank stamps the store before the barrier and counts the stamps after it."""
    group = cases.Groups()[form]
    store = dist.PrefixStore(form, dist.distributed_c10d._get_default_store())
    store.add("stamps", 1)
    fcoll.barrier(group)
    return store.add("stamps", 0)


@pytest.mark.parametrize("form", ["None", "1-D mesh", "unsorted"])
def test_barrier(ranks, form):
    assert ranks.run(arrive_in_turn, form) == [ranks.world_size] * ranks.world_size
