"""What torch's functional collectives get wrong or refuse, and fcoll does not.

Each test names what torch 2.13 does instead. In-place calls of torch.distributed and their handles
are in test_dist.py.
"""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll import AsyncCollectiveTensor, _torch
from fcoll.eager import async_tensor
from fcoll.errors import UnevenShard
from fcoll.groups import group_name

Tensor = torch.Tensor


def broadcast_gradient(rank: int) -> list[float]:
    x = torch.ones(2, requires_grad=True)
    (fcoll.broadcast(x, 0) * (rank + 1)).sum().backward()
    return x.grad.tolist()


def test_gradient_of_broadcast(ranks2):
    # torch: [1, 1] and [2, 2], as if broadcast were the identity
    assert ranks2.run(broadcast_gradient) == [[3, 3], [0, 0]]


def gradients_of_reductions(rank: int) -> dict[str, float]:
    grads = {}
    for op in ("avg", "product", "min", "max"):
        x = torch.tensor(rank + 2.0, requires_grad=True)
        fcoll.all_reduce(x, op).backward()
        grads[op] = x.grad.item()
    return grads


def test_gradient_of_reductions_other_than_sum(ranks2):
    # torch: RuntimeError, only sum has one
    first, second = ranks2.run(gradients_of_reductions)
    assert first == {"avg": 1, "product": 6, "min": 2, "max": 0}
    assert second == {"avg": 1, "product": 4, "min": 0, "max": 2}


def premul_sums(rank: int) -> list[float]:
    x = torch.tensor(rank + 1.0)
    by_name = fcoll.all_reduce(x, "premul_sum", factor=0.5)
    by_object = fcoll.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    return [by_name.item(), by_object.item()]


def test_premul_sum(ranks2):
    # torch: ValueError, and gloo has none either
    assert ranks2.run(premul_sums) == [[1.5, 1.5]] * 2


def permuted(rank: int, shape: tuple[int, ...]) -> Tensor:
    return fcoll.permute(torch.full(shape, float(rank)), [1, 0]) + 0


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 3), (2, 3, 4)])
def test_permute_of_any_shape(ranks2, shape):
    # torch: permute_tensor takes only 1-dim tensors
    for rank, y in enumerate(ranks2.run(permuted, shape)):
        assert torch.equal(y, torch.full(shape, 1.0 - rank))


def lists_after_the_call(rank: int) -> None:
    xs = [torch.ones(4, 2), torch.ones(2, 4)]
    before, copies = list(xs), [x.clone() for x in xs]
    for call in (
        lambda: fcoll.reduce_scatter_tensor_coalesced(xs, "avg", dim=[0, 1]),
        lambda: fcoll.reduce_scatter_tensor_coalesced(xs, "premul_sum", dim=1, factor=3.0),
        lambda: fcoll.all_reduce_coalesced(xs, "premul_sum", factor=3.0),
        lambda: fcoll.all_gather_into_tensor_coalesced(xs, dim=1),
    ):
        for y in call():
            fcoll.wait_tensor(y)
        assert all(a is b for a, b in zip(xs, before, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(xs, copies, strict=True))


def test_the_callers_list_is_left_alone(ranks2):
    # torch: reduce_scatter_tensor_coalesced puts its rearranged tensors into it
    ranks2.run(lists_after_the_call)


def uneven(rank: int, name: str) -> None:
    x = torch.ones(4, 3)
    {
        "reduce_scatter_tensor": lambda: fcoll.reduce_scatter_tensor(x, dim=1),
        "scatter": lambda: fcoll.scatter(x, 0, dim=-1),
        "all_to_all_single": lambda: fcoll.all_to_all_single(x.t()),
        "shard_dim_alltoall": lambda: fcoll.shard_dim_alltoall(x, 0, 1),
    }[name]()


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("reduce_scatter_tensor", 1),
        ("scatter", 1),
        ("all_to_all_single", 0),
        ("shard_dim_alltoall", 1),
    ],
)
def test_an_uneven_dim_is_an_error_of_the_call_that_names_it(ranks2, name, dim):
    # torch: reduce_scatter_tensor names dim 0 whatever the dim, all_to_all_single fails at the wait
    for error in ranks2.run_expecting(uneven, name):
        assert isinstance(error, UnevenShard)
        assert name in str(error) and f"needs dim {dim} (3) divisible by 2" in str(error)
        assert "tests/test_gaps.py:" in str(error)


