"""The semantics of collectives on ranks whose tensors have any sizes: a rule on lists, beside the
rows' ``stacked`` rules for even ones.

Each rank of a group gives pieces and gets pieces. ``ROUTES`` says of each of the few ways in which
pieces go around what every piece that arrives is made of. How a row cuts its tensors into pieces,
and puts together those that arrive, is its ``uneven`` rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fcoll.reductions import REDUCTIONS, Reduction, fold

Args = Mapping[str, Any]
Sources = tuple[tuple[int, int], ...]  # (rank, which of its pieces)
Route = Callable[[int, int, int, int], list[Sources]]
Fold = Callable[[Reduction, list[Tensor]], Tensor]


@functools.lru_cache(maxsize=1024)  # one object for all ranks
def _from_all(n: int, i: int) -> Sources:
    return tuple((r, i) for r in range(n))


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

#: Where a rank gives a piece to each rank, and where it gets one from each.
GIVEN_TO_EACH = ("reduce_scatter", "scatter", "all_to_all")
GOT_FROM_EACH = ("all_gather", "gather", "all_to_all")


class Misfit(Exception):
    """Two ranks' pieces do not fit; ``ranks`` of the group, the message says how."""

    def __init__(self, ranks: tuple[int, int], why: str) -> None:
        super().__init__(why)
        self.ranks = ranks


def received(
    route: str,
    pieces: Sequence[Sequence[Tensor]],
    reduce_op: str = "",
    root: int = -1,
    outs: Sequence[Sequence[Tensor]] | None = None,
    fold: Fold = fold,
) -> list[list[Tensor]]:
    """The pieces that each rank receives: those that were sent or, where they are reduced (by
    ``fold``), new tensors, which ranks may share. Misfit unless each is as large as its place in
    ``outs``.

    >>> received("all_to_all", [[1, 2], [3, 4]])
    [[1, 3], [2, 4]]
    """
    n, k = len(pieces), max(map(len, pieces))
    reduced: dict[tuple[int, int], Tensor] = {}
    arrived: list[list[Tensor]] = []
    for to, all_sources in enumerate(_sources(route, n, k, root)):
        mine: list[Tensor] = []
        for at, sources in enumerate(all_sources):
            first = rank, i = sources[0]  # no two sums have it in common
            x = pieces[rank][i]
            if outs is not None:
                _check(rank, to, route, x, outs[to][at])
            if len(sources) > 1:
                if first not in reduced:
                    parts = [pieces[rank][i] for rank, i in sources]
                    if outs is not None:  # for the next rank that gets it, all parts are alike
                        for (rank, _), part in zip(sources, parts, strict=True):
                            _check(rank, to, route, part, outs[to][at])
                    reduced[first] = fold(REDUCTIONS[reduce_op], _alike(parts))
                x = reduced[first]
            mine.append(x)
        arrived.append(mine)
    return arrived


@functools.lru_cache(maxsize=64)
def _sources(route: str, n: int, k: int, root: int) -> list[list[Sources]]:
    """The sources of every piece that each rank gets."""
    return [ROUTES[route](to, n, k, root) for to in range(n)]


def _alike(parts: list[Tensor]) -> list[Tensor]:
    """In the shape of the first."""
    shape = parts[0].shape
    return [x.detach() if x.shape == shape else x.detach().reshape(shape) for x in parts]


def _check(source: int, to: int, route: str, x: Tensor, out: Tensor) -> None:
    if x.dtype is not out.dtype or x.numel() != out.numel():
        who = "it" if source == to else f"rank {to}, which"
        gives = "sends" if route == "all_to_all" else "gives"
        raise Misfit(
            (source, to), f"rank {source} {gives} {amount(x)} to {who} expects {amount(out)}"
        )


def amount(x: Tensor) -> str:
    """ "4 float32" """
    return f"{x.numel()} {str(x.dtype).removeprefix('torch.')}"


def parts_of(xs: Sequence[Tensor], sizes: Sequence[Any], dim: int = 0) -> list[tuple[Tensor, ...]]:
    """The ranks' tensors in pieces, one for each rank: of these sizes, or alike where there are
    none."""
    n = len(xs)
    cut = zip(xs, sizes, strict=True)
    return [x.split(list(each), dim) if each else x.chunk(n, dim) for x, each in cut]


def only(pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The one piece of each rank."""
    return [piece for (piece,) in pieces]
