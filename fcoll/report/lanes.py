"""All ranks of a world for people: a lane for each, with what it computes, sends and waits for.

Ranks that do the same at the same time share a lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from fcoll.report import notebook
from fcoll.report.places import place_of
from fcoll.report.svg import document, merged
from fcoll.scheduling.rank_lines import RankLine
from fcoll.scheduling.timeline import Span
from fcoll.units import show_us, table

if TYPE_CHECKING:
    from fcoll.report.all_ranks import WorldTimeline

CELLS = 60  # characters of a lane in a terminal
WIDTH, LEFT, RIGHT, TOP, LANE, COMM, GAP = 1100, 150, 16, 44, 20, 6, 7


def alike(world: WorldTimeline) -> list[list[int]]:
    """The ranks, those with equal times together."""
    found: dict[RankLine, list[int]] = {}
    same: dict[int, list[int]] = {}  # by identity: most of a large world share theirs
    for rank, line in world.ranks.items():
        if id(line) not in same:
            same[id(line)] = found.setdefault(line, [])
        same[id(line)].append(rank)
    return list(found.values())


def names(ranks: list[int]) -> str:
    """
    >>> names([3]), names([0, 1]), names([0, 4, 8, 12])
    ('3', '0, 1', '0, 4, ... (4)')
    """
    shown = ", ".join(map(str, ranks[:2]))
    return shown + (f", ... ({len(ranks)})" if len(ranks) > 2 else "")


def place(world: WorldTimeline, ranks: list[int]) -> str:
    """Where they are: the axes on which all have the same place."""
    places = zip(*(place_of(r, world.mesh) for r in ranks), strict=True)
    same = [f"{a}={at[0]}" for a, at in zip(world.mesh, places, strict=True) if len({*at}) == 1]
    return ", ".join(same)


def title_of(world: WorldTimeline) -> str:
    mesh = " x ".join(f"{axis}={n}" for axis, n in world.mesh.items())
    return (
        f"{mesh}: step {show_us(world.step_us)}, {world.bubble_share:.1%} of all ranks' time idle"
    )


def as_dict(world: WorldTimeline) -> dict[str, Any]:
    return {
        "machine": world.machine.name,
        "mesh": world.mesh,
        "step_us": world.step_us,
        "bubble_share": world.bubble_share,
        "ranks_traced": list(world.ranks_traced),
        "ranks": [
            {
                "rank": rank,
                "compute_us": line.compute_us,
                "wait_us": line.wait_us,
                "bubble_us": world.bubble_us(rank),
                "end_us": line.end_us,
            }
            for rank, line in world.ranks.items()
        ],
    }


# -- for a terminal ---


def render(world: WorldTimeline, most: int = 16) -> str:
    """A lane for each rank: █ computes, ▒ backward, ░ waits for others, blank when it is done."""
    head = ("rank", "place", "compute", "waits", "idle", "")
    groups = alike(world)
    rows = [(*_facts(world, ranks), _cells(world, ranks[0])) for ranks in groups[:most]]
    lines = [title_of(world), *table([head, *rows], "><>>><")]
    if len(groups) > most:
        lines.append(f"... and {sum(map(len, groups[most:]))} more ranks")
    return "\n".join([*lines, "█ computes  ▒ computes backward  ░ waits"])


def _facts(world: WorldTimeline, ranks: list[int]) -> tuple[str, ...]:
    line, idle = world.ranks[ranks[0]], world.bubble_us(ranks[0]) / (world.step_us or 1.0)
    times = show_us(line.compute_us), show_us(line.wait_us), f"{idle:.0%}"
    return names(ranks), place(world, ranks), *times


def _cells(world: WorldTimeline, rank: int) -> str:
    """What the rank does most in each piece of the step."""
    piece = world.step_us / CELLS or 1.0
    marks: list[dict[str, float]] = [{} for _ in range(CELLS)]
    for mark, spans in zip("█▒░", _kinds(world, rank)[:3], strict=True):
        for span in spans:
            last = min(CELLS, int(span.end_us / piece) + 1)
            for i in range(int(span.start_us / piece), last):
                low, high = max(span.start_us, i * piece), min(span.end_us, (i + 1) * piece)
                marks[i][mark] = marks[i].get(mark, 0.0) + max(0.0, high - low)
    return "".join(_most(cell) for cell in marks).rstrip()


def _most(cell: dict[str, float]) -> str:
    best = max(cell, key=lambda mark: cell[mark], default=" ")
    return best if cell.get(best) else " "


def _kinds(world: WorldTimeline, rank: int) -> tuple[list[Span], ...]:
    """Forward and other compute, backward compute, waits, communication."""
    line, phases = world.ranks[rank], world.phases.get(rank, {})
    computes = [s for s in line.spans if s.stream == "compute"]
    back = [s for s in computes if phases.get(s.step) == "bwd"]
    forward = [s for s in computes if phases.get(s.step) != "bwd"]
    return forward, back, list(line.waits), [s for s in line.spans if s.stream != "compute"]


# -- as a picture and a page ---

KINDS = {
    "matmul": "compute",
    "other": "backward",
    "blocked": "bubble: waits for other ranks or its messages",
    "hidden": "communication under way",
}


def svg(world: WorldTimeline, most: int = 64) -> str:
    """A lane for each rank, bubbles marked, what is under way below it."""
    groups = alike(world)
    scale = (WIDTH - LEFT - RIGHT) / (world.step_us or 1.0)
    parts = [f'<text class="title" x="16" y="24">{escape(title_of(world))}</text>']
    y = float(TOP)
    for ranks in groups[:most]:
        parts += _lane(world, ranks, scale, y)
        y += LANE + COMM + GAP
    if len(groups) > most:
        left = sum(map(len, groups[most:]))
        parts.append(f'<text class="soft" x="16" y="{y + 12:.0f}">... and {left} more ranks</text>')
        y += 18
    parts += [*_ticks(world, scale, y), *_legend(y + 40)]
    return document(parts, WIDTH, y + 54, title=title_of(world))


def _lane(world: WorldTimeline, ranks: list[int], scale: float, y: float) -> list[str]:
    who, where, compute, waits, idle = _facts(world, ranks)
    about = f"rank {who} {where}: compute {compute}, waits {waits}, {idle} of the step idle"
    label = f"{who}  {where}"
    shown = label if len(label) <= 21 else label[:20] + "…"
    parts = [
        f"<g><title>{escape(about)}</title>",
        f'<text x="16" y="{y + 15:.0f}">{escape(shown)}</text>',
        _rect("lane", LEFT, WIDTH - RIGHT, y, LANE),
    ]
    forward, back, stands, sends = _kinds(world, ranks[0])
    end = Span("", "compute", world.ranks[ranks[0]].end_us, world.step_us)
    lanes = (("blocked", [*stands, end]), ("matmul", forward), ("other", back), ("hidden", sends))
    for kind, spans in lanes:
        top, tall = (y + LANE, COMM) if kind == "hidden" else (y, LANE)
        ends = ((LEFT + s.start_us * scale, LEFT + s.end_us * scale) for s in spans if s.us > 0)
        parts += [_rect(kind, a, b, top, tall) for a, b in merged(ends, 0.3)]
    return [*parts, "</g>"]


def _rect(kind: str, x1: float, x2: float, y: float, tall: float) -> str:
    wide = max(x2 - x1, 0.3)
    return f'<rect class="{kind}" x="{x1:.2f}" y="{y:.0f}" width="{wide:.2f}" height="{tall:.0f}"/>'


def _ticks(world: WorldTimeline, scale: float, y: float) -> list[str]:
    at = [world.step_us * i / 4 for i in range(5)]
    anchors = ("start", "middle", "middle", "middle", "end")
    return [
        f'<text class="soft" x="{LEFT + us * scale:.0f}" y="{y + 12:.0f}" text-anchor="{anchor}">'
        f"{show_us(us) if us else '0'}</text>"
        for us, anchor in zip(at, anchors, strict=True)
    ]


def _legend(y: float) -> list[str]:
    parts, x = [], 16.0
    for kind, name in KINDS.items():
        parts.append(f'<rect class="{kind}" x="{x}" y="{y - 9:.0f}" width="10" height="10"/>')
        parts.append(f'<text class="soft" x="{x + 15}" y="{y:.0f}">{name}</text>')
        x += 34 + 6.4 * len(name)
    return parts


PAGE_STYLE = """
:root { color-scheme: light dark; } body { margin: 0; background: #f6f7f9; color: #14181f;
font: 14px/1.45 system-ui, sans-serif; }
main { max-width: 1300px; margin: auto; padding: 20px 14px; }
h1 { font-size: 20px; margin: 0; overflow-wrap: anywhere; } .soft { color: #5b6472; }
section { background: #fff; border: 1px solid #dfe3e8; border-radius: 10px; margin-top: 14px;
overflow: auto; } svg { display: block; width: 100%; min-width: 760px; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 12px; text-align: right; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
th { color: #5b6472; font-size: 12.5px; }
tr + tr td { border-top: 1px solid #edf0f3; }
@media (prefers-color-scheme: dark) { body { background: #101317; color: #e8ebef; }
section { background: #181c22; border-color: #2b313a; } .soft, th { color: #98a2b0; }
tr + tr td { border-color: #22272f; } }
"""


def html(world: WorldTimeline, title: str) -> str:
    traced = f"{len(world.ranks)} ranks, of which {len(world.ranks_traced)} were traced"
    note = "A bubble is time in which a rank computes nothing. Ranks that do the same at the same "
    return page(
        title_of(world),
        f"{title} · {world.machine.name} · {traced}",
        [svg(world), _table(world)],
        f'<p class="soft">{note}time share a lane.</p>',
    )


def notebook_html(world: WorldTimeline) -> str:
    """What a notebook shows: the picture and the table."""
    return notebook.picture(svg(world), title_of(world)) + _table(world)


def _table(world: WorldTimeline) -> str:
    head = ("rank", "place", "compute", "waits", "idle")
    return notebook.table(head, [_facts(world, ranks) for ranks in alike(world)], "<<>>>")


def page(title: str, about: str, sections: Sequence[str], foot: str = "") -> str:
    """A plain page; ``sections`` and ``foot`` are HTML, the rest is text."""
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fcoll: {escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{PAGE_STYLE}</style>
</head><body><main><h1>{escape(title)}</h1>
<div class="soft">{escape(about)}</div>
{body}
{foot}</main></body></html>
"""
