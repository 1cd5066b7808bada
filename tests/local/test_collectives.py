"""Every collective on LocalTensors, against the oracle: any groups, ops and shapes."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from local.worlds import fake_world
from torch.distributed.device_mesh import DeviceMesh

from fcoll.errors import UnevenShard
from fcoll.local import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    _torch,
    maybe_disable_local_tensor_mode,
)

W = 4
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

# torch renamed them, and warns
all_gather_single = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter_single = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)


def all_gather_into(*args, **kwargs):
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(*args, **kwargs)


def reduce_scatter_into(*args, **kwargs):
    return getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(*args, **kwargs)


# ranks of the group that rank 0 is given -> the groups of all ranks
GROUPS = {
    "world": ([0, 1, 2, 3], [[0, 1, 2, 3]]),
    "rows": ([0, 1], [[0, 1], [2, 3]]),
    "columns": ([0, 2], [[0, 2], [1, 3]]),
    "irregular": ([0, 1, 3], [[0, 1, 3]]),
    "unsorted": ([2, 0, 3, 1], [[2, 0, 3, 1]]),
    "not_first": ([1, 0], [[1, 0], [3, 2]]),
}


def given(shape=(12, 2), dtype=torch.float32, seed=0) -> dict[int, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    with maybe_disable_local_tensor_mode():
        return {r: torch.randint(-8, 9, shape, generator=g).to(dtype) for r in range(W)}


def zeros(*shape) -> dict[int, torch.Tensor]:
    with maybe_disable_local_tensor_mode():
        return {r: torch.zeros(shape) for r in range(W)}


def made(xs, stored) -> LocalTensor:
    x = LocalTensor({r: t.clone() for r, t in xs.items()})
    return x.clone() if stored == "stack" else x


def group_of(name):
    ranks, all_groups = GROUPS[name]
    if name == "world":
        return None, all_groups
    return dist.new_group(ranks, sort_ranks=False), all_groups


def wanted(op, xs, args, all_groups):
    """By rank; ranks of no group keep what they have."""
    found = {r: t for r, t in xs.items()}
    for g in all_groups:
        for r, (y,) in oracle.expected(op, {r: [xs[r]] for r in g}, args, g).items():
            found[r] = y
    return found


def same(x: LocalTensor, wants) -> None:
    assert sorted(x._ranks) == sorted(wants)
    for r, t in wants.items():
        torch.testing.assert_close(x._local_tensors[r], t, msg=lambda m: f"rank {r}: {m}")  # noqa: B023


def waited(y):
    return y.wait() if isinstance(y, funcol.AsyncCollectiveTensor) else y


@pytest.fixture(params=["stack", "apart"])
def stored(request):
    return request.param


@pytest.fixture(params=list(GROUPS))
def world(request):
    with fake_world(W), LocalTensorMode(W):
        yield group_of(request.param)


OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip


FLOATS, INTEGERS = (torch.float32, torch.bfloat16), (torch.int32, torch.bool)
DTYPES = {"avg": FLOATS, "band": INTEGERS, "bor": INTEGERS, "bxor": INTEGERS}


@pytest.mark.parametrize(
    ("op", "dtype"), [(op, dtype) for op in OPS for dtype in DTYPES.get(op, FLOATS + INTEGERS)]
)
def test_all_reduce_ops(op, dtype):
    xs = given((3, 2), dtype)
    with fake_world(W), LocalTensorMode(W):
        x = made(xs, "stack")
        dist.all_reduce(x, OPS[op])
        y = funcol.all_reduce(made(xs, "apart"), op, dist.group.WORLD)
    wants = wanted("all_reduce", xs, {"reduce_op": op}, [[0, 1, 2, 3]])
    same(x, wants)
    same(y + 0 if dtype != torch.bool else y | False, wants)


@pytest.mark.parametrize("factor", [2.5, torch.tensor([0.5])])
def test_premul_sum(world, stored, factor):
    group, all_groups = world
    xs = given()
    x = made(xs, stored)
    dist.all_reduce(x, dist._make_nccl_premul_sum(factor), group=group)
    number = float(factor)
    scaled = {r: t * number if any(r in g for g in all_groups) else t for r, t in xs.items()}
    same(x, wanted("all_reduce", scaled, {"reduce_op": "sum"}, all_groups))


def test_in_place(world, stored):
    group, all_groups = world
    xs = given()
    x = made(xs, stored)
    view = x[1]
    dist.all_reduce(x, group=group)
    wants = wanted("all_reduce", xs, {"reduce_op": "sum"}, all_groups)
    same(x, wants)
    same(view, {r: t[1] for r, t in wants.items()})
    y = made(xs, stored)
    dist.all_reduce_coalesced([y], group=group)
    same(y, wants)
    for src in range(len(all_groups[0])):
        z = made(xs, stored)
        dist.broadcast(z, group_src=src, group=group)
        same(z, wanted("broadcast", xs, {"src": src}, all_groups))
        z = made(xs, stored)
        dist.reduce(z, group_dst=src, group=group)
        roots = [g[src] for g in all_groups]
        same(z, {r: wants[r] if r in roots else xs[r] for r in xs})


def test_into_a_tensor(world, stored):
    group, all_groups = world
    n, members = len(all_groups[0]), {r for g in all_groups for r in g}
    xs = given()
    out = made(zeros(12 * n, 2), stored)
    all_gather_into(out, made(xs, stored), group=group)
    wants = wanted("all_gather_into_tensor", xs, {}, all_groups)
    none = zeros(12 * n, 2)
    same(out, {r: wants[r] if r in members else none[r] for r in xs})
    out = made(zeros(12 // n, 2), stored)
    reduce_scatter_into(out, made(xs, stored), group=group)
    wants = wanted("reduce_scatter_tensor", xs, {"reduce_op": "sum"}, all_groups)
    none = zeros(12 // n, 2)
    same(out, {r: wants[r] if r in members else none[r] for r in xs})
    out = made(zeros(12, 2), stored)
    dist.all_to_all_single(out, made(xs, stored), group=group)
    args = {"input_split_sizes": [12 // n] * n, "output_split_sizes": [12 // n] * n}
    wants = wanted("all_to_all_single", xs, args, all_groups)
    same(out, {r: wants[r] if r in members else zeros(12, 2)[r] for r in xs})


def test_lists(world, stored):
    group, all_groups = world
    n, members = len(all_groups[0]), {r for g in all_groups for r in g}
    mine = {r: g for g in all_groups for r in g}
    nothing = zeros(12, 2)
    xs, many = given(), [given(seed=i) for i in range(n)]

    def outs():
        return [made(nothing, stored) for _ in range(n)]

    def ins():
        return [made(m, stored) for m in many]

    lists = outs()
    dist.all_gather(lists, made(xs, stored), group=group)
    for i, y in enumerate(lists):
        same(y, {r: xs[mine[r][i]] if r in members else nothing[r] for r in xs})
    lists = outs()
    dist.all_to_all(lists, ins(), group=group)
    for i, y in enumerate(lists):
        same(y, {r: many[mine[r].index(r)][mine[r][i]] if r in members else nothing[r] for r in xs})
    out = made(nothing, stored)
    dist.reduce_scatter(out, ins(), group=group)
    sums = [wanted("all_reduce", m, {"reduce_op": "sum"}, all_groups) for m in many]
    same(out, {r: sums[mine[r].index(r)][r] if r in members else nothing[r] for r in xs})
    for root in range(n):
        lists = outs()
        dist.gather(made(xs, stored), lists, group_dst=root, group=group)
        for i, y in enumerate(lists):
            roots = {g[root]: g for g in all_groups}
            same(y, {r: xs[roots[r][i]] if r in roots else nothing[r] for r in xs})
        out = made(nothing, stored)
        dist.scatter(out, ins(), group_src=root, group=group)
        same(out, {
            r: many[mine[r].index(r)][mine[r][root]] if r in members else nothing[r] for r in xs
        })  # fmt: skip


FUNCTIONAL = {
    "all_reduce": (lambda x, g, n: funcol.all_reduce(x, "max", g), {"reduce_op": "max"}),
    "all_gather_into_tensor": (lambda x, g, n: all_gather_single(x, 0, g), {}),
    "reduce_scatter_tensor": (
        lambda x, g, n: reduce_scatter_single(x, "sum", 0, g),
        {"reduce_op": "sum"},
    ),
    "broadcast": (lambda x, g, n: funcol.broadcast(x, 0, g), {"src": 0}),
    "permute": (
        lambda x, g, n: funcol.permute_tensor(x, [(i + 1) % n for i in range(n)], g),
        {"dst": "next"},
    ),
    "all_to_all_single": (lambda x, g, n: funcol.all_to_all_single(x, None, None, g), "splits"),
}


@pytest.mark.parametrize("op", FUNCTIONAL)
def test_functional(world, stored, op):
    group, all_groups = world
    group = group or dist.group.WORLD
    n = len(all_groups[0])
    call, args = FUNCTIONAL[op]
    if args == "splits":
        args = {"input_split_sizes": [12 // n] * n, "output_split_sizes": [12 // n] * n}
    elif "dst" in args:
        args = {"dst": [(i + 1) % n for i in range(n)]}
    xs = given()
    x = made(xs, stored)
    if op == "broadcast":  # torch's broadcast takes a rank of the world
        group_src = all_groups[0][0]
        y = torch.ops._c10d_functional.broadcast(x, 0, group.group_name)
        assert group_src in xs
    else:
        y = call(x, group, n)
    y = waited(y)
    same(y, wanted(op, xs, args, all_groups))
    y.zero_()  # results share no memory with inputs, nor ranks with one another
    same(x, xs)
    y._local_tensors[0].add_(1)
    assert y._local_tensors[1].sum() == 0


def test_functional_by_process_group():
    xs = given()
    with fake_world(W), LocalTensorMode(W):
        group = dist.new_group([0, 2])
        y = torch.ops._c10d_functional.all_reduce(made(xs, "stack"), "sum", group)
    same(y, wanted("all_reduce", xs, {"reduce_op": "sum"}, [[0, 2], [1, 3]]))


@pytest.mark.parametrize("each_rank_its_own", [False, True])
def test_uneven_all_to_all(each_rank_its_own):
    sends = [[1, 0, 2, 3], [2, 2, 1, 0], [0, 3, 1, 1], [1, 1, 1, 1]]
    if not each_rank_its_own:
        sends = [[1, 2, 0, 3]] * 4
    xs = {r: torch.randn(sum(s), 2) for r, s in enumerate(sends)}
    rec = [[sends[i][j] for i in range(W)] for j in range(W)]

    def ints(table, j):
        values = {r: table[r][j] for r in range(W)}
        return torch.SymInt(LocalIntNode(values)) if len(set(values.values())) > 1 else values[0]

    with fake_world(W), LocalTensorMode(W):
        group = dist.group.WORLD
        splits = [ints(rec, j) for j in range(W)], [ints(sends, j) for j in range(W)]
        y = funcol.all_to_all_single(LocalTensor(xs), *splits, group)
    parts = [x.split(s) for x, s in zip(xs.values(), sends, strict=True)]
    same(waited(y), {j: torch.cat([parts[i][j] for i in range(W)]) for j in range(W)})


def test_uneven_shards():
    xs = {r: torch.randn(r + 1, 2) for r in range(W)}
    with fake_world(W), LocalTensorMode(W):
        y = all_gather_single(LocalTensor(xs), 0, dist.group.WORLD)
        lists = [LocalTensor({r: torch.zeros(i + 1, 2) for r in range(W)}) for i in range(W)]
        dist.all_gather(lists, LocalTensor(xs))
        ins = [LocalTensor({r: torch.full((i + 1,), 1.0) for r in range(W)}) for i in range(W)]
        out = LocalTensor({r: torch.zeros(r + 1) for r in range(W)})
        dist.reduce_scatter(out, ins)
    same(waited(y), dict.fromkeys(range(W), torch.cat(list(xs.values()))))
    for i, got in enumerate(lists):
        same(got, dict.fromkeys(range(W), xs[i]))
    same(out, {r: torch.full((r + 1,), 4.0) for r in range(W)})


def test_a_dim_that_does_not_divide_is_an_error():
    with fake_world(W), LocalTensorMode(W):
        x = made(given((5, 2)), "stack")
        with pytest.raises(UnevenShard, match="5"):
            torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", W, dist.group.WORLD)


def test_the_groups_of_a_mesh_are_its_fibers():
    """Also where ranks are not in order: the groups of a mesh's dim are not translations."""
    xs = given()
    with fake_world(W), LocalTensorMode(W):
        mesh = DeviceMesh("cpu", [[0, 2], [3, 1]], mesh_dim_names=("a", "b"))
        for dim, all_groups in (("a", [[0, 3], [2, 1]]), ("b", [[0, 2], [3, 1]])):
            y = all_gather_single(made(xs, "stack"), 0, mesh[dim])
            same(waited(y), wanted("all_gather_into_tensor", xs, {}, all_groups))


