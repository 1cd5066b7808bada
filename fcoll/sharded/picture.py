"""A layout as a picture: blocks in proportion, a colour for each rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

from fcoll.sharded._torch import ShardedTensorMetadata, ShardMetadata
from fcoll.sharded.draw import MOST_TABLES, Range, cuts_along, headline, range_text, who

SIDE, LEFT, TOP, GAP = 240, 70, 56, 40
LEAST = 8  # pixels that a block has at least, so that thin ones are seen
TITLE_CHAR = 7.6  # pixels of a letter of the title, about
TICK_GAP = 14  # pixels that numbers on an axis are apart at least

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #14181f; } .soft { fill: #5b6472; }
.title { font-size: 14px; font-weight: 600; } .page { fill: #ffffff; } rect { stroke: #ffffff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebef; } .soft { fill: #98a2b0; } .page { fill: #181c22; }
  rect { stroke: #181c22; } .block { fill: #14181f; }
}
"""


def svg(metadata: ShardedTensorMetadata) -> str:
    """The tensor's last two dims that are cut, once for each block of the others."""
    full = [shard for shard in metadata.shards_metadata if math.prod(shard.shard_sizes)]
    size = tuple(metadata.size)
    cut = [d for d in range(len(size)) if len(cuts_along(full, d)) > 1]
    down, across = _axes(cut, len(size))
    others = [d for d in cut if d not in (down, across)]
    blocks = list(itertools.product(*(cuts_along(full, d) for d in others)))[:MOST_TABLES]
    parts, left = [], LEFT
    for block in blocks:
        at = dict(zip(others, block, strict=True))
        here = [shard for shard in full if _covers(shard, at)]
        where = ", ".join(f"dim {d} {range_text(r)}" for d, r in at.items())
        parts.append(f'<text class="soft" x="{left}" y="{TOP - 14}">{where}</text>')
        parts += _panel(here, size, down, across, left)
        parts += _ticks(here, size, down, across, left)
        left += SIDE + GAP + LEFT * (down is not None)
    title = 24 + TITLE_CHAR * len(headline(metadata))
    width, height = max(round(title), left), TOP + SIDE + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(headline(metadata))}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            f'<text class="title" x="12" y="20">{escape(headline(metadata))}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _axes(cut: Sequence[int], ndim: int) -> tuple[int | None, int | None]:
    """The dims drawn downwards and to the right: those cut last. Of one, the last goes right."""
    if len(cut) > 1:
        return cut[-2], cut[-1]
    if cut and ndim > 1 and cut[0] == ndim - 1:
        return None, cut[0]
    return (cut[0], None) if cut else (None, None)


def _covers(shard: ShardMetadata, at: dict[int, Range]) -> bool:
    """Does it hold the part of the tensor that begins there?"""
    offsets, sizes = shard.shard_offsets, shard.shard_sizes
    return all(offsets[d] <= a < offsets[d] + sizes[d] for d, (a, _) in at.items())


def _panel(
    shards: Sequence[ShardMetadata],
    size: tuple[int, ...],
    down: int | None,
    across: int | None,
    left: float,
) -> list[str]:
    parts = []
    for shard in shards:
        y, height, rows = _span(shard, size, down)
        x, width, columns = _span(shard, size, across)
        holder = who(shard)
        colour = _colour(holder)
        label = " ".join(filter(None, (rows, columns)))
        parts += [
            f'<rect x="{left + x:.1f}" y="{TOP + y:.1f}" width="{max(width, LEAST):.1f}" '
            f'height="{max(height, LEAST):.1f}" fill="{colour}">'
            f"<title>{escape(holder)}: {label or 'all'}</title></rect>"
        ]
        if width > 44 and height > 16:
            middle = f'x="{left + x + width / 2:.1f}" y="{TOP + y + height / 2 + 4:.1f}"'
            parts.append(f'<text class="block" text-anchor="middle" {middle}>{holder}</text>')
    return parts


def _ticks(
    shards: Sequence[ShardMetadata],
    size: tuple[int, ...],
    down: int | None,
    across: int | None,
    left: float,
) -> list[str]:
    """Where blocks begin and end along the dims: on the left, and below."""
    parts = []
    if down is not None:
        parts.append(_soft(f"dim {down}", left - 8, TOP - 12, "end"))
        for at, y in _edges(shards, size[down], down, TICK_GAP):
            parts.append(_soft(str(at), left - 8, TOP + y + 4, "end"))
    if across is not None:
        below = TOP + SIDE + 16
        for at, x in _edges(shards, size[across], across, 2 * TICK_GAP):
            parts.append(_soft(str(at), left + x, below, "middle"))
        parts.append(_soft(f"dim {across}", left + SIDE / 2, below + 16, "middle"))
    return parts


def _edges(
    shards: Sequence[ShardMetadata], size: int, dim: int, gap: float
) -> list[tuple[int, float]]:
    """(index, pixels) of the edges of blocks along a dim; the last, and as many as have room."""
    edges = {s.shard_offsets[dim] for s in shards}
    scale = SIDE / size
    found: list[tuple[int, float]] = []
    for at in sorted(edges):
        if (not found or at * scale - found[-1][1] >= gap) and (size - at) * scale >= gap:
            found.append((at, at * scale))
    return [*found, (size, float(SIDE))]


def _soft(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text class="soft" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{text}</text>'


def _span(shard: ShardMetadata, size: tuple[int, ...], dim: int | None) -> tuple[float, float, str]:
    """(where it begins, how long it is, as pixels; the range as text) along a dim."""
    if dim is None:
        return 0.0, float(SIDE), ""
    scale = SIDE / size[dim]
    start, length = shard.shard_offsets[dim], shard.shard_sizes[dim]
    return start * scale, length * scale, f"dim {dim} {range_text((start, start + length))}"


def _colour(holder: str) -> str:
    """Ranks that are neighbours have colours far apart: steps of the golden angle."""
    number = int(holder.split()[-1]) if holder.startswith("rank ") else 0
    return f"hsl({number * 137.5 % 360:.0f} 55% 72%)"
