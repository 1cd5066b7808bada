"""Example calls of every user function: what the tests of gradients, vmap and compile run.

    for call in CALLS:
        outs = call(call.inputs(rank, n), rank, n)      # lists of tensors in and out, on every rank

A row or a function that has no example here is a failing test of those files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import fcoll
from fcoll.reductions import PREMUL_SUM, REDUCTIONS

Tensor = torch.Tensor
Shapes = Callable[[int, int], Sequence[tuple[int, ...]]]
Run = Callable[..., Tensor | list[Tensor]]


@dataclass(frozen=True)
class Call:
    """``run(*inputs, rank, n)`` calls the function ``name`` on inputs of ``shapes(rank, n)``."""

    name: str
    label: str
    shapes: Shapes
    run: Run
    dtype: torch.dtype = torch.float64
    zeros: tuple[tuple[int, int], ...] = ()  # (rank, element of the first input)

    @property
    def id(self) -> str:
        return f"{self.name}-{self.label}" if self.label else self.name

    def inputs(self, rank: int, n: int) -> list[Tensor]:
        """The rank's inputs, the same at every call: any rank knows every other's."""
        generator = torch.Generator().manual_seed(1000 * n + rank)
        shapes = self.shapes(rank, n)
        xs = [torch.randn(s, dtype=self.dtype, generator=generator) for s in shapes]
        for of_rank, element in self.zeros:
            if of_rank == rank:
                xs[0].view(-1)[element] = 0
        return xs

    def __call__(self, xs: Sequence[Tensor], rank: int, n: int) -> list[Tensor]:
        out = self.run(*xs, rank, n)
        return [out] if isinstance(out, Tensor) else out


def fixed(*shapes: tuple[int, ...]) -> Shapes:
    return lambda rank, n: shapes


def by_size(shape: Callable[[int], tuple[int, ...]]) -> Shapes:
    return lambda rank, n: [shape(n)]


def uneven(n: int) -> list[int]:
    """A part for each rank: one is larger than the others, and of four ranks one has nothing."""
    return [2, 1, 0, 1][:n]


def splits(rank: int, n: int) -> tuple[list[int], list[int]]:
    """(output_splits, input_splits) of the rank, where a sends (a + 2 b) % 3 rows to b."""
    received = [(r + 2 * rank) % 3 for r in range(n)]
    sent = [(rank + 2 * r) % 3 for r in range(n)]
    return received, sent


def halves(n: int) -> list[list[int]]:
    """Two sub-groups, each in descending order; of two ranks, two groups of one."""
    return [list(range(n))[::2][::-1], list(range(n))[1::2][::-1]]


def ring(n: int) -> list[int]:
    return [(r + 1) % n for r in range(n)]


def _reductions(op: str) -> list[Call]:
    """Every collective that reduces, with this reduce op."""
    more = {"factor": 0.5} if op == PREMUL_SUM else {}

    def coalesced(a: Tensor, b: Tensor, r: int, n: int) -> list[Tensor]:
        return fcoll.reduce_scatter_tensor_coalesced([a, b], op, dim=[0, 1], **more)

    return [
        Call("all_reduce", op, fixed((3,)), lambda x, r, n: fcoll.all_reduce(x, op, **more)),
        Call(
            "reduce_scatter_tensor",
            op,
            by_size(lambda n: (n,)),
            lambda x, r, n: fcoll.reduce_scatter_tensor(x, op, **more),
        ),
        Call("reduce", op, fixed((2,)), lambda x, r, n: fcoll.reduce(x, n - 1, op, **more)),
        Call(
            "all_reduce_coalesced",
            op,
            fixed((2,), ()),
            lambda a, b, r, n: fcoll.all_reduce_coalesced([a, b], op, **more),
        ),
        Call("reduce_scatter_tensor_coalesced", op, lambda r, n: [(n,), (1, n)], coalesced),
    ]


def _of_zeros(call: Call) -> Call:
    """With a zero of one rank, and one of two ranks at the same place."""
    zeros = ((0, 0), (0, 1), (1, 1))
    return dataclasses.replace(call, label=f"{call.label}_of_zeros", zeros=zeros)


def _complex(call: Call) -> Call:
    return dataclasses.replace(call, label=f"complex_{call.label}", dtype=torch.complex128)


def _scattering(name: str, scatter: Run) -> list[Call]:
    """Examples of what takes (x, dim, sizes) and splits x."""
    return [
        Call(name, "", by_size(lambda n: (n, 2)), lambda x, r, n: scatter(x, 0, None, n)),
        Call(name, "dim", by_size(lambda n: (2, n)), lambda x, r, n: scatter(x, -1, None, n)),
        Call(
            name,
            "sizes",
            by_size(lambda n: (2, sum(uneven(n)))),
            lambda x, r, n: scatter(x, 1, uneven(n), n),
        ),
    ]


def _gathering(name: str, gather: Run) -> list[Call]:
    """Examples of what takes (x, dim, sizes) and joins the ranks' x."""
    return [
        Call(name, "", fixed((2, 1)), lambda x, r, n: gather(x, 0, None, n)),
        Call(name, "dim", fixed((2, 1)), lambda x, r, n: gather(x, -1, None, n)),
        Call(name, "0-dim", fixed(()), lambda x, r, n: gather(x, 0, None, n)),
        Call(
            name,
            "sizes",
            lambda r, n: [(2, uneven(n)[r])],
            lambda x, r, n: gather(x, 1, uneven(n), n),
        ),
    ]


