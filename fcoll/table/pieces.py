"""What a collective means on several ranks whose tensors have any sizes: a rule on lists, beside
the rows' ``stacked`` rules for even ones.

Each rank of a group gives pieces and gets pieces. ``ROUTES`` says of each of the few ways in which
pieces go around what every piece that arrives is made of; ``UNEVEN`` has the rows that are known to
be made of them: how tensors are cut into pieces, and put together of those that arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.reductions import REDUCTIONS, Reduction, fold

Args = Mapping[str, Any]
Sources = tuple[tuple[int, int], ...]  # (rank, which of its pieces)
Route = Callable[[int, int, int, int], list[Sources]]
Fold = Callable[[Reduction, list[Tensor]], Tensor]

#: (to, n, k, root): the sources of every piece that rank ``to`` of n gets, where ranks give k
#: pieces. Several sources are reduced; a rank that gets nothing has none.
ROUTES: dict[str, Route] = {
    "all_reduce": lambda to, n, k, root: [_from_all(n, i) for i in range(k)],
    "reduce": lambda to, n, k, root: [_from_all(n, i) for i in range(k) if to == root],
    "broadcast": lambda to, n, k, root: [((root, i),) for i in range(k)],
    "all_gather": lambda to, n, k, root: [((r, i),) for i in range(k) for r in range(n)],
    "reduce_scatter": lambda to, n, k, root: [_from_all(n, i * n + to) for i in range(k // n)],
    "all_to_all": lambda to, n, k, root: [((r, to),) for r in range(n)],
    "gather": lambda to, n, k, root: [((r, 0),) for r in range(n) if to == root],
    "scatter": lambda to, n, k, root: [((root, to),)],
}


def _from_all(n: int, i: int) -> Sources:
    return tuple((r, i) for r in range(n))


class Misfit(Exception):
    """Two ranks' pieces do not fit; ``ranks`` of the group, the message says how."""

    def __init__(self, ranks: tuple[int, int], why: str) -> None:
        super().__init__(why)
        self.ranks = ranks


def received(
    route: str,
    given: Sequence[Sequence[Tensor]],
    reduce_op: str = "",
    root: int = -1,
    outs: Sequence[Sequence[Tensor]] | None = None,
    fold: Fold = fold,
) -> list[list[Tensor]]:
    """What each rank gets of what each gives: pieces as they are, or new tensors where they are
    reduced (by ``fold``), which ranks may share. Misfit unless each is as large as where it goes,
    in ``outs``.

    >>> received("all_to_all", [[1, 2], [3, 4]])
    [[1, 3], [2, 4]]
    """
    n, k = len(given), max(map(len, given))
    reduced: dict[Sources, Tensor] = {}
    arrived: list[list[Tensor]] = []
    for to in range(n):
        mine = ROUTES[route](to, n, k, root)
        if outs is not None:
            for sources, out in zip(mine, outs[to], strict=False):  # of a reduce, on the root
                for rank, i in sources:
                    _check((rank, to), route, given[rank][i], out)
        for sources in mine:
            if len(sources) > 1 and sources not in reduced:
                parts = _alike([given[rank][i] for rank, i in sources])
                reduced[sources] = fold(REDUCTIONS[reduce_op], parts)
        arrived.append([reduced[s] if len(s) > 1 else given[s[0][0]][s[0][1]] for s in mine])
    return arrived


def _alike(parts: list[Tensor]) -> list[Tensor]:
    """In the shape of the first."""
    shape = parts[0].shape
    return [x.detach() if x.shape == shape else x.detach().reshape(shape) for x in parts]


def _check(ranks: tuple[int, int], route: str, x: Tensor, out: Tensor) -> None:
    if x.numel() != out.numel() or x.dtype != out.dtype:
        source, to = ranks
        who = "it" if source == to else f"rank {to}, which"
        gives = "sends" if route == "all_to_all" else "gives"
        raise Misfit(ranks, f"rank {source} {gives} {amount(x)} to {who} expects {amount(out)}")


def amount(x: Tensor) -> str:
    """ "4 float32" """
    return f"{x.numel()} {str(x.dtype).removeprefix('torch.')}"


# -- rows: their tensors of one group, and the arguments of each rank -> what each gets ---


def _all_reduce(xs: list[Tensor], args: Sequence[Args]) -> list[Tensor]:
    return [y for (y,) in received("all_reduce", [[x] for x in xs], args[0]["reduce_op"])]


def _broadcast(xs: list[Tensor], args: Sequence[Args]) -> list[Tensor]:
    return [y for (y,) in received("broadcast", [[x] for x in xs], root=args[0]["src"])]


def _all_gather(xs: list[Tensor], args: Sequence[Args]) -> list[Tensor]:
    rows = [x.reshape(1) if x.dim() == 0 else x for x in xs]
    return [torch.cat(ys) for ys in received("all_gather", [[x] for x in rows])]


def _reduce_scatter(xs: list[Tensor], args: Sequence[Args]) -> list[Tensor]:
    parts = [_cut(x, a.get("sizes"), len(xs)) for x, a in zip(xs, args, strict=True)]
    return [y for (y,) in received("reduce_scatter", parts, args[0]["reduce_op"])]


def _all_to_all(xs: list[Tensor], args: Sequence[Args]) -> list[Tensor]:
    sent = [_cut(x, a.get("input_split_sizes"), len(xs)) for x, a in zip(xs, args, strict=True)]
    arrived = received("all_to_all", sent)
    for i, (ys, a) in enumerate(zip(arrived, args, strict=True)):
        wanted, found = a.get("output_split_sizes"), [y.shape[0] for y in ys]
        if wanted and list(wanted) != found:
            raise ValueError(
                f"all_to_all: rank {i} of the group waits for {list(wanted)} rows, and the chunks "
                f"sent to it have {found}"
            )
    return [torch.cat(ys) for ys in arrived]


def _shard_dim_alltoall(xs: list[Tensor], args: Sequence[Args]) -> list[Tensor]:
    gather_dim, shard_dim = args[0]["gather_dim"], args[0]["shard_dim"]
    if gather_dim == shard_dim:
        return xs
    sent = [x.chunk(len(xs), shard_dim) for x in xs]
    return [torch.cat(ys, gather_dim) for ys in received("all_to_all", sent)]


def _permute(xs: list[Tensor], args: Sequence[Args]) -> list[Tensor]:
    dst = list(args[0]["dst"])
    return [xs[dst.index(i)] if i in dst else torch.zeros_like(x) for i, x in enumerate(xs)]


def _cut(x: Tensor, sizes: Sequence[int] | None, n: int) -> tuple[Tensor, ...]:
    return x.split(list(sizes)) if sizes else x.chunk(n)


#: By the row's name. Results may share memory with one another and with what was given.
UNEVEN: dict[str, Callable[[list[Tensor], Sequence[Args]], list[Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "shard_dim_alltoall": _shard_dim_alltoall,
    "broadcast": _broadcast,
    "permute": _permute,
}
