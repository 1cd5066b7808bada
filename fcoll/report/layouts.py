"""Layouts of sharded tensors, which rank holds which block: as text, as a picture, and as a section
of a traced program's page."""

from __future__ import annotations

import itertools
import math
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

import torch

from fcoll.units import show_bytes

MOST_ROWS, MOST_COLUMNS, MOST_TABLES = 32, 12, 8  # more than that nobody reads
MOST_PICTURES = 24  # on a page

PAGE_STYLE = """
#layouts summary { padding: 12px 16px; cursor: pointer; }
#layouts summary h2 { display: inline; }
#layouts .pictures { display: flex; flex-wrap: wrap; gap: 14px; padding: 0 16px 16px; }
#layouts figure { margin: 0; max-width: 100%; overflow-x: auto; }
#layouts figcaption { font-size: 12.5px; color: var(--soft); margin-bottom: 4px; }
#layouts img { display: block; }
"""

# of a picture, in pixels
SIDE, LEFT, TOP, GAP = 240, 70, 56, 40
LEAST = 8  # a side of a block at least, so that thin ones are seen
TITLE_CHAR = 7.6  # the width of a letter of the title, about
TICK_GAP = 14  # between numbers on an axis at least
PICTURE_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #14181f; } .soft { fill: #5b6472; }
.title { font-size: 14px; font-weight: 600; } .page { fill: #ffffff; } rect { stroke: #ffffff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebef; } .soft { fill: #98a2b0; } .page { fill: #181c22; }
  rect { stroke: #181c22; } .block { fill: #14181f; }
}
"""

Range = tuple[int, int]


@dataclass(frozen=True)
class LayoutBlock:
    """A block of a tensor: where it begins, how long it is in each dim, and where it lies."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    placement: str
    rank: int | None = None

    @property
    def holder(self) -> str:
        """Its rank, or its placement where that names none."""
        return self.placement if self.rank is None else f"rank {self.rank}"

    def covers(self, ranges: Mapping[int, Range]) -> bool:
        """Does it hold the part of the tensor that begins with these ranges, by dim?"""
        return all(
            self.offsets[d] <= a < self.offsets[d] + self.sizes[d] for d, (a, _) in ranges.items()
        )


@dataclass(frozen=True)
class TensorLayout:
    size: Sequence[int]
    dtype: torch.dtype
    blocks: Sequence[LayoutBlock]

    @cached_property
    def filled(self) -> list[LayoutBlock]:
        """The blocks that have elements."""
        return [block for block in self.blocks if math.prod(block.sizes)]

    @cached_property
    def cuts(self) -> list[list[Range]]:
        """Of each dim: the ranges between all places where some block begins or ends."""
        return [
            list(itertools.pairwise(sorted({edge for b in self.filled for edge in _edges(b, d)})))
            for d in range(len(self.size))
        ]

    @property
    def cut_dims(self) -> list[int]:
        return [d for d, ranges in enumerate(self.cuts) if len(ranges) > 1]

    def headline(self) -> str:
        """Size, dtype, bytes, and on which ranks."""
        count = f"{len(self.blocks)} shard{'s' * (len(self.blocks) != 1)}"
        total = show_bytes(math.prod(self.size) * self.dtype.itemsize)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"ShardedTensor {tuple(self.size)} {dtype}: {total} in {count} on {self.ranks()}"

    def ranks(self) -> str:
        """``ranks 0-3``, ``ranks 0, 2``, ``rank 1``; placements without a rank as they are."""
        if any(block.rank is None for block in self.blocks):
            return ", ".join(sorted({block.placement for block in self.blocks}))
        ranks = sorted({block.rank for block in self.blocks if block.rank is not None})
        if len(ranks) == 1:
            return f"rank {ranks[0]}"
        if ranks == list(range(ranks[0], ranks[-1] + 1)):
            return f"ranks {ranks[0]}-{ranks[-1]}"
        return f"ranks {', '.join(map(str, ranks))}"


def _edges(block: LayoutBlock, dim: int) -> Range:
    return block.offsets[dim], block.offsets[dim] + block.sizes[dim]


def _show_range(cut: Range) -> str:
    return f"{cut[0]}:{cut[1]}"


# -- as text ---


def layout_text(layout: TensorLayout) -> str:
    """The blocks as tables of the two last dims that are cut, one for each block of the others."""
    cuts = layout.cuts
    others, shown = layout.cut_dims[:-2], layout.cut_dims[-2:]
    lines = [layout.headline()]
    tables = list(itertools.product(*(cuts[d] for d in others))) if layout.filled else []
    for ranges in tables[:MOST_TABLES]:
        at = dict(zip(others, ranges, strict=True))
        if at:
            where = [_show_range(at[d]) if d in at else ":" for d in range(len(cuts))]
            lines.append(f"[{', '.join(where)}]")
        lines += _table(layout, at, shown)
    if len(tables) > MOST_TABLES:
        lines.append(f"... and {len(tables) - MOST_TABLES} more blocks")
    return "\n".join(lines)


def _table(layout: TensorLayout, at: dict[int, Range], dims: list[int]) -> list[str]:
    """Rows are ranges of the first dim, columns of the second."""
    if not dims:
        return []
    down, across = dims[0], dims[1:]
    rows = layout.cuts[down]
    columns = [{d: c} for d in across for c in layout.cuts[d]] or [{}]
    shown = columns[:MOST_COLUMNS]
    cells = [["", *(f"dim {d} {_show_range(c)}" for column in shown for d, c in column.items())]]
    for row in rows[:MOST_ROWS]:
        holders = [_holder(layout.filled, at | {down: row} | column) for column in shown]
        cells.append([f"dim {down} {_show_range(row)}", *holders])
    cells = cells if across else cells[1:]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    more = " ..." * (len(columns) > MOST_COLUMNS)
    lines = [
        " | ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() + more
        for line in cells
    ]
    if len(rows) > MOST_ROWS:
        lines.append(f"... and {len(rows) - MOST_ROWS} more rows")
    return ["  " + line for line in lines]


def _holder(blocks: Iterable[LayoutBlock], ranges: dict[int, Range]) -> str:
    return next((block.holder for block in blocks if block.covers(ranges)), "nobody")


# -- as a picture: blocks in proportion, a colour for each rank ---


def layout_svg(layout: TensorLayout) -> str:
    """The tensor's last two dims that are cut, once for each block of the others."""
    down, across = _axes(layout.cut_dims, len(layout.size))
    others = [d for d in layout.cut_dims if d not in (down, across)]
    parts, left = [], LEFT
    for ranges in list(itertools.product(*(layout.cuts[d] for d in others)))[:MOST_TABLES]:
        at = dict(zip(others, ranges, strict=True))
        where = ", ".join(f"dim {d} {_show_range(r)}" for d, r in at.items())
        parts.append(f'<text class="soft" x="{left}" y="{TOP - 14}">{where}</text>')
        blocks = [block for block in layout.filled if block.covers(at)]
        panel = _Panel(blocks, layout.size, down, across, left)
        parts += [*panel.rectangles(), *panel.ticks()]
        left += SIDE + GAP + LEFT * (down is not None)
    headline = layout.headline()
    width, height = max(round(24 + TITLE_CHAR * len(headline)), left), TOP + SIDE + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(headline)}</title>",
            f"<style>{PICTURE_STYLE}</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            f'<text class="title" x="12" y="20">{escape(headline)}</text>',
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


