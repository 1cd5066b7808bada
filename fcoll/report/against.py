"""A prediction beside a real run: which call is which, and where they differ.

Calls are matched in the order of issue, those of one kind and group with each other; sizes decide
where their numbers differ. A file with several steps gives the median of each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from fcoll.report import notebook
from fcoll.report.observed import ObservedCall, ObservedRun, kind_of, read
from fcoll.report.summary import Row, rows
from fcoll.scheduling.timeline import Timeline
from fcoll.units import show_bytes, show_us, table

FAR = 1.5  # a ratio of times from which on a line is said to differ
LISTED = 5


@dataclass(frozen=True)
class MeasuredCall:
    """What a predicted call took in the run, over its steps; ``bytes`` where the file tells."""

    us: float
    exposed_us: float
    bytes: int | None


@dataclass(frozen=True)
class RunRow:
    """A row of the report and what was measured of it."""

    op: str
    axis: str
    phase: str
    source: str
    count: int  # calls that were found in the run
    bytes: int
    us: float
    measured_us: float
    exposed_us: float
    measured_exposed_us: float

    @property
    def ratio(self) -> float:
        return self.measured_us / self.us if self.us else 0.0


@dataclass(frozen=True)
class Against:
    """A run laid over a timeline."""

    run: ObservedRun
    steps: tuple[tuple[ObservedCall, ...], ...]
    calls: dict[int, MeasuredCall]
    found: tuple[dict[int, ObservedCall], ...]  # by step
    missing: tuple[Any, ...]  # predicted, and not in the run
    extra: tuple[ObservedCall, ...]  # of the first step, not predicted
    rows: tuple[RunRow, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Does the run issue what was predicted, and nothing else?"""
        return not self.missing and not self.extra

    @property
    def title(self) -> str:
        return f"{Path(self.run.path).name} · {self.run.tool}"

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        rows = notebook.table(HEAD, [_cells(r) for r in self.rows], ALIGN)
        return f"<b>{escape(self.title)}</b><ul>{notes}</ul>{rows}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.run.path,
            "tool": self.run.tool,
            "steps": len(self.steps),
            "same": self.same,
            "notes": list(self.notes),
            "rows": [{**vars(r), "ratio": r.ratio} for r in self.rows],
            "calls": {i: vars(m) for i, m in self.calls.items()},
        }


def against(line: Timeline, run: ObservedRun | str | Path) -> Against:
    """Lay a run over a timeline. ``run`` is one that was read, or a file."""
    run = run if isinstance(run, ObservedRun) else read(run)
    steps = _steps(run, line)
    found = tuple(_matched(line, step) for step in steps)
    ids = {c.id for c in line.collectives if all(c.id in step for step in found)}
    calls = {i: _measured([step[i] for step in found]) for i in sorted(ids)}
    missing = tuple(c for c in line.collectives if c.id not in calls)
    known = {id(o) for o in found[0].values()} if found else set()
    extra = tuple(o for o in steps[0] if id(o) not in known) if steps else ()
    lines = tuple(_rows(line, calls))
    notes = tuple(_notes(line, run, steps, calls, missing, extra, lines))
    return Against(run, steps, calls, found, missing, extra, lines, notes)


def _measured(seen: Sequence[ObservedCall]) -> MeasuredCall:
    us, exposed = median(o.us for o in seen), median(o.exposed_us for o in seen)
    return MeasuredCall(us, exposed, seen[0].bytes)


# -- steps ---


def _steps(run: ObservedRun, line: Timeline) -> tuple[tuple[ObservedCall, ...], ...]:
    """The run's collectives by step: as the profiler marked them, else where they repeat."""
    if run.marks:
        ends = [b for _, b in run.marks]
        found: list[list[ObservedCall]] = [[] for _ in ends]
        for one in run.collectives:
            k = next((k for k, (a, b) in enumerate(run.marks) if a <= one.start_us < b), None)
            if k is not None:
                found[k].append(one)
        whole = [tuple(step) for step in found if step]
        usual = Counter(map(len, whole)).most_common(1)[0][0] if whole else 0
        return tuple(step for step in whole if len(step) == usual) or (run.collectives,)
    calls, size = run.collectives, len(line.collectives)
    p = _period([o.kind for o in calls], [(o.kind, o.bytes) for o in calls], size)
    return tuple(calls[i : i + p] for i in range(0, len(calls), p))


def _period(kinds: Sequence[str], calls: Sequence[Any], size: int) -> int:
    """After how many calls a run repeats itself: as many as were predicted if their kinds do so,
    else the number nearest to it after which all of them come again.

    >>> _period("aab" * 3, "aab" * 3, 3), _period("aabx" * 3, "aabx" * 3, 3), _period("ab", "ab", 3)
    (3, 4, 2)
    """
    n = len(calls)
    if size and n % size == 0:
        first = Counter(kinds[:size])
        if all(Counter(kinds[i : i + size]) == first for i in range(0, n, size)):
            return size
    able = [p for p in range(1, n + 1) if n % p == 0 and calls[p:] == calls[: n - p]]
    return min(able, key=lambda p: abs(p - size), default=1)


