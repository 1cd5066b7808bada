"""vmap of a collective is one collective that gives what a loop over the batch gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from calls import BY_ID, CALLS, Call, examples
from torch.utils._python_dispatch import TorchDispatchMode

import fcoll
from fcoll.table.collectives import COLLECTIVES, row_of

Tensor = torch.Tensor

BATCHED = [row.name for row in COLLECTIVES.values() if row.batched]
BATCH = 3


@pytest.mark.parametrize("name", BATCHED)
def test_every_batched_row_has_an_example(name):
    assert examples(name)


def batch(call: Call, rank: int, dim: int, sizes: tuple[int, ...] = (BATCH,)) -> list[Tensor]:
    """The call's inputs, with batch dims in front of dim; 0 and -1 also fit a 0-dim input."""
    xs = call.inputs(rank, dist.get_world_size())
    count = torch.Size(sizes).numel()
    stacked = [torch.stack([x * (b + 1) + b for b in range(count)]) for x in xs]
    return [s.reshape(*sizes, *s.shape[1:]).movedim(0, dim) for s in stacked]


def looped(f: Callable, xs: list[Tensor], dim: int) -> list[Tensor]:
    """[f's results, stacked] of a Python loop over dim."""
    outs = [f(*parts) for parts in zip(*(x.unbind(dim) for x in xs), strict=True)]
    return [torch.stack(list(ys)) for ys in zip(*outs, strict=True)]


def mapped_and_looped(rank: int, id: str) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    call = BY_ID[id]

    def f(*xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(list(xs), rank, dist.get_world_size()))

    dims = [0, -1] + [1] * all(x.dim() > 0 for x in call.inputs(rank, dist.get_world_size()))
    got = {}
    for dim in dims:
        xs = batch(call, rank, dim)
        got[f"in_dims={dim}"] = list(torch.vmap(f, in_dims=dim)(*xs)), looped(f, xs, dim)
    xs = batch(call, rank, 0, (2, BATCH))
    nested = torch.vmap(torch.vmap(f), in_dims=0)(*xs)
    got["nested"] = list(nested), looped(lambda *xs: looped(f, list(xs), 0), xs, 0)
    return got


@pytest.mark.parametrize("id", [c.id for c in CALLS if c.name in [*BATCHED, "identity"]])
def test_vmap_equals_a_loop(ranks2, id):
    for results in ranks2.run(mapped_and_looped, id):
        for how, (mapped, loop) in results.items():
            torch.testing.assert_close(mapped, loop, msg=lambda m, how=how: f"{how}: {m}")


class Collectives(TorchDispatchMode):
    """The names of the collectives issued, waits left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        row = row_of(func)
        if row is not None and row.name != "wait_tensor":
            self.names.append(row.name)
        return func(*args, **(kwargs or {}))


def issued(rank: int, ids: list[str]) -> list[tuple[str, list[str], list[str]]]:
    n = dist.get_world_size()
    got = []
    for id in ids:
        call = BY_ID[id]
        with Collectives() as single:
            fcoll_outs = call(call.inputs(rank, n), rank, n)
        with Collectives() as mapped:
            torch.vmap(lambda *xs, call=call: tuple(call(list(xs), rank, n)))(*batch(call, rank, 0))
        for y in fcoll_outs:
            fcoll.wait_tensor(y)
        got.append((id, mapped.names, single.names))
    return got


def test_vmap_issues_one_collective_for_the_batch(ranks2):
    ids = [c.id for c in CALLS if c.name in BATCHED and c.name != "wait_tensor"]
    for results in ranks2.run(issued, ids):
        for id, mapped, single in results:
            assert mapped == single, id
            assert len(single) >= 1, id


def one_mapped_of_two(rank: int) -> list[list[list[float]]]:
    xs, y = torch.arange(6.0).reshape(2, 3) + rank, torch.tensor([1.0, rank])

    def f(x: Tensor) -> tuple[Tensor, ...]:
        reduced = fcoll.all_reduce_coalesced([x, y])
        gathered = fcoll.all_gather_into_tensor_coalesced([y, x])
        return (*reduced, *gathered)

    return [out.tolist() for out in torch.vmap(f, in_dims=1)(xs)]


def test_a_list_may_hold_tensors_that_are_not_mapped(ranks2):
    for x, y, ys, xs in ranks2.run(one_mapped_of_two):
        assert x == [[1, 7], [3, 9], [5, 11]]
        assert y == [[2, 1]] * 3
        assert ys == [[1, 0, 1, 1]] * 3
        assert xs == [[0, 3, 1, 4], [1, 4, 2, 5], [2, 5, 3, 6]]