def _over_sub_groups() -> list[Call]:
    shapes = fixed((4,))
    return [
        Call("all_reduce", "sub", shapes, lambda x, r, n: fcoll.all_reduce(x, "sum", halves(n))),
        Call(
            "all_gather_into_tensor",
            "sub",
            shapes,
            lambda x, r, n: fcoll.all_gather_into_tensor(x, halves(n)),
        ),
        Call("broadcast", "sub", shapes, lambda x, r, n: fcoll.broadcast(x, 0, halves(n))),
        Call("scatter", "sub", shapes, lambda x, r, n: fcoll.scatter(x, 0, halves(n))),
    ]


def _pairs(x: Tensor, rank: int, n: int) -> list[Tensor]:
    """Each rank sends to its neighbour and receives from it."""
    peer = rank ^ 1
    token, received = fcoll.isend(x, peer), fcoll.irecv(x, peer)
    return [fcoll.wait_tensor(token), fcoll.wait_tensor(received)]


def _ring_of_p2p(x: Tensor, like: Tensor, rank: int, n: int) -> list[Tensor]:
    to, source = (rank + 1) % n, (rank - 1) % n
    return fcoll.batch_p2p([("isend", x, to), ("irecv", like, source)])


def _barrier(x: Tensor, rank: int, n: int) -> Tensor:
    fcoll.barrier()
    return x * 2


_DIFFERENTIABLE_OPS = [row.name for row in REDUCTIONS.values() if row.share] + [PREMUL_SUM]
_SUM, _PRODUCT, _AVG = (_reductions(op) for op in ("sum", "product", "avg"))
_EXCHANGE = Call(
    "all_to_all_single", "", by_size(lambda n: (n, 2)), lambda x, r, n: fcoll.all_to_all_single(x)
)

CALLS: list[Call] = [
    *[call for op in _DIFFERENTIABLE_OPS for call in _reductions(op)],
    *map(_of_zeros, _PRODUCT),
    *map(_complex, [_SUM[0], _PRODUCT[0], _AVG[0], _EXCHANGE]),
    *_over_sub_groups(),
    *_gathering(
        "all_gather_into_tensor",
        lambda x, dim, sizes, n: fcoll.all_gather_into_tensor(x, dim=dim, sizes=sizes),
    ),
    *_gathering("gather", lambda x, dim, sizes, n: fcoll.gather(x, n - 1, dim=dim, sizes=sizes)),
    *_scattering(
        "reduce_scatter_tensor",
        lambda x, dim, sizes, n: fcoll.reduce_scatter_tensor(x, "product", dim=dim, sizes=sizes),
    ),
    *_scattering("scatter", lambda x, dim, sizes, n: fcoll.scatter(x, n - 1, dim=dim, sizes=sizes)),
    Call("all_reduce", "0-dim", fixed(()), lambda x, r, n: fcoll.all_reduce(x)),
    _EXCHANGE,
    Call(
        "all_to_all_single",
        "splits",
        lambda r, n: [(sum(splits(r, n)[1]), 2)],
        lambda x, r, n: fcoll.all_to_all_single(x, None, *splits(r, n)),
    ),
    Call(
        "shard_dim_alltoall",
        "",
        by_size(lambda n: (1, n)),
        lambda x, r, n: fcoll.shard_dim_alltoall(x, 0, -1),
    ),
    Call("broadcast", "", fixed((3,)), lambda x, r, n: fcoll.broadcast(x, n - 1)),
    Call("permute", "", fixed((2, 2)), lambda x, r, n: fcoll.permute(x, ring(n))),
    Call("permute", "partial", fixed((2,)), lambda x, r, n: fcoll.permute(x, [-1, *range(n - 1)])),
    Call(
        "all_gather_into_tensor_coalesced",
        "",
        fixed((2,), (), (1, 2)),
        lambda a, b, c, r, n: fcoll.all_gather_into_tensor_coalesced([a, b, c], dim=[0, 0, 1]),
    ),
    Call("identity", "", fixed((2,)), lambda x, r, n: fcoll.identity(x)),
    Call("wait_tensor", "", fixed((2,)), lambda x, r, n: fcoll.wait_tensor(x * 2)),
    Call("isend", "", fixed((2, 2)), _pairs),
    Call("irecv", "", fixed((2, 2)), _pairs),
    Call("batch_p2p", "", fixed((2, 2), (2, 2)), _ring_of_p2p),
    Call("barrier", "", fixed((2,)), _barrier),
]

BY_ID: dict[str, Call] = {call.id: call for call in CALLS}
assert len(BY_ID) == len(CALLS)


def examples(name: str) -> list[Call]:
    """The example calls of one function."""
    return [call for call in CALLS if call.name == name]
