"""What all ranks share is one row in memory; nobody can tell but by the memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from local.worlds import fake_world
from torch.distributed.tensor.debug import CommDebugMode

from fcoll.local import LocalTensor, LocalTensorMode, rank_map

W = 4
# torch warns of the older name until 2.14
WARNS = hasattr(dist.reduce_scatter_tensor, "__deprecated__")


@pytest.fixture
def mode():
    with fake_world(W), LocalTensorMode(W) as entered:
        yield entered


def ranks(n=3):
    """Rank r has r + 0, 1, 2."""
    return rank_map(lambda r: torch.arange(float(n)) + r) + 0


def values(x):
    return [x._local_tensors[r].tolist() for r in range(W)]


TOTAL = [6.0, 10.0, 14.0]
MAKERS = {
    "all_reduce": lambda: funcol.all_reduce(ranks(), "sum", dist.group.WORLD).wait(),
    "in place": lambda: (x := ranks(), dist.all_reduce(x))[0],
    "factory": lambda: torch.arange(6.0, 15.0, 4.0),
    "op": lambda: torch.arange(6.0, 15.0, 4.0) * 1,
    "broadcast": lambda: (x := ranks() + 1, x.mul_(0).add_(torch.tensor(TOTAL)))[1],
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_writing_to_a_rank_writes_to_no_other(mode, make):
    x = make()
    x._local_tensors[1].zero_()
    assert values(x) == [TOTAL, [0.0] * 3, TOTAL, TOTAL]
    y = make()
    y[0] = rank_map(lambda r: torch.tensor(float(r)))
    assert [row[0] for row in values(y)] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_views_and_the_tensor_see_each_others_writes(mode, make):
    x = make()
    view, same = x[1:], x.contiguous()
    x.add_(1)
    assert values(view) == [[11.0, 15.0]] * W and values(same)[2] == [7.0, 11.0, 15.0]
    view.zero_()
    assert values(x) == [[7.0, 0.0, 0.0]] * W


@pytest.mark.parametrize("see", ["view", "contiguous", "detach", "rows"])
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather"])
def test_who_saw_the_memory_sees_the_result(mode, see, collective):
    x = torch.zeros(W * 3) + 1 if collective == "all_gather" else ranks()
    x._own_stack()
    other = {
        "view": lambda: x.view(-1, 3),
        "contiguous": x.contiguous,
        "detach": x.detach,
        "rows": lambda: x._local_tensors,
    }[see]()
    if collective == "all_reduce":
        dist.all_reduce(x)
    elif collective == "broadcast":
        dist.broadcast(x, src=2)
    else:
        dist.all_gather_single(x, ranks())
    seen = other if see == "rows" else other._local_tensors
    for r in range(W):
        assert torch.equal(seen[r].flatten(), x._local_tensors[r].flatten())
    assert values(x)[0] != values(ranks())[0]


def test_one_row_is_held(mode):
    x = ranks(256)
    y = funcol.all_gather_single(x, 0, dist.group.WORLD).wait()
    assert y._stack.untyped_storage().nbytes() == W * 256 * 4
    assert (y * 2)._stack.untyped_storage().nbytes() == W * 256 * 4


def test_strides_are_those_of_a_rank(mode):
    for shape, strides in (((2, 3), (1, 2)), ((2, 3), (10, 1)), ((3,), (0,))):
        x = torch.empty_strided(shape, strides)
        with mode.disable():
            rows = {x._local_tensors[r].stride() for r in range(W)}
        assert rows == {x.stride()}


def test_written_to_after_inference_mode(mode):
    x = torch.ones(2)
    with torch.inference_mode():
        assert values(x) == [[1.0, 1.0]] * W
    x.add_(1)
    assert values(x) == [[2.0, 2.0]] * W


def test_other_modes_see_the_calls(mode):
    x = ranks()
    with CommDebugMode() as seen:
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
    assert seen.get_total_counts() == 2 and values(x) == [TOTAL] * W


def test_bad_calls_are_torchs_errors(mode):
    with pytest.raises(ValueError):
        dist.broadcast(ranks())
    with pytest.raises(ValueError):
        dist.broadcast(ranks(), src=0, group_src=0)
    with pytest.raises((TypeError, RuntimeError)):
        dist.all_reduce(ranks(), op="sum")
    x = LocalTensor({r: torch.ones(1) for r in range(W)})
    assert dist.all_reduce(x, async_op=True).wait() is not False and values(x) == [[4.0]] * W


def test_reduce_scatter(mode):
    out = torch.zeros(1)
    view = out.view(1)
    x = ranks(W)
    dist.reduce_scatter_single(out, x)
    assert values(out) == [[6.0], [10.0], [14.0], [18.0]] == values(view)
    with pytest.warns(FutureWarning, match="reduce_scatter") if WARNS else nullcontext():
        dist.reduce_scatter_tensor(torch.zeros(1), x)
    with CommDebugMode() as seen:
        dist.reduce_scatter_single(out, x, op=dist.ReduceOp.MAX)
    assert seen.get_total_counts() == 1 and values(out) == [[3.0], [4.0], [5.0], [6.0]]
