"""Do all ranks of a program issue collectives that match? Found out before it runs.

The program is traced for each rank, or for ranks that stand for the others. Then four proofs: the
members of every new group make it together, on every group all members make the same calls in the
same order, every send meets a receive that fits, and no ranks wait for one another in a circle. A
wait for a send, as in ``dist.send``, lasts until it is received: a backend's buffers may let a
small message go, but not one of any size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from math import prod
from typing import Any

from fcoll.checking.kinds import Kinds, find_kinds, moved, witnesses
from fcoll.checking.membership import groups_meet
from fcoll.checking.proofs import KnownSizes, RankCalls, no_deadlock, same_calls, transfers_meet
from fcoll.checking.provenance import Origins, origins_of
from fcoll.checking.simulated_run import Ran, check_size, run_on_ranks
from fcoll.errors import BadMesh, DataDependent, FcollError
from fcoll.graph.issued import Issued, describe, why_none, with_sizes
from fcoll.graph.nodes import is_start, is_used, is_wait, start_of, waits_of
from fcoll.graph.symbolic_sizes import has_symbols
from fcoll.simulation.rank_settings import isolated
from fcoll.tracing.equivalent_ranks import Alike
from fcoll.tracing.peers import Board
from fcoll.tracing.trace import Mode, Trace
from fcoll.tracing.workers import Tracer

Build = Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]
Progress = Callable[[int, int], None]
EVERY_RANK_UP_TO = 16  # ranks are all traced; of more one of each kind
MOST_SHARED = 4  # decisions by values that all ranks share, of which both ways are proved
MOST_RUN = 1024  # ranks that are run against each other, where their orders differ


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
    all_ranks: bool = False  # is it proved for those, too, that were not traced?

    @property
    def ok(self) -> bool:
        return not self.findings

    def _others(self) -> str:
        if self.all_ranks:
            return "each of the others answers as one of them to all that it asks about ranks"
        return "nothing is known of the others: --ranks all traces them"

    def to_dict(self) -> dict[str, Any]:
        """The verdict for programs: what ``fcoll check --json`` prints."""
        proved = "all ranks" if self.all_ranks else "those traced"
        verdict = {"ok": self.ok, "ranks_traced": list(self.ranks_traced), "proved_for": proved}
        return verdict | {"notes": list(self.notes), "values": self.values, "text": str(self)}

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        world, traced = prod(self.mesh.values()), len(self.ranks_traced)
        mesh = ", ".join(f"{axis}={n}" for axis, n in self.mesh.items())
        who = f"all {world} ranks" if self.all_ranks else f"{traced} of {world} ranks, those traced"
        groups = "1 group" if self.groups == 1 else f"{self.groups} groups"
        match = (
            f"{self.calls} collectives on {groups} match, every send meets its receive, no deadlock"
        )
        text = match if self.calls else f"nothing to compare, no collectives: {why_none(self.mesh)}"
        lines = [f"{'ok' if self.ok else 'found'}: proved for {who}, of {mesh}: {text}"]
        if traced < world:
            lines.append(f"traced: {', '.join(map(str, self.ranks_traced))}; {self._others()}")
        if self.values:
            finite = all(f.call is not None for f in self.findings)
            end = ", all results are finite" if finite else ""
            lines.append(f"values: ran on {self.values} simulated ranks{end}")
        return "\n".join([*lines, *map(str, self.findings), *self.notes])


def check(
    build: Build,
    mesh: Mapping[str, int],
    *,
    mode: Mode = "joint",
    ranks: Iterable[int] | str | None = None,
    values: bool = False,
    given: Mapping[str, int] | None = None,
    isolate: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> Checked:
    """Prove that a program's collectives match on all ranks, or raise CollectiveMismatch.

    ``build(mesh)`` gives ``(fn, args)`` for the rank that the mesh is of. Up to 16 ranks are all
    traced. Of more, one of each kind: while a rank is traced, all that the program asks about ranks
    (``get_rank() == 13``, its place on an axis, which part of an uneven tensor is its own) is
    answered for every rank, and those with the same answers do the same on their own groups. So it
    is proved for all ranks, though few are traced; text made of a rank is taken to decide nothing.
    Where there are too many kinds to trace, ``str(result)`` says for which ranks it is proved.
    ``ranks`` names those to trace, "all" or numbers; ranks they exchange messages with are traced
    as well. Where a trace takes long, other processes, forked from this one, trace a part of these
    ranks. ``progress(done, of)`` is called after every trace. ``given`` are the values of sizes
    that only a run knows, by symbol or line: {"u5": 128, "moe.py:31": 64}.

    ``values=True`` then runs the program on simulated ranks, up to 64, all of them, with the real
    small tensors that ``build`` makes: forward and, as in the trace, backward. What a rank raises
    is raised as ``RankFailed``, ranks that wait for one another as ``Deadlock``; results and
    gradients that are not finite are findings. ``isolate``: modules whose globals each rank has for
    itself, as in ``fcoll.simulate_ranks``.

    >>> def build(mesh):
    ...     return lambda x: fcoll.all_reduce(x, "sum", mesh), (torch.ones(mesh.get_rank() + 1),)
    >>> fcoll.check(build, mesh={"tp": 2})  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    fcoll.errors.CheckMismatch: on the group "tp" of ranks 0, 1: the shape differs
    """
    axes: dict[str, Any] = dict(mesh)
    size = prod(axes.values())
    tell = progress or (lambda done, of: None)
    if values:
        check_size(axes)
    board = Board(build, axes, mode, given or {})
    if isolate is not None:
        board.isolate = isolated(isolate, "check")
    ways, decided = _all_ways(board, lambda: _proved(board, ranks, size, tell))
    most = max(ways, key=lambda way: way.calls)
    ran = run_on_ranks(build, axes, board.mode, isolate, progress) if values else Ran()
    shown = set(map(str, most.findings))
    others = {str(f): f for way in ways for f in way.findings if str(f) not in shown}
    findings = *most.findings, *others.values()
    notes = [note for way in ways for note in way.notes]
    return Checked(
        mesh=axes,
        ranks_traced=most.ranks_traced,
        groups=most.groups,
        calls=most.calls,
        findings=(*findings, *(Finding(rank, None, what) for rank, what in ran.findings)),
        notes=tuple(dict.fromkeys([*decided, *notes, *ran.notes])),
        values=ran.ranks,
        all_ranks=all(way.all_ranks for way in ways),
    )


@dataclass(frozen=True)
class _Way:
    """What was proved of the program, with one answer to each decision that all ranks share."""

    ranks_traced: tuple[int, ...]
    groups: int
    calls: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    all_ranks: bool


def _proved(board: Board, ranks: Iterable[int] | str | None, size: int, tell: Progress) -> _Way:
    traced, programs, complete = _traced(board, ranks, size, tell)
    if board.mode == "joint" and len({p.own_backward for p in traced.values()}) > 1:
        # Some ranks run a backward pass: those that do not have forgotten it, and get none.
        board.mode = "forward"
        traced, programs, complete = _traced(board, ranks, size, tell)
    if any(program.new_groups for program in programs.values()):
        groups_meet(programs)
    known = KnownSizes(programs)
    groups = same_calls(programs, known)
    transfers_meet(programs, known)
    no_deadlock(programs)
    return _Way(
        ranks_traced=tuple(sorted(traced)),
        groups=groups,
        calls=sum(len(p.calls) for p in traced.values()),
        findings=tuple(f for _, p in sorted(programs.items()) for f in p.findings),
        notes=(*known.notes, *(note for p in traced.values() for note in p.notes)),
        all_ranks=complete,
    )


def _all_ways(board: Board, prove: Callable[[], _Way]) -> tuple[list[_Way], list[str]]:
    """The proofs with each answer to the decisions that all ranks take alike, by values that
    they share, where what they issue depends on them; and notes on these decisions."""
    ways: list[_Way] = []
    lines: dict[str, str] = {}  # of the decisions, by digest
    excess: DataDependent | None = None  # the first that was not followed
    todo: list[dict[str, bool]] = [{}]
    while todo:
        board.agreed = answers = todo.pop(0)
        try:
            ways.append(prove())
        except DataDependent as error:
            if error.shared is None:
                raise
            if len(answers) == MOST_SHARED:
                excess = excess or error
                continue
            lines[error.shared] = error.line
            todo += [{**answers, error.shared: answer} for answer in (False, True)]
        except FcollError as error:
            for digest, answer in answers.items():
                error.add_note(
                    f"where the value at {lines[digest]}, which ranks share, is {answer}"
                )
            raise
    if excess is not None and not ways:
        raise excess
    return ways, [*_on_decisions(dict.fromkeys(lines.values()), excess)]


def _on_decisions(lines: Iterable[str], excess: DataDependent | None) -> Iterator[str]:
    for line in lines:
        yield f"{line} decides by a value that all ranks share: proved for both ways"
    if excess is not None:
        yield f"not followed: runs with more than {MOST_SHARED} such decisions, as at {excess.line}"


def _traced(
    board: Board, ranks: Iterable[int] | str | None, size: int, tell: Progress
) -> tuple[dict[int, RankCalls], dict[int, RankCalls], bool]:
    """The programs that were traced, those to prove it for, and whether these are all ranks."""
    if ranks is None and size > EVERY_RANK_UP_TO:
        kinds = find_kinds(board, _program, tell)
        return kinds.traced, *_to_prove(kinds, size)
    chosen = range(size) if ranks in (None, "all") else sorted(set(map(int, ranks)))  # type: ignore[arg-type]
    programs = _trace(board, _within(chosen, size), tell)
    return programs, programs, len(programs) == size


def _within(ranks: Iterable[int], size: int) -> list[int]:
    for rank in ranks:
        if not 0 <= rank < size:
            raise BadMesh(what=f"rank {rank} of {size}", hint="Ranks count from 0.")
    return list(ranks)


def _trace(board: Board, chosen: list[int], progress: Progress) -> dict[int, RankCalls]:
    """The programs of these ranks, and of all that they exchange messages with."""
    programs: dict[int, RankCalls] = {}
    tracer = Tracer(partial(_program, board))
    todo = chosen
    while todo:
        for rank, program in tracer.trace(todo):
            programs[rank] = program
            progress(len(programs), len({*programs, *todo}))
        peers = itertools.chain.from_iterable(programs[r].peers() for r in todo)
        todo = [r for r in dict.fromkeys(peers) if r not in programs]
    return programs


def _to_prove(kinds: Kinds, size: int) -> tuple[dict[int, RankCalls], bool]:
    """The programs to prove it for, and is it then proved for all ranks? Of several kinds that
    make their calls in different orders all ranks are run against each other."""
    orders = {_order(program) for program in kinds.traced.values()}
    if len(orders) == 1 or kinds.unknown:
        return witnesses(kinds), not kinds.unknown
    if size <= MOST_RUN:
        world = Alike(kinds.axes, 0)
        everyone = {r: moved(kinds.traced[int(k)], r, world) for r, k in enumerate(kinds.of)}
        return everyone, True
    return witnesses(kinds), False


def _order(program: RankCalls) -> tuple[Any, ...]:
    """The order of a rank's calls: if all ranks have the same, nobody waits in a circle."""
    calls = tuple(
        (kind, program.calls[i].group) if not program.calls[i].row.is_p2p else (kind, i, "message")
        for kind, i in program.events
        if kind == "start" or program.calls[i].row.is_p2p
    )
    return *calls, *program.new_groups


# -- what a rank does ---


def _program(board: Board, rank: int, alike: Alike | None = None) -> RankCalls:
    try:
        with board.traced(rank, alike) as traced:
            calls = traced.collectives
    except FcollError as error:
        error.rank = rank
        error.add_note(f"while tracing rank {rank} of {dict(board.axes)}")
        raise
    assert traced.graph_module is not None
    if board.sizes:
        calls = tuple(with_sizes(call, traced.taken) for call in calls)
    read = any(has_symbols((call.shapes, call.args)) for call in calls)
    origins = origins_of(traced.graph_module.graph, calls, rank) if read else Origins()
    return RankCalls(
        rank,
        calls,
        _events(traced),
        tuple(_findings(traced)),
        origins,
        traced.notes,
        traced.own_backward,
        traced.new_groups,
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
