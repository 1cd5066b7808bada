"""Sizes that are read from tensors: proved to match where counts were exchanged, never taken to
differ because only a run knows them, and still found to differ where they do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fcoll
from fcoll.checking import provenance
from fcoll.checking.check import check
from fcoll.checking.size_comparison import apart, differ
from fcoll.errors import CheckMismatch, UnmatchedTransfer

Exchange = Callable[..., tuple[Any, Any]]


def mixture(exchange: Exchange, experts: int = 1) -> Callable[..., Any]:
    """A mixture of experts with top-1 routing: (counts, ...) -> rows there and back, and their
    gradients. ``exchange`` gives how many rows go to and come from each rank."""

    def build(mesh):
        ep = mesh["ep"]
        n = ep.size()
        router, expert = nn.Linear(8, n * experts, bias=False), nn.Linear(8, 8)

        def step(x):
            choice = router(x).argmax(-1)
            sends, receives = exchange(choice, n, ep)
            rows = fcoll.all_to_all_single(x[choice.argsort()], ep, receives, sends)
            back = fcoll.all_to_all_single(expert(rows), ep, sends, receives)
            loss = back.square().mean()
            loss.backward()
            return loss

        return step, (torch.randn(16, 8, requires_grad=True),)

    return build


def counted(choice: torch.Tensor, n: int) -> torch.Tensor:
    return F.one_hot(choice, n).sum(0)


def told(choice, n, ep):
    counts = counted(choice, n)
    return counts.tolist(), fcoll.all_to_all_single(counts, ep).tolist()


def told_by_items(choice, n, ep):
    counts = counted(choice, n)
    received = fcoll.all_to_all_single(counts, ep)
    return [counts[i].item() for i in range(n)], [received[i].item() for i in range(n)]


def told_in_place(choice, n, ep):
    counts = counted(choice, n).to(torch.int32)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=ep.get_group())
    return counts.tolist(), received.cpu().tolist()


def told_of_several_experts(choice, n, ep):
    counts = counted(choice, 2 * n)
    received = fcoll.all_to_all_single(counts, ep)
    return counts.view(n, 2).sum(1).tolist(), received.view(n, 2).sum(dim=1).tolist()


def all_told(choice, n, ep):
    counts = counted(choice, n)
    matrix = fcoll.all_gather_into_tensor(counts, ep).view(n, n)
    return counts.tolist(), matrix[:, ep.get_local_rank()].tolist()


def all_told_in_rows(choice, n, ep):
    matrix = fcoll.all_gather_into_tensor(counted(choice, n)[None], ep)
    rank = ep.get_local_rank()
    return matrix[rank].tolist(), matrix.t()[rank].tolist()


def told_together(choice, n, ep):
    counts = counted(choice, n)
    return torch.stack([counts, fcoll.all_to_all_single(counts, ep)]).tolist()


def by_bincount(choice, n, ep):
    counts = torch.bincount(choice, minlength=n)
    return counts.tolist(), fcoll.all_to_all_single(counts, ep).tolist()


def by_scatter(choice, n, ep):
    counts = torch.zeros(n, dtype=torch.long)
    counts.scatter_add_(0, choice, torch.ones_like(choice))
    return counts.tolist(), fcoll.all_to_all_single(counts, ep).tolist()


@pytest.mark.parametrize(
    "exchange",
    [
        told,
        told_by_items,
        told_in_place,
        told_of_several_experts,
        all_told,
        all_told_in_rows,
        told_together,
        by_bincount,
        by_scatter,
    ],
)
def test_counts_that_were_exchanged_prove_the_splits(exchange):
    experts = 2 if exchange is told_of_several_experts else 1
    found = check(mixture(exchange, experts), {"ep": 3})
    assert found.ok, str(found)
    proved = [note for note in found.notes if note.startswith("proved: ")]
    assert len(proved) == 2 and all(note in str(found) for note in proved)
    line = exchange.__code__.co_firstlineno
    places = [note.rpartition("test_read_sizes.py:")[2] for note in proved]
    assert all(line < int(place) < line + 6 for place in places)
    assert not any("not compared" in note for note in found.notes)


def told_twice(choice, n, ep):
    """Of two countings that happen to be the same nothing is known."""
    return counted(choice, n).tolist(), counted(choice, n).tolist()


def changed_after(choice, n, ep):
    counts = torch.zeros(n, dtype=torch.long)
    counts.scatter_add_(0, choice, torch.ones_like(choice))
    received = fcoll.all_to_all_single(counts, ep)
    counts[0] = counts[1]
    return counts.tolist(), received.tolist()


def changed_through_a_view(choice, n, ep):
    counts = counted(choice, n)
    view = counts.view(-1)
    received = fcoll.all_to_all_single(counts, ep)
    view.copy_(counted(choice * 0, n))
    return counts.tolist(), received.tolist()


def read_of_another(choice, n, ep):
    counts, others = counted(choice, n), counted(choice * 0, n)
    return counts.tolist(), fcoll.all_to_all_single(others, ep).tolist()


@pytest.mark.parametrize(
    "exchange", [told_twice, changed_after, changed_through_a_view, read_of_another]
)
def test_where_nothing_is_known_nothing_is_claimed(exchange):
    found = check(mixture(exchange), {"ep": 3})
    assert found.ok
    assert not any("proved" in note for note in found.notes)
    unknown = [note for note in found.notes if note.startswith("not compared: ")]
    assert len(unknown) == 2 and all("only a run knows" in note for note in unknown)
    assert all(note in str(found) for note in unknown)


def one_too_many(choice, n, ep):
    sends, receives = told(choice, n, ep)
    return sends, [count + 1 for count in receives]


def turned(choice, n, ep):
    sends, receives = told(choice, n, ep)
    return sends, receives[1:] + receives[:1]


def test_what_is_known_to_differ_differs():
    with pytest.raises(CheckMismatch, match=r"rank 0 sends u1 rows to rank 1, which expects u\d"):
        check(mixture(one_too_many), {"ep": 3})
    assert not any("proved" in note for note in check(mixture(turned), {"ep": 3}).notes)


def test_sizes_that_all_ranks_know():
    """Parts padded to the largest: its size is the same everywhere, by an all-reduce."""

    def build(mesh, reduced=True):
        def step(x):
            rows = x[x[:, 0] > 0]
            count = torch.tensor(rows.shape[0])
            count = fcoll.all_reduce(count, "max", mesh) if reduced else count
            padded = rows.new_zeros(count.item() + 1, 4)
            return fcoll.all_gather_into_tensor(padded, mesh)

        return step, (torch.ones(8, 4),)

    assert check(build, {"dp": 2}).notes == ()
    (note,) = check(lambda mesh: build(mesh, reduced=False), {"dp": 2}).notes
    assert note.startswith("not compared: the sizes on ranks 0 and 1 of all_gather_into_tensor")


@pytest.mark.parametrize("column", [4, 3])
def test_symbols_with_other_names_do_not_differ(column):
    """Rank 1 reads one more value before; and what is not a symbol is still compared."""

    def build(mesh):
        first = mesh.get_rank() == 0

        def step(x):
            if not first:
                x.sum().long().item()
            rows = x[x[:, 0] > 0]
            return fcoll.all_reduce(rows if first else rows[:, :column], "sum", mesh)

        return step, (torch.ones(8, 4),)

    if column == 4:
        assert check(build, {"dp": 2}).ok
    else:
        with pytest.raises(CheckMismatch, match="the shape differs"):
            check(build, {"dp": 2})


def test_a_constant_and_a_symbol_are_not_compared_but_two_constants_are():
    def build(mesh):
        sizes = {0: None, 1: 5, 2: other}

        def step(x):
            rows = x[: sizes[mesh.get_rank()]] if mesh.get_rank() else x[x[:, 0] > 0]
            return fcoll.all_reduce(rows, "sum", mesh)

        return step, (torch.ones(8, 4),)

    other = 5
    assert check(build, {"dp": 3}).ok
    other = 6
    with pytest.raises(CheckMismatch, match="the shape differs") as raised:
        check(build, {"dp": 3})
    assert raised.value.ranks == (1, 2)


@pytest.mark.parametrize("columns", [4, 3])
def test_messages_of_sizes_that_are_read(columns):
    def build(mesh):
        rank = mesh.get_rank()

        def step(x):
            rows = x[x[:, 0] > 0]
            if rank == 0:
                return fcoll.wait_tensor(fcoll.isend(rows, 1, mesh))
            return fcoll.irecv(rows[:, :columns].contiguous(), 0, mesh)

        return step, (torch.ones(8, 4),)

    if columns == 4:
        assert any("not compared" in note for note in check(build, {"pp": 2}).notes)
    else:
        with pytest.raises(UnmatchedTransfer, match="the shape differs"):
            check(build, {"pp": 2})


# -- the parts ---


def test_sizes_differ():
    n, m = sympy.symbols("n m", integer=True)
    assert [differ(a, b) for a, b in [(2, 2), (2, 3), (n, n), (n, n + 2), (n, m), (2 * n, n)]] == [
        *(False, True, False, True, None, None)
    ]
    assert apart((n, (4, "x")), (m, (4, "x"))) is None
    assert apart((n, (4, "x")), (m, (5, "x"))) is True
    assert apart((n, 4), (n, 4)) is False
    assert apart((n,), (n, 4)) is True


def test_terms_are_the_elements_that_ops_give():
    """numpy's and torch's ops on the same numbers, element by element."""
    x = torch.arange(24).view(2, 3, 4)
    terms = provenance._array([("own", 0, "x", int(i)) for i in x.flatten()], x.shape)
    ops = torch.ops.aten
    calls = [
        *((ops.select.int, (1, 2)), (ops.slice.Tensor, (2, 1, 3)), (ops.slice.Tensor, (0, 1))),
        *((ops.unbind.int, (1,)), (ops.split.Tensor, (2, 2)), (ops.split.Tensor, (2, 1))),
        *((ops.split_with_sizes.default, ([1, 3], 2)), (ops.transpose.int, (0, 2))),
        *((ops.permute.default, ([2, 0, 1],)), (ops.slice.Tensor, (2, -3, 9223372036854775807, 2))),
    ]
    for op, args in calls:
        made = provenance._ON_TERMS[f"aten::{op.overloadpacket.__name__}"](terms, *args)
        for ours, theirs in zip(*map(as_list, (made, op(x, *args))), strict=True):
            assert [t[3] for t in ours.reshape(-1)] == theirs.flatten().tolist()
            assert ours.shape == tuple(theirs.shape)
    for dims, keep in itertools.product([None, [0], [-1], [0, 2]], [False, True]):
        made = provenance._sum(terms, dims, keep)
        want = x.sum(dims, keep) if dims else x.sum(dim=[0, 1, 2], keepdim=keep)
        assert made.shape == tuple(want.shape)
        assert [sum(t[3] for t in total[1:]) for total in made.reshape(-1)] == [
            *want.flatten().tolist()
        ]


def as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def test_one_rank_that_takes_other_counts_is_found():
    """On the way back it expects what it got, not what it sent. No count is known, but between all
    the other ranks they match."""

    def build(mesh):
        ep = mesh["ep"]

        def step(x):
            counts = counted((x @ x.T).argmax(-1), ep.size())
            sends, receives = told_counts = (
                counts.tolist(),
                fcoll.all_to_all_single(counts, ep).tolist(),
            )
            rows = fcoll.all_to_all_single(x, ep, receives, sends)
            expected = told_counts[ep.get_local_rank() == 5]
            return fcoll.all_to_all_single(rows, ep, expected, receives)

        return step, (torch.randn(8, 8),)

    with pytest.raises(CheckMismatch, match="other counts than those that match") as caught:
        check(build, {"ep": 8})
    assert 5 in caught.value.ranks
