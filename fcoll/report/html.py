"""A timeline as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import json
import linecache
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from fcoll.report.advice import Advice
from fcoll.report.against import Against, page_data
from fcoll.report.layouts import section
from fcoll.report.summary import gain, moves, tail_us, verdict
from fcoll.report.why import CAUSES, Why, reasons
from fcoll.scheduling.timeline import Timeline
from fcoll.source import lines_in, site_of
from fcoll.units import show_bytes

# The page's parts, in the order in which its script reads them.
SCRIPTS = ("base", "lanes", "moving", "panel", "filter", "table", "head", "export", "main")
CONTEXT = 2  # lines of source shown above and below the one that counts
RANKS_SHOWN = 8


def render(
    line: Timeline,
    other: Timeline | None = None,
    *,
    title: str = "step",
    names: tuple[str, str] = ("before", "after"),
    advice: Sequence[Advice] = (),
    run: Against | None = None,
    layouts: Sequence[Mapping[str, str]] = (),
) -> str:
    """The page, with what would help on top. With ``other``, the same step afterwards, it opens on
    what was gained and what moved, and has a toggle between the two. With ``run``, a real run of
    the last of them, it shows what was measured beside what was predicted. ``layouts`` are the
    trace's."""
    lines = [line] if other is None else [line, other]
    sources = {c.source for x in lines for c in x.collectives if c.source}
    sources |= {s.source for x in lines for s in x.steps if s.source}
    data = {
        "title": title,
        "names": list(names[: len(lines)]),
        "timelines": [_data(x) for x in lines],
        "advice": [vars(one) for one in advice],
        "gain": "" if other is None else gain(line, other),
        "moved": [] if other is None else [vars(m) for m in moves(line, other)],
        "causes": CAUSES,
        "run": page_data(lines[-1], run),
        "sources": {s: text for s in sorted(sources) if (text := source_text(s))},
    }
    # "</" inside a string would end the script element that holds the data.
    json_text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    page = _page().replace("</main>", section(layouts) + "</main>", 1)
    return page.replace("/*DATA*/", json_text, 1)


@cache
def _page() -> str:
    """The page without data, put together from its parts."""
    folder = resources.files("fcoll.report").joinpath("page")
    script = "\n".join(folder.joinpath(f"{name}.js").read_text() for name in SCRIPTS)
    page = folder.joinpath("page.html").read_text()
    style = folder.joinpath("style.css").read_text()
    return page.replace("/*STYLE*/", style, 1).replace("/*SCRIPT*/", script, 1)


def source_text(source: str) -> list[tuple[int | str, str, bool]]:
    """(number, text, is it the one) of the lines around "model.py:31", if the file is here; of a
    call in a library, of both lines, each below its name."""
    lines = lines_in(source)
    heads = [[("", line, False)] if len(lines) > 1 else [] for line in lines]
    return [row for line, head in zip(lines, heads, strict=True) for row in [*head, *_around(line)]]


def _around(line: str) -> list[tuple[int | str, str, bool]]:
    site = site_of(line)
    if site is None:
        return []
    here, text = site[1], linecache.getlines(site[0])
    near = range(max(1, here - CONTEXT), min(len(text), here + CONTEXT) + 1)
    return [(i, text[i - 1].rstrip()[:160], i == here) for i in near]


def _data(line: Timeline) -> dict[str, Any]:
    strings, why = _Strings(), reasons(line)
    stream = {name: i for i, name in enumerate(line.streams)}
    spans = []
    for span in line.spans:
        step = line.by_step[span.step]
        texts = (strings[step.name], strings[step.op], strings[step.module], strings[step.source])
        collective = -1 if span.collective is None else span.collective
        product = int(span.collective is None and step.flops != 0)
        times = (_us(span.start_us), _us(span.end_us))
        spans.append([stream[span.stream], *times, *texts, collective, product])
    return {
        "machine": line.machine.name,
        "mesh": " × ".join(f"{axis}={n}" for axis, n in line.mesh.items()),
        "rank": line.rank,
        "verdict": verdict(line),
        "step_us": _us(line.step_us),
        "compute_us": _us(line.compute_us),
        "exposed_us": _us(line.exposed_total_us),
        "hidden_us": _us(sum(line.hidden_us.values())),
        "tail_us": _us(tail_us(line)),
        "host_us": _us(sum(s.us for s in line.host_waits)),
        "peak_bytes": line.peak_bytes,
        "over": line.machine.too_small_for(line.peak_bytes),
        "collectives_count": len(line.collectives),
        "streams": list(line.streams),
        "spans": spans,
        "blocked": [[_us(s.start_us), _us(s.end_us), s.collective] for s in line.blocked],
        "memory": [[_us(us), nbytes] for us, nbytes in line.memory],
        "steps": {s.name: _step(s) for s in line.steps if s.kind == "compute"},
        "collectives": {c.id: _collective(line, c, why.get(c.id)) for c in line.collectives},
        "strings": strings.all,
    }


def _us(value: float) -> float:
    return round(value, 3)


def _step(step: Any) -> dict[str, str]:
    show = {"dtype": step.dtype, "phase": step.phase}
    if step.flops != 0:
        show["flops"] = _flops(step.flops)
    for name, nbytes in (("read", step.read_bytes), ("write", step.write_bytes)):
        show[name] = show_bytes(nbytes) if isinstance(nbytes, (int, float)) else str(nbytes)
    if step.fused_with not in (None, step.name):
        show["kernel"] = f"fused with {step.fused_with}"
    return show


def _collective(line: Timeline, c: Any, why: Why | None) -> dict[str, Any]:
    ranks = ", ".join(map(str, c.ranks[:RANKS_SHOWN]))
    tensors = [
        f"{dtype} [{', '.join(map(str, shape))}]"
        for dtype, shape in zip(c.dtypes, c.shapes, strict=True)
    ]
    return {
        "op": c.op,
        "group": c.label,
        "axis": c.axis or "",
        "n": len(c.ranks),
        "ranks": ranks + (", …" if len(c.ranks) > RANKS_SHOWN else ""),
        "bytes": _plain(c.bytes),
        "wire_bytes": _plain(c.wire_bytes),
        "tensors": ", ".join(tensors[:4]) + (f" and {len(tensors) - 4} more" * (len(tensors) > 4)),
        "args": ", ".join(f"{k}={v}" for k, v in c.args.items() if v is not None),
        "phase": c.phase,
        "source": c.source,
        "module": c.module,
        "form": line.forms.get(c.id, ""),
        "why": None if why is None else {"cause": why.cause, "facts": why.facts},
        "start": c.start,
        "wait": c.wait,
        "exposed_us": _us(line.exposed_us.get(c.id, 0.0)),
        "hidden_us": _us(line.hidden_us.get(c.id, 0.0)),
        "issued_us": _us(line.issued_us.get(c.id, 0.0)),
        "waited_us": _us(line.waited_us[c.id]) if c.id in line.waited_us else None,
    }


def _plain(value: Any) -> float:
    try:
        return float(value)
    except TypeError:  # a symbol
        return 0.0


class _Strings:
    """Each text once: text -> its number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._number: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        if text not in self._number:
            self._number[text] = len(self.all)
            self.all.append(text)
        return self._number[text]


def _flops(flops: Any) -> str:
    if not isinstance(flops, (int, float)):
        return str(flops)
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops:.0f} FLOP"
