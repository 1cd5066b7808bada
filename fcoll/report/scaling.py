"""Points of growing worlds as a table with bars for a terminal, and as an SVG plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from fcoll.report.scale import Point
from fcoll.report.svg import document
from fcoll.units import alarm, show_bytes, show_us, table

BAR = 28


def render(points: Sequence[Point], axis: str, failed: Mapping[int, str] | None = None) -> str:
    """A table; its bars are the step: compute, then what is exposed."""
    most = max((p.step_us for p in points), default=0.0) or 1.0
    head = (axis, "ranks", "step", "compute", "exposed", "share", "sent a rank", "memory", "")
    cells = [
        (
            str(p.size),
            str(p.ranks),
            show_us(p.step_us),
            show_us(p.compute_us),
            show_us(p.exposed_us),
            f"{p.exposed_share:.0%}",
            show_bytes(p.wire_bytes),
            show_bytes(p.peak_bytes),
            "█" * round(BAR * p.compute_us / most) + "░" * round(BAR * p.exposed_us / most),
        )
        for p in points
    ]
    lines = [*table([head, *cells], ">>>>>>>><"), "", "█ compute  ░ exposed communication"]
    lines += [alarm(f"{axis}={p.size} does not fit: {p.over}") for p in points if p.over]
    return "\n".join([*lines, *(f"{axis}={n} failed: {why}" for n, why in (failed or {}).items())])


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 420, 76, 70, 44, 46


def plot(points: Sequence[Point], axis: str, title: str) -> str:
    """Step time as stacked areas over the size of the axis, and the exposed share as a line."""
    most = max(p.step_us for p in points) * 1.05 or 1.0
    logs = [math.log2(p.size) for p in points]
    span = (logs[-1] - logs[0]) or 1.0
    xs = [LEFT + (v - logs[0]) / span * (WIDTH - LEFT - RIGHT) for v in logs]
    base = HEIGHT - BOTTOM

    def y(us: float) -> float:
        return base - us / most * (base - TOP)

    compute = [y(p.compute_us) for p in points]
    total = [y(p.compute_us + p.exposed_us) for p in points]
    share = [base - p.exposed_share * (base - TOP) for p in points]
    parts = [
        f'<text class="title" x="16" y="24">{escape(title)}</text>',
        _area("matmul", xs, compute, [base] * len(xs)),
        _area("exposed", xs, total, compute),
        f'<polyline points="{_path(xs, share)}" class="share"/>',
    ]
    for i in range(5):
        at = base - i / 4 * (base - TOP)
        label = show_us(most * i / 4)
        parts.append(f'<text class="soft" x="{LEFT - 8}" y="{at + 4:.0f}" {_END}>{label}</text>')
        parts.append(
            f'<text class="soft" x="{WIDTH - RIGHT + 8}" y="{at + 4:.0f}">{25 * i}%</text>'
        )
    for px, p in zip(xs, points, strict=True):
        parts.append(f'<text class="soft" x="{px:.0f}" y="{base + 18}" {_MIDDLE}>{p.size}</text>')
    parts.append(
        f'<text class="soft" x="{WIDTH / 2}" y="{HEIGHT - 10}" {_MIDDLE}>{escape(axis)}</text>'
    )
    share_line = ".share { fill: none; stroke: #7a5ea8; stroke-width: 2 }"
    return document([*parts, *_legend()], WIDTH, HEIGHT, share_line)


_END, _MIDDLE = 'text-anchor="end"', 'text-anchor="middle"'


def _path(xs: Sequence[float], ys: Sequence[float]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(xs, ys, strict=True))


def _area(kind: str, xs: Sequence[float], top: Sequence[float], low: Sequence[float]) -> str:
    outline = _path([*xs, *reversed(xs)], [*top, *reversed(low)])
    return f'<polygon class="{kind}" points="{outline}"/>'


def _legend() -> list[str]:
    parts = []
    names = {"#4a6fa5": "compute", "#d9552c": "exposed", "#7a5ea8": "exposed share (right)"}
    for i, (color, name) in enumerate(names.items()):
        x = WIDTH - 380 + i * 110
        parts.append(f'<rect fill="{color}" x="{x}" y="14" width="10" height="10"/>')
        parts.append(f'<text class="soft" x="{x + 15}" y="23">{name}</text>')
    return parts