# -- which is which ---


def _matched(line: Timeline, step: Sequence[ObservedCall]) -> dict[int, ObservedCall]:
    """{predicted call: the run's}."""
    told = {o.kind: all(x.n for x in step if x.kind == o.kind) for o in step}
    mine: dict[Any, list[Any]] = {}
    for c in sorted(line.collectives, key=lambda c: c.id):
        kind = kind_of(c.op)
        mine.setdefault((kind, _place(line, c.ranks) if told.get(kind) else None), []).append(c)
    theirs: dict[Any, list[ObservedCall]] = {}
    for o in step:
        theirs.setdefault((o.kind, _group(o) if told[o.kind] else None), []).append(o)
    _same_sizes(mine, theirs)
    found: dict[int, ObservedCall] = {}
    for key, calls in mine.items():
        found |= _in_order(calls, theirs.get(key, []))
    return found


def _place(line: Timeline, ranks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(ranks), tuple(ranks)


def _group(o: ObservedCall) -> tuple[int, tuple[int, ...]]:
    return o.n or 0, o.ranks


def _same_sizes(mine: dict[Any, list[Any]], theirs: dict[Any, list[ObservedCall]]) -> None:
    """Groups whose ranks the file does not tell, or another rank's: by kind and size, in order."""
    for key in [k for k in theirs if k not in mine and k[1] is not None]:
        kind, (n, _) = key
        free = [k for k in mine if k[0] == kind and k[1][0] == n and k not in theirs]
        if free:
            theirs[free[0]] = theirs.pop(key)


def _in_order(calls: Sequence[Any], seen: Sequence[ObservedCall]) -> dict[int, ObservedCall]:
    """One by one where there are as many; else those with equal sizes, in order."""
    if len(calls) == len(seen):
        return {c.id: o for c, o in zip(calls, seen, strict=True)}
    if any(o.bytes is None for o in seen):
        return {c.id: o for c, o in zip(calls, seen, strict=False)}
    pairs = _aligned([_number(c.bytes) for c in calls], [o.bytes for o in seen])
    return {calls[i].id: seen[k] for i, k in pairs}


def _aligned(a: Sequence[Any], b: Sequence[Any]) -> list[tuple[int, int]]:
    """Places of equal items in the same order: all of one list in the other if it is so, else by
    the longest runs that they share.

    >>> _aligned([4, 4, 8], [4, 2, 4, 8])
    [(0, 0), (1, 2), (2, 3)]
    """
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    shared = [(x.a + k, x.b + k) for x in blocks for k in range(x.size)]
    turned = [(i, k) for k, i in _one_in_other(b, a)]
    return max(shared, turned, _one_in_other(a, b), key=len)


def _one_in_other(a: Sequence[Any], b: Sequence[Any]) -> list[tuple[int, int]]:
    """Each item of ``a`` with the next equal one of ``b``, until there is none."""
    found: list[tuple[int, int]] = []
    k = 0
    for i, x in enumerate(a):
        at = next((j for j in range(k, len(b)) if b[j] == x), None)
        if at is not None:
            found.append((i, at))
            k = at + 1
    return found


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) else None


# -- what is told ---


def _rows(line: Timeline, calls: dict[int, MeasuredCall]) -> Iterable[RunRow]:
    """By line, what takes the most longer than predicted first."""
    made = [row for r in rows(line) if (row := _row(line, r, calls)) is not None]
    return sorted(made, key=lambda r: r.us - r.measured_us)


def _row(line: Timeline, row: Row, calls: dict[int, MeasuredCall]) -> RunRow | None:
    ids = [i for i in row.ids if i in calls]
    if not ids:
        return None
    exposed = sum(line.exposed_us.get(i, 0.0) for i in ids)
    us = exposed + sum(line.hidden_us.get(i, 0.0) for i in ids)
    return RunRow(
        row.op,
        row.axis,
        row.phase,
        row.source,
        len(ids),
        sum(_number(line.issued[i].bytes) or 0 for i in ids),
        us,
        sum(calls[i].us for i in ids),
        exposed,
        sum(calls[i].exposed_us for i in ids),
    )