@dataclass(frozen=True)
class _Panel:
    """One drawing of two dims."""

    blocks: Sequence[LayoutBlock]
    size: Sequence[int]
    down: int | None
    across: int | None
    left: float

    def rectangles(self) -> list[str]:
        parts = []
        for block in self.blocks:
            y, height, rows = self._span(block, self.down)
            x, width, columns = self._span(block, self.across)
            label = " ".join(filter(None, (rows, columns)))
            parts.append(
                f'<rect x="{self.left + x:.1f}" y="{TOP + y:.1f}" width="{max(width, LEAST):.1f}" '
                f'height="{max(height, LEAST):.1f}" fill="{_colour(block)}">'
                f"<title>{escape(block.holder)}: {label or 'all'}</title></rect>"
            )
            if width > 44 and height > 16:
                middle = f'x="{self.left + x + width / 2:.1f}" y="{TOP + y + height / 2 + 4:.1f}"'
                text = f'<text class="block" text-anchor="middle" {middle}>{block.holder}</text>'
                parts.append(text)
        return parts

    def ticks(self) -> list[str]:
        """Where blocks begin and end along the dims: on the left, and below."""
        parts = []
        if self.down is not None:
            parts.append(_soft(f"dim {self.down}", self.left - 8, TOP - 12, "end"))
            for at, y in self._starts(self.down, TICK_GAP):
                parts.append(_soft(str(at), self.left - 8, TOP + y + 4, "end"))
        if self.across is not None:
            below = TOP + SIDE + 16
            for at, x in self._starts(self.across, 2 * TICK_GAP):
                parts.append(_soft(str(at), self.left + x, below, "middle"))
            parts.append(_soft(f"dim {self.across}", self.left + SIDE / 2, below + 16, "middle"))
        return parts

    def _starts(self, dim: int, gap: float) -> list[tuple[int, float]]:
        """(index, pixels) of blocks' starts along a dim, as many as have room; and of its end."""
        size, scale = self.size[dim], SIDE / self.size[dim]
        shown: list[tuple[int, float]] = []
        for at in sorted({block.offsets[dim] for block in self.blocks}):
            if (not shown or at * scale - shown[-1][1] >= gap) and (size - at) * scale >= gap:
                shown.append((at, at * scale))
        return [*shown, (size, float(SIDE))]

    def _span(self, block: LayoutBlock, dim: int | None) -> tuple[float, float, str]:
        """(where it begins, how long it is, as pixels; the range as text) along a dim."""
        if dim is None:
            return 0.0, float(SIDE), ""
        scale = SIDE / self.size[dim]
        text = f"dim {dim} {_show_range(_edges(block, dim))}"
        return block.offsets[dim] * scale, block.sizes[dim] * scale, text


