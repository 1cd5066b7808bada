"""Ranks of a large world that do the same, found while few of them are traced.

A rank is traced, and with it all that are alike (tracing/equivalent_ranks.py); then one of the
others, until all are known. Ranks of a kind are told apart further by the kinds of those they meet,
so that all ranks of a kind meet the same kinds along every axis: what is proved for a few that meet
is then proved for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy

from fcoll.checking.proofs import RankCalls
from fcoll.checking.provenance import Origins, Term
from fcoll.tracing.equivalent_ranks import Alike, together, told_apart
from fcoll.tracing.peers import Board

PATIENCE_S = 20.0  # of tracing kinds, after which others are taken to do as those traced
FEW = 64  # kinds that are traced however long it takes

Progress = Callable[[int, int], None]


@dataclass
class Kinds:
    """The programs of the ranks that were traced, and which of them each rank runs (-1: it is not
    known)."""

    axes: dict[str, int]
    traced: dict[int, RankCalls]
    of: Any  # for each rank, the traced one that it is like

    @property
    def unknown(self) -> list[int]:
        return numpy.flatnonzero(self.of < 0).tolist()


def find_kinds(
    board: Board, program: Callable[[Board, int, Alike | None], RankCalls], progress: Progress
) -> Kinds:
    """Trace ranks until all are known, or for as long as patience lasts."""
    world = Alike(board.axes, 0)
    kinds = Kinds(dict(board.axes), {}, numpy.full(world.size, -1))
    begin = time.perf_counter()
    while True:
        following = _next(kinds)
        tired = len(kinds.traced) >= FEW and time.perf_counter() - begin > PATIENCE_S
        if following is None or tired:
            return kinds
        alike = Alike(board.axes, following)
        try:
            kinds.traced[following] = program(board, following, alike)
        except Exception:  # perhaps it takes no Number for a rank: if not, an int raises it again
            kinds.traced[following] = program(board, following, None)
            alike.only_me()
        fresh = alike.same & (kinds.of < 0)
        fresh[following] = True
        kinds.of[fresh] = following
        progress(len(kinds.traced), len(kinds.traced) + bool(kinds.unknown))


def _next(kinds: Kinds) -> int | None:
    """The next rank to trace: one that is not known, or of those that meet other kinds than the
    traced one they are like."""
    if kinds.unknown:
        return kinds.unknown[0]
    colours = told_apart(together([kinds.of]), kinds.axes)
    traced_colours = {colours[rank] for rank in kinds.traced}
    rest = [rank for rank, colour in _firsts(colours) if colour not in traced_colours]
    if not rest:
        return None
    kinds.of[colours == colours[rest[0]]] = -1
    return rest[0]


def _firsts(colours: Any) -> Iterator[tuple[int, Any]]:
    values, firsts = numpy.unique(colours, return_index=True)
    yield from zip(firsts.tolist(), values.tolist(), strict=True)


def witnesses(kinds: Kinds) -> dict[int, RankCalls]:
    """Programs of ranks that meet: of every kind and axis a rank of each kind in its group, and all
    that they send messages to."""
    world = Alike(kinds.axes, 0)
    todo = list(kinds.traced)
    chosen: dict[int, RankCalls] = {}
    for rank in kinds.traced:
        for axis, n in kinds.axes.items():
            members = world.member(axis, numpy.arange(n)[:, None])[:, rank]
            firsts = {int(kinds.of[m]): int(m) for m in reversed(members.tolist())}
            todo += [m for kind, m in firsts.items() if kind >= 0]
    while todo:
        rank = todo.pop()
        if rank not in chosen and kinds.of[rank] >= 0:
            chosen[rank] = moved(kinds.traced[int(kinds.of[rank])], rank, world)
            todo += chosen[rank].peers()
    return dict(sorted(chosen.items()))


# -- a program of another rank ---


def moved(program: RankCalls, rank: int, world: Alike) -> RankCalls:
    """The program as a rank runs it that is like the one of which it is: on its own groups."""
    if rank == program.rank:
        return program
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    for call in program.calls:
        if call.group in world.axes and call.ranks not in groups:
            places = numpy.arange(world.axes[call.group])[:, None]
            mine = world.member(call.group, places)[:, rank]
            groups[call.ranks] = tuple(mine.tolist())
    calls = tuple(replace(c, ranks=groups.get(c.ranks, c.ranks)) for c in program.calls)
    origins = Origins(
        {k: _moved(t, groups, rank) for k, t in program.origins.symbols.items()},
        {
            ((groups.get(ranks, ranks), i), k): tuple(_moved(t, groups, rank) for t in terms)
            for ((ranks, i), k), terms in program.origins.sent.items()
        },
    )
    return RankCalls(rank, calls, program.events, (), origins, new_groups=program.new_groups)


def _moved(term: Term, groups: dict[Any, Any], rank: int) -> Term:
    """Where a value comes from, on another rank."""
    kind, *rest = term
    if kind == "own":
        return kind, rank, *rest[1:]
    if kind == "sum":
        return kind, *(_moved(t, groups, rank) for t in rest)
    if kind == "op":
        name, plain, terms, i = rest
        return kind, name, plain, tuple(_moved(t, groups, rank) for t in terms), i
    (ranks, instance), k, *others = rest
    there = groups.get(ranks, ranks)
    if kind == "sent":
        others[0] = there[ranks.index(others[0])]
    return kind, (there, instance), k, *others