def test_the_rank_is_an_int_of_each_rank():
    with fake_world(W):
        with LocalTensorMode(W) as mode:
            assert dist.get_rank().node._local_ints == {0: 0, 1: 1, 2: 2, 3: 3}
            columns = dist.new_group([0, 2])
            assert dist.get_rank(columns).node._local_ints == {0: 0, 1: 0, 2: 1, 3: 1}
            alone = dist.new_group([0, 1, 3])
            assert dist.get_rank(alone).node._local_ints == {0: 0, 1: 1, 2: -1, 3: 2}
            x = torch.zeros(()) + dist.get_rank()
            assert x._local_tensors[3] == 3
            with mode.disable():
                assert dist.get_rank() == 0
        assert dist.get_rank() == 0


def test_barriers_and_objects():
    with fake_world(W), LocalTensorMode(W):
        dist.barrier()
        found = [None] * W
        dist.all_gather_object(found, {"a": 1})
    assert found == [{"a": 1}] * W


def test_plain_tensors_are_refused():
    plain, longer = torch.ones(2), torch.ones(8)
    with fake_world(W), LocalTensorMode(W):
        local = torch.zeros(8)
        with pytest.raises(AssertionError, match="must be a LocalTensor"):
            reduce_scatter_into(torch.zeros(2), longer)
        with pytest.raises(AssertionError, match="must be a LocalTensor"):
            all_gather_into(plain, local)
        if _torch.OBJECTS_IN_ONE_TENSOR:  # all_gather_object needs it: the same on all ranks
            all_gather_into(local, plain)
            assert local.reconcile().tolist() == [1] * 8
        else:
            with pytest.raises(AssertionError, match="must be a LocalTensor"):
                all_gather_into(local, plain)
