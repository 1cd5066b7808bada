"""Do all ranks of a program issue collectives that match? Found out before it runs.

The program is traced for each rank, or for ranks that stand for the others. Then three proofs:
on every group all members make the same calls in the same order, every send meets a receive that
fits, and no ranks wait for one another in a circle. A wait for a send, as in ``dist.send``, lasts
until it is received: a backend's buffers may let a small message go, but not one of any size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from fcoll.checking.proofs import Known, Program, no_deadlock, same_calls, transfers_meet
from fcoll.checking.provenance import origins_of
from fcoll.checking.values import Ran, check_size, run_on_ranks
from fcoll.errors import BadMesh, FcollError
from fcoll.graph.issued import Issued, describe
from fcoll.graph.nodes import is_start, is_used, is_wait, start_of, waits_of
from fcoll.tracing.fake_world import fake_world
from fcoll.tracing.trace import Trace, trace
from fcoll.tracing.workers import Tracer

Build = Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]
EVERY_RANK_UP_TO = 16  # ranks; more are represented


@dataclass(frozen=True)
class Finding:
    """Something that is no mismatch but is most likely a mistake."""

    rank: int
    call: Issued | None  # None: a finding about values
    what: str

    def __str__(self) -> str:
        who = f"{describe(self.call)} " if self.call is not None else ""
        return f"rank {self.rank}: {who}{self.what}"


@dataclass(frozen=True)
class Checked:
    """What was proved, and for which ranks. ``ok`` says that there is nothing else to report."""

    mesh: dict[str, int]
    ranks_traced: tuple[int, ...]
    groups: int  # that were compared
    calls: int  # of all traced ranks
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()  # on sizes and decisions that only a run knows
    values: int = 0  # simulated ranks that it ran on afterwards

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        world, traced = prod(self.mesh.values()), len(self.ranks_traced)
        mesh = ", ".join(f"{axis}={n}" for axis, n in self.mesh.items())
        who = f"all {world} ranks" if traced == world else f"{traced} of {world} ranks"
        lines = [
            f"{'ok' if self.ok else 'found'}: {who} of {mesh} traced, {self.calls} collectives on "
            f"{self.groups} groups match, every send meets its receive, no deadlock"
        ]
        if traced < world:
            lines.append(
                f"traced: {', '.join(map(str, self.ranks_traced))}; the others are taken to do as "
                "those first, second, in the middle and last along each axis"
            )
        if self.values:
            finite = all(f.call is not None for f in self.findings)
            end = ", all results are finite" if finite else ""
            lines.append(f"values: ran on {self.values} simulated ranks{end}")
        return "\n".join([*lines, *map(str, self.findings), *self.notes])


def check(
    build: Build,
    mesh: Mapping[str, int],
    *,
    mode: str = "joint",
    ranks: Iterable[int] | None = None,
    values: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Checked:
    """Prove that a program's collectives match on all ranks, or raise CollectiveMismatch.

    ``build(mesh)`` gives ``(fn, args)`` for the rank that the mesh is of. Up to 16 ranks are all
    traced, of more those that stand for the others: the first and last along every axis, and along
    each axis the second and the middle one; and whoever they exchange messages with. ``ranks``
    names others. Where a trace takes long, other processes, forked from this one, trace a part of
    the ranks. ``progress(done, of)`` is called after every trace.

    ``values=True`` then runs the program on simulated ranks, up to 64, all of them, with the real
    small tensors that ``build`` makes: forward and, as in the trace, backward. What a rank raises
    is raised as ``RankFailed``, ranks that wait for one another as ``Deadlock``; results and
    gradients that are not finite are findings.

    >>> def build(mesh):
    ...     return lambda x: fcoll.all_reduce(x, "sum", mesh), (torch.ones(mesh.get_rank() + 1),)
    >>> fcoll.check(build, mesh={"tp": 2})  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    fcoll.errors.CheckMismatch: on the group "tp" of ranks 0, 1: the shape differs
    """
    axes: dict[str, Any] = dict(mesh)
    size = prod(axes.values())
    chosen = sorted(set(ranks)) if ranks is not None else representatives(axes)
    for rank in chosen:
        if not 0 <= rank < size:
            raise BadMesh(what=f"rank {rank} of {size}", hint="Ranks count from 0.")
    if values:
        check_size(axes)
    programs: dict[int, Program] = {}
    tracer = Tracer(partial(_program, build, axes, mode=mode))
    todo = list(chosen)
    while todo:
        for rank, program in tracer.trace(todo):
            programs[rank] = program
            if progress is not None:
                progress(len(programs), len({*programs, *todo}))
        peers = itertools.chain.from_iterable(programs[r].peers() for r in todo)
        todo = [r for r in dict.fromkeys(peers) if r not in programs]
    known = Known(programs)
    groups = same_calls(programs, known)
    transfers_meet(programs, known)
    no_deadlock(programs)
    traces = itertools.chain.from_iterable(p.notes for p in programs.values())
    ran = run_on_ranks(build, axes, mode, progress) if values else Ran()
    return Checked(
        mesh=axes,
        ranks_traced=tuple(sorted(programs)),
        groups=groups,
        calls=sum(len(p.calls) for p in programs.values()),
        findings=(
            *(f for _, p in sorted(programs.items()) for f in p.findings),
            *(Finding(rank, None, what) for rank, what in ran.findings),
        ),
        notes=tuple(dict.fromkeys([*known.notes, *traces, *ran.notes])),
        values=ran.ranks,
    )


def representatives(axes: Mapping[str, int]) -> list[int]:
    """The ranks to trace: all of a few, of many the corners of the mesh and, along each axis, the
    second and the middle one.

    >>> representatives({"dp": 128, "tp": 8})
    [0, 1, 4, 7, 8, 512, 1016, 1023]
    """
    sizes = list(axes.values())
    if prod(sizes) <= EVERY_RANK_UP_TO:
        return list(range(prod(sizes)))
    corners = set(itertools.product(*({0, n - 1} for n in sizes)))
    for i, n in enumerate(sizes):
        for place in {1, n // 2} if n > 1 else ():
            corners.add((*[0] * i, place, *[0] * (len(sizes) - i - 1)))
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return sorted(sum(c * s for c, s in zip(corner, strides, strict=True)) for corner in corners)


# -- what a rank does ---


def _program(build: Build, axes: dict[str, Any], rank: int, mode: str) -> Program:
    try:
        with fake_world(**axes, rank=rank) as mesh:
            fn, args = build(mesh)
            traced = trace(fn, *args, mode=mode)
    except FcollError as error:
        error.rank = rank
        error.add_note(f"while tracing rank {rank} of {axes}")
        raise
    assert traced.graph_module is not None
    calls = traced.collectives
    return Program(
        rank,
        calls,
        _events(traced),
        tuple(_findings(traced)),
        origins_of(traced.graph_module.graph, calls, rank),
        traced.notes,
    )


def _events(traced: Trace) -> tuple[tuple[str, int], ...]:
    assert traced.graph_module is not None
    ids = {c.start: c.id for c in traced.collectives}
    events = []
    for node in traced.graph_module.graph.nodes:
        if is_start(node):
            events.append(("start", ids[node.name]))
        elif is_wait(node) and (start := start_of(node)) is not None:
            events.append(("wait", ids[start.name]))
    return tuple(events)


def _findings(traced: Trace) -> Iterator[Finding]:
    """Collectives that nobody waits for, and results that nobody uses."""
    assert traced.graph_module is not None
    calls = {c.start: c for c in traced.collectives}
    for node in filter(is_start, traced.graph_module.graph.nodes):
        call = calls[node.name]
        waits = waits_of(node)
        others = [user for user in node.users if user not in waits]
        if call.n == 1:
            continue
        if not waits and not others and not call.row.mutates:
            yield Finding(traced.rank, call, "is never waited for")
        elif not waits and not _through_items(others):
            yield Finding(traced.rank, call, "is used without a wait")
        elif not call.row.side_effect and not call.row.mutates and not is_used(node):
            yield Finding(traced.rank, call, "gives a result that nobody uses")


def _through_items(users: list[Any]) -> bool:
    return any(waits_of(user) for user in users)