def gathered_numbers(rank: int) -> tuple[list[float], torch.Size]:
    y = fcoll.all_gather_into_tensor(torch.tensor(float(rank)))
    fake = fcoll.all_gather_into_tensor(torch.tensor(0.0, device="meta"))
    return y.tolist(), fake.shape


def test_all_gather_of_numbers(ranks2):
    # torch: fails on gloo, while the meta kernel gives [2]
    assert ranks2.run(gathered_numbers) == [([0, 1], (2,))] * 2


def complex_exchanged(rank: int, dtype: torch.dtype) -> list[complex]:
    x = torch.tensor([rank + 1j, rank - 1j], dtype=dtype)
    return fcoll.all_to_all_single(x).tolist()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_all_to_all_of_complex(ranks2, dtype):
    # torch: "Invalid scalar type"
    assert ranks2.run(complex_exchanged, dtype) == [[1j, 1 + 1j], [-1j, 1 - 1j]]


def enum_and_no_group(rank: int) -> list[float]:
    x = torch.tensor(rank + 1.0)
    results = [
        fcoll.all_reduce(x, dist.ReduceOp.MAX, None),
        fcoll.all_reduce(x, dist.ReduceOp.SUM),
        fcoll.all_reduce(x, "SUM", dist.group.WORLD),
        fcoll.reduce(x, 0, dist.ReduceOp(dist.ReduceOp.MIN)) + rank,
    ]
    return [y.item() for y in results]


def test_reduce_op_enum_and_no_group(ranks2):
    # torch: AttributeError for the enum, ValueError for the group
    assert ranks2.run(enum_and_no_group) == [[2, 3, 3, 1]] * 2


def deep_copies(rank: int) -> None:
    y = fcoll.all_reduce(torch.ones(2))
    a, b = copy.deepcopy([y, y])
    assert a is b and type(a) is Tensor and a.tolist() == [2, 2]
    a.zero_()
    assert y.tolist() == [2, 2]


def test_deepcopy(ranks2):
    # torch: NotImplementedError
    ranks2.run(deep_copies)


def views_after_the_wait(rank: int) -> None:
    y = fcoll.all_reduce(torch.ones(4))
    assert isinstance(y, AsyncCollectiveTensor)
    early = y.view(2, 2)
    assert y.sum() == 8
    for view in (early.t(), y.view(2, 2), y[1:]):
        assert type(view) is Tensor  # torch: another AsyncCollectiveTensor, which waits again
    assert early.completed


def test_views_of_a_completed_one(ranks2):
    ranks2.run(views_after_the_wait)


def report(rank: int) -> str:
    y = fcoll.all_reduce(torch.ones(4))
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        async_tensor._report_unwaited()
    fcoll.wait_tensor(y)
    return stderr.getvalue()


def test_the_unwaited_are_reported_with_their_line(ranks2):
    # torch: how many there are, without where; at exit, as in test_async_tensor.py
    line = report.__code__.co_firstlineno + 1
    for text in ranks2.run(report):
        assert f"all_reduce at tests/test_gaps.py:{line}\n" in text


# -- a group given by its ranks, which only its members make. With torch's
# new_group(use_local_synchronization=True) both would wait for each other for ever, since it names
# a group after the number of groups that the process has.


def sums_over_overlapping_groups(rank: int) -> list[float]:
    groups = [[0, 1], [0, 2], [1, 3], [3, 2, 0]]
    x = torch.tensor(float(rank))
    return [fcoll.all_reduce(x, "sum", g).item() for g in groups if rank in g]


def test_members_of_different_numbers_of_groups(ranks4):
    assert ranks4.run(sums_over_overlapping_groups) == [[1, 2, 5], [1, 4], [2, 5], [4, 5]]


def parts_of_a_remade_group(rank: int) -> tuple[list[float], set[str]]:
    parts, names = [], set()
    for _ in range(3):
        parts += fcoll.all_gather_into_tensor(torch.tensor(float(rank)), [1, 0]).tolist()
        names.add(group_name([1, 0]))
        fcoll.barrier()
        dist.destroy_process_group(_torch.resolve_process_group(group_name([1, 0])))
    return parts, names


def test_a_group_made_again_after_it_was_destroyed(ranks2):
    for parts, names in ranks2.run(parts_of_a_remade_group):
        assert parts == [1, 0] * 3
        assert len(names) == 3  # under an old name, gloo may find the old address of a peer