def _notes(
    line: Timeline,
    run: ObservedRun,
    steps: Sequence[Sequence[ObservedCall]],
    calls: dict[int, MeasuredCall],
    missing: Sequence[Any],
    extra: Sequence[ObservedCall],
    found: Sequence[RunRow],
) -> Iterable[str]:
    """Where they differ, in sentences."""
    many = f"{len(steps)} steps, medians of each call" if len(steps) > 1 else "one step"
    yield f"{len(calls)} of {len(line.collectives)} predicted calls are in the run ({many})"
    if run.rank is not None and run.rank != line.rank:
        yield f"the run is of rank {run.rank}, the prediction of rank {line.rank}"
    if missing:
        yield f"predicted, not in the run: {_listed(_call(c) for c in missing)}"
    if extra:
        yield f"in the run, not predicted: {_listed(_seen(o) for o in extra)}"
    sizes = [i for i, m in calls.items() if m.bytes not in (None, line.issued[i].bytes)]
    if sizes:
        differ = (f"{_call(line.issued[i])} ran with {show_bytes(calls[i].bytes)}" for i in sizes)
        yield f"other sizes: {_listed(differ)}"
    if any(o.name.startswith("fcoll::") for step in steps for o in step):
        yield "shared memory: what was measured are the calls, without their waits"
    if all(o.bytes is None for step in steps for o in step):
        yield "the file tells no sizes: calls were matched by kind and order alone"
    if steps and (end := _step_us(run, steps)):
        took = median(end)
        ratio = f", {took / line.step_us:.2f}x" if line.step_us else ""
        yield f"step: predicted {show_us(line.step_us)}, measured {show_us(took)}{ratio}"
    if calls:
        took, said = sum(m.us for m in calls.values()), sum(r.us for r in found)
        exposed = sum(m.exposed_us for m in calls.values())
        yield f"communication: predicted {show_us(said)}, measured {show_us(took)}"
        yield (
            f"exposed: predicted {show_us(sum(r.exposed_us for r in found))}, measured "
            + show_us(exposed)
        )
    for row in [r for r in found if r.us and not 1 / FAR < r.ratio < FAR][:LISTED]:
        yield f"{row.op} at {row.source or '?'} ({row.phase}): {row.ratio:.2g}x the predicted time"


def _step_us(run: ObservedRun, steps: Sequence[Sequence[ObservedCall]]) -> list[float]:
    """How long steps took: by the marks, else from the first call of one to that of the next."""
    if run.marks:
        firsts = [s[0].start_us for s in steps if s]
        return [b - a for a, b in run.marks if any(a <= x < b for x in firsts)]
    begins = [s[0].start_us for s in steps if s]
    return [b - a for a, b in pairwise(begins)]


def _listed(texts: Iterable[str]) -> str:
    found = Counter(texts)
    shown = [f"{n} x {text}" if n > 1 else text for text, n in found.most_common(LISTED)]
    rest = len(found) - LISTED
    return "; ".join(shown) + (f"; and {rest} more kinds" if rest > 0 else "")


def _call(c: Any) -> str:
    where = f" at {c.source}" if c.source else ""
    return f"{c.op} of {show_bytes(c.bytes)} over {c.label}{where}"


def _seen(o: ObservedCall) -> str:
    size = f" of {show_bytes(o.bytes)}" if o.bytes is not None else ""
    return f"{o.kind or o.name}{size}" + (f" over {o.group}" if o.group else "")


HEAD = (
    *("collective", "axis", "phase", "calls", "predicted", "measured", "ratio", "exposed"),
    *("measured", "source"),
)
ALIGN = "<<<>>>>>><"


def render(found: Against, top: int = 20) -> str:
    """For a terminal."""
    lines = [f"against {found.title}:", *(f"  {note}" for note in found.notes)]
    if found.rows:
        lines += ["", *table([HEAD, *map(_cells, found.rows[:top])], ALIGN)]
    if len(found.rows) > top:
        lines.append(f"... and {len(found.rows) - top} more lines")
    return "\n".join(lines)


def _cells(r: RunRow) -> tuple[str, ...]:
    times = show_us(r.us), show_us(r.measured_us), f"{r.ratio:.2f}x"
    exposed = show_us(r.exposed_us), show_us(r.measured_exposed_us)
    return r.op, r.axis, r.phase, str(r.count), *times, *exposed, r.source


def page_data(line: Timeline, found: Against | None) -> dict[str, Any]:
    """What the page shows: the rows, and the first step's calls below the lanes they were
    predicted on, from the start of that step."""
    if found is None:
        return {"title": "", "notes": [], "rows": [], "lanes": [], "calls": {}}
    step = found.found[0] if found.found else {}
    zero = _zero(line, found, step)
    lanes: dict[str, list[list[float]]] = {}
    streams = {s.collective: s.stream for s in line.spans if s.collective is not None}
    for i, o in sorted(step.items(), key=lambda x: x[1].start_us):
        ends = [round(o.start_us - zero, 3), round(o.end_us - zero, 3), i]
        lanes.setdefault(streams.get(i, ""), []).append(ends)
    return {
        "title": found.title,
        "notes": list(found.notes),
        "rows": [{**vars(r), "ratio": r.ratio} for r in found.rows],
        "calls": {i: [round(m.us, 3), round(m.exposed_us, 3)] for i, m in found.calls.items()},
        "lanes": [
            {"stream": s, "spans": spans, "end_us": max(b for _, b, _ in spans)}
            for s, spans in lanes.items()
        ],
    }


def _zero(line: Timeline, found: Against, step: dict[int, ObservedCall]) -> float:
    """When the first step began: at its mark; else so that the first call begins as predicted."""
    if not step:
        return 0.0
    first, one = min(step.items(), key=lambda x: x[1].start_us)
    begun = [a for a, b in found.run.marks if a <= one.start_us < b]
    return begun[0] if begun else one.start_us - line.issued_us.get(first, 0.0)
