"""A timeline as a table for a terminal, with a verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fcoll.report.advice import TOP, Advice
from fcoll.report.summary import Moved, Row, gain, moves, rows, tail_us, verdict
from fcoll.report.why import Why
from fcoll.scheduling.timeline import Timeline, busy_us
from fcoll.units import alarm, show_bytes, show_us, table

HEAD = (
    *("collective", "axis", "n", "phase", "count", "bytes", "form", "time", "exposed", ""),
    "source",
)
ALIGN = "<<><>><>><<"
BAR = 10
BUCKET = re.compile(r"bucket_(\d+): (.+)")  # as a reducer names the part of the program
BUCKET_HEAD = ("bucket", "bytes", "from", "to", "exposed", "parameters")


def render(
    line: Timeline,
    other: Timeline | None = None,
    top: int = 20,
    advice: Sequence[Advice] = (),
    why: Mapping[int, Why] | None = None,
) -> str:
    """What would help, the most exposed collectives, then the verdict. ``other`` is the same step
    afterwards: then what was gained, and what moved, comes first. ``why``, the reasons of the last
    (fcoll.report.why), adds a column."""
    parts = [*_summary(line)]
    if other is not None:
        before = ["before:", *parts, "", "after:", *_summary(other)]
        parts = [gain(line, other), "", *before, *_moves(moves(line, other), top)]
        line = other
    if advice:
        parts += ["", "what would help, each by itself:"]
        parts += [f"  {i}. {one}" for i, one in enumerate(advice[:TOP], 1)]
    found = rows(line, why)
    if found:
        cells = [HEAD, *(_cells(r, found) for r in found[:top])]
        parts += ["", *table(cells, ALIGN)] if why is None else ["", *_with_causes(cells, found)]
    if len(found) > top:
        rest = found[top:]
        exposed = show_us(sum(r.exposed_us for r in rest))
        parts.append(f"... and {len(rest)} more lines with {exposed} exposed")
    return "\n".join([*parts, *_buckets(line, top), "", _verdict(line)])


def _verdict(line: Timeline) -> str:
    told = verdict(line)
    return alarm(told) if line.machine.too_small_for(line.peak_bytes) else told


def _summary(line: Timeline) -> list[str]:
    mesh = " x ".join(f"{axis}={n}" for axis, n in line.mesh.items()) or "no mesh"
    busy = busy_us(line.spans)
    streams = ", ".join(f"{s} {show_us(busy[s])}" for s in line.streams[1:]) or "none"
    share = f" ({line.exposed_share:.0%})" if line.step_us else ""
    late = sum(s.us for s in line.host_waits)
    host = f" + waiting for the host {show_us(late)}" if late else ""
    count = len(line.collectives)
    return [
        f"{line.machine.name}, {mesh}, rank {line.rank}: {count} collective{'s' * (count != 1)}",
        f"step {show_us(line.step_us)} = compute {show_us(line.compute_us)} + "
        f"exposed {show_us(line.exposed_total_us)}{share}{host}{_tail(line)}",
        f"communication: {streams}; peak memory {_peak(line)}",
    ]


def _peak(line: Timeline) -> str:
    shown, over = show_bytes(line.peak_bytes), line.machine.too_small_for(line.peak_bytes)
    return alarm(f"{shown}, {over}") if over else shown


def _tail(line: Timeline) -> str:
    rest = tail_us(line)
    return f" + {show_us(rest)} that no one waits for" if rest > 1e-3 * line.step_us else ""


def _moves(found: list[Moved], top: int) -> list[str]:
    if not found:
        return []
    head = ("moved", "axis", "phase", "calls", "compute it is under way", "exposed", "source")
    cells = [
        (
            m.op,
            m.axis,
            m.phase,
            _arrow(*map(str, m.count)),
            _arrow(*map(show_us, m.lead_us)),
            _arrow(*map(show_us, m.exposed_us)),
            m.source,
        )
        for m in found[:top]
    ]
    return ["", *table([head, *cells], "<<<>>><")]


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _with_causes(cells: list[tuple[str, ...]], found: list[Row]) -> list[str]:
    """The table with why before the source."""
    causes = ["why", *(row.why for row in found[: len(cells) - 1])]
    wider = [(*c[:-1], cause, c[-1]) for c, cause in zip(cells, causes, strict=True)]
    return table(wider, ALIGN + "<")


def _cells(row: Row, found: list[Row]) -> tuple[str, ...]:
    most = max(r.exposed_us for r in found) or 1.0
    bar = "█" * round(BAR * row.exposed_us / most)
    return (
        row.op,
        row.axis,
        str(row.n),
        row.phase,
        str(row.count),
        show_bytes(row.bytes),
        row.form,
        show_us(row.us),
        show_us(row.exposed_us),
        bar.ljust(BAR),
        row.source,
    )


def _buckets(line: Timeline, top: int) -> list[str]:
    """Of each gradient bucket: when it is under way, and the parameters in it."""
    times = {span.collective: span for span in line.spans if span.stream != "compute"}
    rows = []
    for call in line.collectives:
        found = BUCKET.fullmatch(call.module)
        span = times.get(call.id)
        if found is None or span is None:
            continue
        exposed = line.exposed_us.get(call.id, 0.0)
        shown = tuple(map(show_us, (span.start_us, span.end_us, exposed)))
        rows.append((found[1], show_bytes(call.bytes), *shown, found[2]))
    if not rows:
        return []
    more = [f"... and {len(rows) - top} more buckets"] if len(rows) > top else []
    return ["", *table([BUCKET_HEAD, *rows[:top]], ">>>>><"), *more]
