"""The call that a program has at a place of a run: its trace, aligned with the calls before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

from fcoll.checking.recorded import Dump, Recorded, RecordedGroup
from fcoll.errors import BadMesh
from fcoll.graph.issued import Issued
from fcoll.tracing.peers import Board

Build = Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]


class ProgramCalls:
    """The calls of a program, rank by rank; a rank is traced when first needed."""

    def __init__(self, build: Build, mesh: Mapping[str, int]) -> None:
        if not mesh:
            raise BadMesh(what="no axes", hint="Say of how many ranks: --mesh dp=4,tp=2.")
        self.board = Board(build, dict(mesh))
        self.size = prod(mesh.values())
        self.traced: dict[int, tuple[Issued, ...]] = {}

    def of(
        self,
        places: Iterable[tuple[int, RecordedGroup, int]],
        dumps: Mapping[int, Dump],
        notes: list[str],
    ) -> Iterator[tuple[int, Issued]]:
        """The call of each rank that has that number on that group, where the trace tells."""
        for rank, group, number in places:
            if rank >= self.size:
                notes.append(f"rank {rank} is not in the mesh")
                continue
            step = [c for c in self._calls(rank) if set(c.ranks) == set(group.ranks)]
            calls = dumps[rank].on(group)
            before = [calls[i] for i in sorted(calls) if i < number]
            if (call := following(step, before)) is not None:
                yield rank, call
            else:
                notes.append(f"rank {rank}: the calls before it are not those of the program")

    def _calls(self, rank: int) -> tuple[Issued, ...]:
        if rank not in self.traced:
            with self.board.traced(rank) as trace:
                self.traced[rank] = tuple(c for c in trace.collectives if not c.row.is_p2p)
        return self.traced[rank]


def following(step: list[Issued], before: list[Recorded]) -> Issued | None:
    """The call of a step, which a run repeats, that comes behind these: where most of the last ones
    are the step's. What came before the first step, as an exchange of parameters, need not be."""
    if not step:
        return None
    in_turn = (len(before) if before and before[0].number == 1 else 0) % len(step)

    def matches(place: int) -> int:
        for k in range(min(len(before), 2 * len(step))):
            if not _alike(before[-1 - k], step[(place - 1 - k) % len(step)]):
                return k
        return min(len(before), 2 * len(step))

    places = sorted(range(len(step)), key=lambda p: (-matches(p), p != in_turn, p))
    return step[places[0]] if not before or matches(places[0]) else None


def _alike(recorded: Recorded, traced: Issued) -> bool:
    """c10d's ranks agree on the number of elements, not on shapes."""
    if recorded.row.rstrip("_") != traced.op.rstrip("_"):
        return False
    if not traced.shapes or recorded.numel is None:
        return True
    sizes = traced.shapes[0]
    is_known = all(isinstance(size, int) for size in sizes)
    return recorded.dtype == traced.dtypes[0] and (not is_known or prod(sizes) == recorded.numel)
