"""A timeline as Chrome trace events, for ui.perfetto.dev: a track a stream, an arrow from each
collective to the point where compute needs it, and the memory as a counter."""

from __future__ import annotations

import json
from typing import Any

from fcoll.scheduling.timeline import Span, Timeline


def render(line: Timeline, other: Timeline | None = None) -> str:
    """The JSON text. ``other``, the step afterwards, is a second process of the trace."""
    events = _events(line, 0, "step" if other is None else "before")
    if other is not None:
        events += _events(other, 1, "after")
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(line: Timeline, pid: int, title: str) -> list[dict[str, Any]]:
    tids = {stream: i for i, stream in enumerate(line.streams)}
    name = f"{title}, rank {line.rank} on {line.machine.name}"
    events = [_named("process_name", pid, 0, name)]
    for stream, tid in tids.items():
        events.append(_named("thread_name", pid, tid, stream))
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid}
            | {"args": {"sort_index": tid}}
        )
    shown = [span for span in line.spans if _takes_time(span)]
    blocked = [span for span in line.blocked if _takes_time(span)]
    events += [_slice(line, span, pid, tids[span.stream]) for span in shown]
    events += [_blocked(line, span, pid) for span in blocked]
    compute = [s for s in [*shown, *blocked] if s.stream == "compute"]
    last = max((_us(s.start_us), _us(s.end_us)) for s in compute) if compute else (-1.0, -1.0)
    for span in shown:
        if span.collective is not None and span.collective in line.waited_us:
            events += _arrow(line, span, pid, tids[span.stream], last)
    return events + [
        {"ph": "C", "name": "memory", "pid": pid, "ts": _us(us), "args": {"bytes": nbytes}}
        for us, nbytes in line.memory
    ]


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(value: float) -> float:
    return round(value, 3)


def _takes_time(span: Span) -> bool:
    """In whole nanoseconds, which is what is written: a slice without length cannot be seen."""
    return _us(span.end_us) > _us(span.start_us)


def _number(value: Any) -> Any:
    """A number as such, so that Perfetto can add it up; an expression as text."""
    return value if isinstance(value, (int, float)) else str(value)


def _slice(line: Timeline, span: Span, pid: int, tid: int) -> dict[str, Any]:
    step = line.by_step[span.step]
    args: dict[str, Any] = {"node": step.name, "module": step.module, "source": step.source}
    if span.collective is None:
        args |= {"flops": _number(step.flops), "read_bytes": _number(step.read_bytes)}
        args |= {"written_bytes": _number(step.write_bytes)}
        args |= {"kernel": step.fused_with or step.name}
    else:
        c = line.issued[span.collective]
        args |= {"group": c.group, "axis": c.axis or "", "ranks": len(c.ranks)}
        args |= {"bytes": _number(c.bytes), "wire_bytes": _number(c.wire_bytes)}
        args |= {"exposed_us": _us(line.exposed_us[c.id]), "hidden_us": _us(line.hidden_us[c.id])}
    return _complete(step.op, step.phase, span, pid, tid, args)


def _blocked(line: Timeline, span: Span, pid: int) -> dict[str, Any]:
    assert span.collective is not None
    c = line.issued[span.collective]
    args = {"source": c.source, "node": c.start}
    return _complete(f"blocked by {c.op}", "exposed", span, pid, 0, args)


def _complete(
    name: str, category: str, span: Span, pid: int, tid: int, args: dict[str, Any]
) -> dict[str, Any]:
    # From the rounded ends, so that neighbours never overlap by a rounding.
    start, end = _us(span.start_us), _us(span.end_us)
    times = {"ts": start, "dur": _us(end - start)}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": args}


def _arrow(
    line: Timeline, span: Span, pid: int, tid: int, last: tuple[float, float]
) -> list[dict[str, Any]]:
    """From the collective to the wait: a start binds to the slice around it, an end to the next on
    its track. If no slice starts after the wait, the arrow ends inside the ``last`` one; it is left
    out if that ended before the collective began."""
    assert span.collective is not None
    flow = {"name": "wait", "cat": "wait", "id": pid * 1_000_000 + span.collective, "pid": pid}
    begun = _us(span.start_us)
    end: dict[str, Any] = {"ts": max(_us(line.waited_us[span.collective]), begun)}
    if last[0] < end["ts"]:
        inside = _us(last[1] - 0.001)
        if inside < begun:
            return []
        end = {"ts": inside, "bp": "e"}
    return [
        {"ph": "s", "tid": tid, "ts": begun, **flow},
        {"ph": "f", "tid": 0, **end, **flow},
    ]
