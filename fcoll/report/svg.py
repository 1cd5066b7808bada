"""A timeline as a picture: SVG, and PNG where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from fcoll.report.summary import verdict
from fcoll.scheduling.timeline import Span, Timeline
from fcoll.units import show_bytes, show_us

WIDTH, LEFT, RIGHT = 1100, 84, 16
LANE, GAP, MEMORY = 26, 8, 64

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #14181f; } .soft { fill: #5b6472; }
.title { font-size: 14px; font-weight: 600; } .page { fill: #ffffff; } .lane { fill: #edf0f3; }
.matmul { fill: #4a6fa5; } .other { fill: #9db4d3; } .hidden { fill: #3f9d7a; }
.exposed { fill: #d9552c; } .alarm { fill: #c62828; } .blocked { fill: #f7d9cd; }
.memory { fill: #7a5ea833; stroke: #7a5ea8; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebef; } .soft { fill: #98a2b0; } .page { fill: #181c22; } .lane { fill: #22272f; }
  .alarm { fill: #ff6b6b; }
  .matmul { fill: #6e97d4; } .other { fill: #48628a; } .blocked { fill: #4a2a1e; }
}
"""

#: class -> [(start, end)]
Pieces = dict[str, list[tuple[float, float]]]


def render(line: Timeline, other: Timeline | None = None) -> str:
    """One picture; with ``other``, the step afterwards, below it on the same scale."""
    lines = [line] if other is None else [line, other]
    names = [""] if other is None else ["before: ", "after: "]
    longest = max(x.step_us for x in lines) or 1.0
    parts, top = [], 12.0
    for x, name in zip(lines, names, strict=True):
        picture, height = _picture(x, name, longest, max(y.peak_bytes for y in lines), top)
        parts += picture
        top += height + 18
    top += 14  # for the legend
    return document([*parts, *_legend(top)], WIDTH, top, title=verdict(lines[-1]))


def document(
    parts: Iterable[str], width: float, height: float, style: str = "", title: str = ""
) -> str:
    """An SVG file of these parts; ``style`` comes to STYLE."""
    size = f'width="{width:.0f}" height="{height:.0f}"'
    view = f'viewBox="0 0 {width:.0f} {height:.0f}" {size} role="img"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {view}>']
    head += [f"<title>{escape(title)}</title>"] if title else []
    head += [f"<style>{STYLE}{style}</style>", f'<rect class="page" {size}/>']
    return "\n".join([*head, *parts, "</svg>\n"])


def _picture(
    line: Timeline, name: str, longest: float, most: int, top: float
) -> tuple[list[str], float]:
    scale = (WIDTH - LEFT - RIGHT) / longest
    text = f"{name}{show_us(line.step_us)}, {verdict(line)}"
    parts = [f'<text class="title" x="16" y="{top + 14:.0f}">{escape(text)}</text>']
    y = top + 26
    for stream in line.streams:
        parts.append(f'<text x="16" y="{y + 17:.0f}">{escape(stream[:11])}</text>')
        parts.append(_rect("lane", LEFT, WIDTH - RIGHT, y))
        for kind, spans in pieces(line, stream).items():
            drawn = merged(((a * scale, b * scale) for a, b in spans), 0.8)
            parts += [_rect(kind, LEFT + a, LEFT + b, y) for a, b in drawn]
        y += LANE + GAP
    parts += _memory(line, scale, y, most)
    return parts, y + MEMORY - top


def pieces(line: Timeline, stream: str) -> Pieces:
    """What is drawn on a stream, in the order of drawing."""
    mine = [s for s in line.spans if s.stream == stream]
    if stream == "compute":
        products = {s.name for s in line.steps if s.flops != 0}
        return {
            "blocked": _ends(line.blocked),
            "other": _ends(s for s in mine if s.step not in products),
            "matmul": _ends(s for s in mine if s.step in products),
        }
    ids = {s.collective for s in mine}
    return {
        "hidden": _ends(mine),
        "exposed": _ends(s for s in line.blocked if s.collective in ids),
    }


def _ends(spans: Iterable[Span]) -> list[tuple[float, float]]:
    return [(s.start_us, s.end_us) for s in spans]


