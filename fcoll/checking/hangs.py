"""Why ranks stand still, from their flight records: who waits for whom, and where they parted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from fcoll.checking.expected import Build, ProgramCalls
from fcoll.checking.recorded import Dump, Paths, Recorded, RecordedGroup, read
from fcoll.graph.issued import Issued, describe


@dataclass(frozen=True)
class Waiting:
    """A rank that is in a call which other ranks have not made."""

    call: Recorded
    missing: tuple[int, ...]  # ranks that have not come to it
    seconds: float | None  # since it was made; torch's records do not say

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", for {self.seconds:.1f} s"
        if self.call.peer is not None:
            return f"rank {self.call.rank} waits to {_message(self.call)}{time}"
        waits = f"waits for {_ranks(self.missing)}" if self.missing else "and all its peers are"
        return f"rank {self.call.rank} {waits} in {_there(self.call)}{time}"


@dataclass(frozen=True)
class Absentee:
    """A rank that others wait for, and that waits for nobody in a collective."""

    rank: int
    line: str  # where it is
    last: Recorded | None  # its last call on the group where it is missed
    missed: Recorded  # where a rank waits for it

    def __str__(self) -> str:
        at = f", at {self.line}" if self.line else ""
        if self.missed.peer is not None:
            return f"rank {self.rank} waits for no other{at}"
        if self.last is None:
            return f"rank {self.rank} is in no collective{at}; it made none there"
        if self.last.number >= self.missed.number:
            line = f", at {self.last.line}" if self.last.line else ""
            return f"rank {self.rank} came when rank {self.missed.rank} had given up{line}"
        return (
            f"rank {self.rank} is in no collective{at}; its last one there is {_there(self.last)}"
        )


@dataclass(frozen=True)
class Diagnosis:
    """What the records say. ``ok``: nobody waits or raised an error, and no calls differ."""

    ranks: tuple[int, ...]  # of which there are dumps
    waiting: tuple[Waiting, ...]
    absent: tuple[Absentee, ...]
    circle: tuple[int, ...]  # ranks that wait for one another, each for the next
    differing: tuple[Recorded, ...]  # the first call that differs, as each rank made it
    other_lines: tuple[Recorded, ...]  # the first before it that ranks made from different lines
    expected: tuple[tuple[int, Issued], ...]  # what the program has there, by rank
    errors: dict[int, str]  # what ranks raised
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.waiting and not self.differing and not self.errors

    def to_dict(self) -> dict[str, Any]:
        """For programs: what ``fcoll why --json`` prints."""
        expected = [{"rank": rank, "call": describe(call)} for rank, call in self.expected]
        fields = asdict(replace(self, expected=()))
        return {"ok": self.ok, **fields, "expected": expected, "text": str(self)}

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.ok:
            yield f"ok: of {len(self.ranks)} ranks none waits for another, and no calls differ"
        if not self.waiting and not self.differing:  # as in init_process_group
            yield from (f"rank {rank} raised {error}" for rank, error in self.errors.items())
        if self.differing:
            yield f"the first call that differs is number {_where(self.differing[0])}:"
            yield from _each(self.differing)
        for waiting in self.waiting:
            yield str(waiting)
        for absentee in self.absent:
            yield str(absentee)
        if self.circle:
            yield f"they wait in a circle: {' -> '.join(f'rank {r}' for r in self.circle)}"
        if self.other_lines:
            number = _where(self.other_lines[0])
            yield f"the first call from different lines is number {number}:"
            yield from _each(self.other_lines)
        for rank, call in self.expected:
            yield f"expected there of rank {rank}: {describe(call)}"
        yield from self.notes


def why(
    dumps: Paths, build: Build | None = None, mesh: Mapping[str, int] | None = None
) -> Diagnosis:
    """Who waits for whom, and the first call that differs, from the flight records of the ranks.

    ``dumps`` is a folder, or files; of fcoll's groups, or of torch's NCCL backend. With the
    program, ``build(mesh)`` as for ``fcoll.check``, it also says which call belongs there.

    >>> import tempfile
    >>> path = tempfile.mkdtemp()
    >>> file = fcoll.dump_flight_records(path + "/rank_")
    >>> fcoll.why(path).ok
    True
    """
    records = read(dumps)
    differing = _first_differing(records)
    waiting = list(_waiting(records))
    reported = (*differing, *(w.call for w in waiting if w.missing))
    waiting = [w for w in waiting if w.missing or not _same_place(w.call, reported)]
    waiting.sort(key=lambda w: (w.call.time_ns, w.call.rank))
    collectives = [w for w in waiting if w.call.peer is None]
    place = differing or tuple(w.call for w in collectives[:1])
    other_lines = _first_from_other_lines(records, place[0]) if place else ()
    absent = tuple(_absent(records, waiting))
    notes = list(_without_dump(records))
    expected: tuple[tuple[int, Issued], ...] = ()
    if build is not None and place:
        places = _expected_places(records, place, collectives, differing)
        expected = tuple(ProgramCalls(build, mesh or {}).of(places, records, notes))
    return Diagnosis(
        ranks=tuple(records),
        waiting=tuple(waiting),
        absent=absent,
        circle=_circle(waiting),
        differing=differing,
        other_lines=other_lines,
        expected=expected,
        errors={rank: dump.error for rank, dump in records.items() if dump.error},
        notes=tuple(notes),
    )


def _without_dump(dumps: Mapping[int, Dump]) -> Iterator[str]:
    members = {rank for dump in dumps.values() for group in dump.groups for rank in group.ranks}
    if missing := sorted(members - set(dumps)):
        yield f"no dump of {_ranks(missing)}"


# -- who waits ---


def _waiting(dumps: Mapping[int, Dump]) -> Iterator[Waiting]:
    """The first call that is not complete, of each rank on each group."""
    for dump in dumps.values():
        for group in dump.groups:
            call = next((c for c in dump.on(group).values() if not c.complete), None)
            if call is None:
                continue
            others = [r for r in group.ranks if r != dump.rank]
            missing = [r for r in others if _last(dumps, r, group, dump.time_ns) < call.number]
            yield Waiting(call, tuple(missing), _seconds(dump, call))
        for message in dump.messages:
            if not message.complete:
                peers = [r for r in message.group.ranks if r != dump.rank]
                missing = peers if message.peer in (None, -1) else [message.peer]
                yield Waiting(message, tuple(missing), _seconds(dump, message))


def _seconds(dump: Dump, call: Recorded) -> float | None:
    return (dump.time_ns - call.time_ns) / 1e9 if dump.time_ns else None


def _last(dumps: Mapping[int, Dump], rank: int, group: RecordedGroup, until_ns: int | None) -> int:
    """The last call that a rank had made by then: it may have come when others had given up."""
    calls = dumps[rank].on(group).values() if rank in dumps else ()
    return max((c.number for c in calls if until_ns is None or c.time_ns <= until_ns), default=0)


def _absent(dumps: Mapping[int, Dump], waiting: list[Waiting]) -> Iterator[Absentee]:
    busy = {w.call.rank for w in waiting if w.missing}
    missed = {rank: w.call for w in reversed(waiting) for rank in w.missing}
    for rank, call in sorted(missed.items()):
        if rank in busy or rank not in dumps:
            continue
        calls = dumps[rank].on(call.group)
        yield Absentee(rank, dumps[rank].line, calls[max(calls)] if calls else None, call)


def _circle(waiting: Iterable[Waiting]) -> tuple[int, ...]:
    """Ranks that wait for one another, the first again at the end; empty if none do."""
    after: dict[int, set[int]] = defaultdict(set)
    for w in waiting:
        after[w.call.rank].update(w.missing)
    for first in sorted(after):
        path = [first]
        while True:
            following = sorted(after.get(path[-1], ()))
            if first in following:
                return (*path, first)
            step = next((r for r in following if r in after and r not in path), None)
            if step is None:
                break
            path.append(step)
    return ()


# -- where they parted ---


def _by_number(dumps: Mapping[int, Dump]) -> dict[RecordedGroup, dict[int, list[Recorded]]]:
    calls: dict[RecordedGroup, dict[int, list[Recorded]]] = defaultdict(lambda: defaultdict(list))
    for dump in dumps.values():
        for call in dump.calls:
            calls[call.group][call.number].append(call)
    return calls


def _first_differing(dumps: Mapping[int, Dump]) -> tuple[Recorded, ...]:
    """On all groups the first in time."""
    first: list[tuple[Recorded, ...]] = []
    for numbers in _by_number(dumps).values():
        for _, calls in sorted(numbers.items()):
            if len({call.key for call in calls}) > 1:
                first.append(tuple(calls))
                break
    return min(first, key=lambda calls: min(c.time_ns for c in calls), default=())


def _same_place(call: Recorded, calls: tuple[Recorded, ...]) -> bool:
    return any((call.group, call.number) == (c.group, c.number) for c in calls)


def _first_from_other_lines(dumps: Mapping[int, Dump], until: Recorded) -> tuple[Recorded, ...]:
    """Before that call, on its group: ranks may have lost step and go on making equal calls."""
    for number, calls in sorted(_by_number(dumps)[until.group].items()):
        lines = {call.line for call in calls if call.line}
        if number < until.number and len(lines) > 1:
            return tuple(calls)
    return ()


def _expected_places(
    dumps: Mapping[int, Dump],
    place: tuple[Recorded, ...],
    waiting: Iterable[Waiting],
    differing: tuple[Recorded, ...],
) -> list[tuple[int, RecordedGroup, int]]:
    """(rank, group, number) of the calls to compare with the program: of ranks with different calls
    one of each kind, or the one that waits and one that it waits for."""
    group, number = place[0].group, place[0].number
    if differing:
        ranks = list({call.key: call.rank for call in reversed(differing)}.values())
    else:
        first = next(iter(waiting))
        ranks = [first.call.rank, *first.missing[:1]]
    return [(rank, group, number) for rank in sorted(ranks) if rank in dumps]


# -- text ---


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _where(call: Recorded) -> str:
    return f"{call.number} on group {call.group}"


def _there(call: Recorded) -> str:
    at = f", at {call.line}" if call.line else ""
    return f"{call.text}, call {_where(call)}{at}"


def _message(call: Recorded) -> str:
    peer = "any rank" if call.peer == -1 else f"rank {call.peer}"
    does = "send {} to {}" if call.row == "send" else "receive {} from {}"
    at = f", at {call.line}" if call.line else ""
    return f"{does.format(call.text, peer)}, message {_where(call)}{at}"


def _each(calls: Iterable[Recorded]) -> Iterator[str]:
    """A line for each kind of call; ranks with the same one share it."""
    calls = list(calls)
    ambiguous = len({c.text for c in calls}) < len({c.key for c in calls})
    same: dict[tuple[str, str], list[int]] = defaultdict(list)
    for call in calls:
        same[call.text + (call.mark if ambiguous else ""), call.line].append(call.rank)
    for (text, line), ranks in same.items():
        yield f"  {_ranks(ranks)}: {text}{f' at {line}' if line else ''}"