def _soft(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text class="soft" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{text}</text>'


def _colour(block: LayoutBlock) -> str:
    """Ranks that are neighbours have colours far apart: steps of the golden angle."""
    return f"hsl({(block.rank or 0) * 137.5 % 360:.0f} 55% 72%)"


# -- on a page ---


def section(cards: Sequence[Mapping[str, str]]) -> str:
    """A section that opens and closes; nothing where there is no sharded tensor."""
    if not cards:
        return ""
    more = f", the first {MOST_PICTURES} are shown" if len(cards) > MOST_PICTURES else ""
    count = f"{len(cards)} layout{'s' * (len(cards) > 1)}{more}"
    figures = "\n".join(map(_figure, cards[:MOST_PICTURES]))
    return (
        f'<details class="card" id="layouts" open><style>{PAGE_STYLE}</style>'
        f'<summary><h2>Sharded tensors</h2> <span class="soft">{count}</span></summary>'
        f'<div class="pictures">{figures}</div></details>\n'
    )


def _figure(card: Mapping[str, str]) -> str:
    # as an image: its style is its own
    data = b64encode(card["svg"].encode()).decode()
    where = " ".join(escape(card[key]) for key in ("name", "source") if card.get(key))
    return (
        f"<figure><figcaption><code>{where}</code></figcaption>"
        f'<img alt="{escape(card["text"])}" src="data:image/svg+xml;base64,{data}"></figure>'
    )