def merged(pieces: Iterable[tuple[float, float]], near: float) -> list[tuple[float, float]]:
    """Pieces in order, those that (nearly) touch made one: as many as can be told apart."""
    made: list[tuple[float, float]] = []
    for a, b in sorted(pieces):
        if made and a - made[-1][1] < near:
            made[-1] = (made[-1][0], max(made[-1][1], b))
        else:
            made.append((a, b))
    return made


def _rect(kind: str, x1: float, x2: float, y: float) -> str:
    width = max(x2 - x1, 0.3)
    return f'<rect class="{kind}" x="{x1:.2f}" y="{y:.0f}" width="{width:.2f}" height="{LANE}"/>'


def _memory(line: Timeline, scale: float, y: float, most: int) -> list[str]:
    low, tall = y + MEMORY - 4, MEMORY - 18
    outline = [f"M{LEFT:.2f},{low:.1f}"]
    for us, nbytes in _thinned(line.memory, 0.5 / scale):
        level = low - tall * nbytes / (most or 1)
        outline.append(f"H{LEFT + us * scale:.2f}V{level:.1f}")
    outline.append(f"H{LEFT + line.step_us * scale:.2f}V{low:.1f}Z")
    over = line.machine.too_small_for(line.peak_bytes)
    peak = f"peak {show_bytes(line.peak_bytes)}{over and ', ' + over}"
    return [
        f'<text x="16" y="{low - tall / 2 + 4:.0f}">memory</text>',
        f'<path class="memory" d="{"".join(outline)}"/>',
        f'<text class="{"alarm" if over else "soft"}" x="{LEFT + 4}" y="{y + 8:.0f}">{peak}</text>',
    ]


def _thinned(points: Sequence[tuple[float, int]], apart: float) -> Iterable[tuple[float, int]]:
    """The highest point of each stretch."""
    best: tuple[float, int] | None = None
    for us, nbytes in points:
        if best is None or us - best[0] > apart:
            if best is not None:
                yield best
            best = (us, nbytes)
        elif nbytes > best[1]:
            best = (best[0], nbytes)
    if best is not None:
        yield best


def _legend(bottom: float) -> list[str]:
    parts, x = [], 16.0
    kinds = ("matmul", "other", "hidden", "exposed")
    names = ("matrix products", "other compute", "hidden communication", "exposed communication")
    for kind, name in zip(kinds, names, strict=True):
        parts.append(f'<rect class="{kind}" x="{x}" y="{bottom - 20:.0f}" width="10" height="10"/>')
        parts.append(f'<text class="soft" x="{x + 15}" y="{bottom - 11:.0f}">{name}</text>')
        x += 28 + 6.6 * len(name)
    return parts


def save_png(path: str | Path, line: Timeline, other: Timeline | None = None) -> None:
    """The same picture as PNG. It needs matplotlib: pip install fcoll[report]."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    colors = {"matmul": "#4a6fa5", "other": "#9db4d3", "hidden": "#3f9d7a"}
    colors |= {"exposed": "#d9552c", "blocked": "#f7d9cd"}
    lines = [line] if other is None else [line, other]
    figure = Figure(figsize=(12, 3.2 * len(lines)), layout="constrained")
    axes = figure.subplots(2 * len(lines), 1, sharex=True, squeeze=False)[:, 0]
    unit = max(x.step_us for x in lines) / 3000 or 1.0
    for i, x in enumerate(lines):
        lanes, memory = axes[2 * i], axes[2 * i + 1]
        for row, stream in enumerate(x.streams):
            for kind, spans in pieces(x, stream).items():
                bars = [(a / 1000, (b - a) / 1000) for a, b in merged(spans, unit)]
                lanes.broken_barh(bars, (row - 0.4, 0.8), color=colors[kind])
        lanes.set_yticks(range(len(x.streams)), x.streams)
        lanes.invert_yaxis()
        lanes.set_title(verdict(x), fontsize=10, loc="left")
        points = [*x.memory, (x.step_us, x.memory[-1][1])]
        heights = [nbytes / 2**30 for _, nbytes in points]
        memory.fill_between([us / 1000 for us, _ in points], heights, step="post", color="#7a5ea8")
        memory.set_ylabel("GiB")
    axes[-1].set_xlabel("ms")
    figure.savefig(path, dpi=120)
