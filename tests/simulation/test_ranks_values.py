"""Every collective on simulated ranks gives what the oracle computes, as on real ranks."""

from __future__ import annotations

import cases
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, FORMS, REDUCE_OPS, REDUCING, ROWS, default_case
from compare import check
from torch.utils._pytree import tree_map_only

import fcoll

N = 4


class Simulated:
    """Simulated ranks with the face of a RankPool."""

    def __init__(self, world_size):
        self.world_size = world_size

    def run(self, fn, *args, timeout=60.0):
        def on_rank(rank):
            torch.manual_seed(rank)
            return fn(rank, *args)

        return fcoll.simulate_ranks(on_rank, self.world_size, timeout=timeout)


@pytest.fixture(params=[2, N])
def ranks(request):
    return Simulated(request.param)


@pytest.mark.parametrize("op", ROWS)
def test_rows_of_all_dtypes(ranks, op):
    if op in REDUCING:
        wanted = [
            default_case(op, ranks.world_size, dtypes=(dtype,), args={"reduce_op": reduce_op})
            for dtype in DTYPES
            for reduce_op in REDUCE_OPS
            if cases.has_meaning(reduce_op, dtype)
        ]
    else:
        wanted = [
            default_case(op, ranks.world_size, dtypes=(dtype,)) for dtype in (*DTYPES, cases.SCALES)
        ]
    check(ranks, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_rows_on_all_groups(ranks, form):
    n = cases.size_of(form, ranks.world_size)
    wanted = [
        default_case(op, n, dtypes=(dtype,), group=form, op_level=op_level)
        for op in ROWS
        if n > 1 or op not in cases.P2P
        for op_level in (False, True)
        for dtype in (torch.bfloat16, torch.int16)
    ]
    check(ranks, wanted)


# -- torch.distributed's own calls: equal to what real ranks get ---


def c10d_calls(rank):
    """Each in-place collective of torch.distributed once, in all its forms."""
    n, found = dist.get_world_size(), {}

    def x(*shape, dtype=torch.float64):
        count = torch.Size(shape).numel()
        return (torch.arange(count, dtype=dtype) + 10 * rank + 1).reshape(shape)

    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        y = x(2, 3)
        dist.all_reduce(y, getattr(dist.ReduceOp, op))
        found[f"all_reduce {op}"] = y
    for op in ("BAND", "BOR", "BXOR"):
        y = x(4, dtype=torch.int32)
        work = dist.all_reduce(y, getattr(dist.ReduceOp, op), async_op=True)
        work.wait()
        found[f"all_reduce {op}"] = y
    with dist._coalescing_manager():
        ys = [x(2), x(3)]
        for y in ys:
            dist.all_reduce(y)
    found["coalesced"] = ys
    found["all_gather"] = [torch.empty(2, 2, dtype=torch.float64) for _ in range(n)]
    dist.all_gather(found["all_gather"], x(2, 2))
    out = torch.empty(2 * n, 3, dtype=torch.float64)
    dist.all_gather_single(out, x(2, 3))
    found["all_gather_single"] = out
    out = torch.empty(2, dtype=torch.float64)
    dist.reduce_scatter_single(out, x(2 * n))
    found["reduce_scatter_single"] = out
    out = torch.empty(2, dtype=torch.float64)
    dist.reduce_scatter(out, list(x(2 * n).chunk(n)))
    found["reduce_scatter"] = out
    out = torch.empty(n, 2, dtype=torch.float64)
    dist.all_to_all_single(out, x(n, 2))
    found["all_to_all_single"] = out
    ins = [(rank + to) % 3 for to in range(n)]
    outs = [(rank + source) % 3 for source in range(n)]
    out = torch.empty(sum(outs), 2, dtype=torch.float64)
    dist.all_to_all_single(out, x(sum(ins), 2), outs, ins)
    found["uneven"] = out
    y = x(3)
    dist.broadcast(y, src=1)
    found["broadcast"] = y
    y = x(3)
    dist.reduce(y, dst=n - 1)
    found["reduce"] = y if rank == n - 1 else None  # elsewhere it is anything
    parts = [torch.empty(2, dtype=torch.float64) for _ in range(n)] if rank == 1 else None
    dist.gather(x(2), parts, dst=1)
    found["gather"] = parts
    y = torch.empty(2, dtype=torch.float64)
    dist.scatter(y, list(x(n, 2)) if rank == 0 else None, src=0)
    found["scatter"] = y
    found |= c10d_messages(rank, n, x)
    return found


def c10d_messages(rank, n, x):
    found = {}
    y = torch.empty(2, dtype=torch.float64)
    ops = [dist.P2POp(dist.isend, x(2), (rank + 1) % n), dist.P2POp(dist.irecv, y, (rank - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    found["ring"] = y
    if rank == 0:
        sources = []
        for _ in range(1, n):
            z = torch.empty(1, dtype=torch.float64)
            sources.append((dist.recv(z, tag=3), z.item()))
        found["any source"] = sorted(sources)
    else:
        dist.send(x(1), 0, tag=3)
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    shared = [rank, "of", n] if rank == 1 else [None] * 3
    dist.broadcast_object_list(shared, src=1)
    gathered = [None] * n if rank == 0 else None
    dist.gather_object(("from", rank), gathered, dst=0)
    mine = [None]
    dist.scatter_object_list(mine, [f"to {r}" for r in range(n)] if rank == 1 else None, src=1)
    sent = [None, None]
    if rank == 0:
        dist.send_object_list(["a", 2], dst=1)
    if rank == 1:
        dist.recv_object_list(sent, src=0)
    dist.barrier()
    dist.monitored_barrier()
    return found | {"objects": [objects, shared, gathered, mine, sent]}


def test_torch_distributed_as_on_real_ranks(ranks4):
    real = ranks4.run(c10d_calls)
    simulated = fcoll.simulate_ranks(c10d_calls, N)
    for mine, theirs in zip(simulated, real, strict=True):
        assert mine.keys() == theirs.keys()
        assert flat(mine) == flat(theirs)


def flat(found):
    return tree_map_only(torch.Tensor, torch.Tensor.tolist, found)


def test_a_sparse_sum():
    def summed(rank):
        rows = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,), check_invariants=True)
        dist.all_reduce(rows)
        return rows.to_dense().tolist()

    assert fcoll.simulate_ranks(summed, 2) == [[1.0, 1.0, 4.0, 0.0]] * 2
