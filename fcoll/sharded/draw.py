"""A layout as text: which rank holds which block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fcoll.sharded._torch import (
    ChunkShardingSpec,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
)
from fcoll.sharded.specs import GridShardingSpec, rank_in
from fcoll.units import show_bytes

MOST_ROWS, MOST_COLUMNS, MOST_TABLES = 32, 12, 8  # more than that nobody reads

Range = tuple[int, int]


def summary(metadata: ShardedTensorMetadata, spec: ShardingSpec) -> str:
    """One line: ``ShardedTensor(size=(8, 4), dtype=float32, chunks along dim 0, ranks 0-3)``."""
    if isinstance(spec, ChunkShardingSpec):
        how = f"chunks along dim {spec.dim}"
    elif isinstance(spec, GridShardingSpec):
        how = f"{'x'.join(map(str, spec.grid))} grid"
    else:
        how = f"{len(metadata.shards_metadata)} shards"
    dtype = str(metadata.tensor_properties.dtype).removeprefix("torch.")
    grad = ", requires_grad=True" if metadata.tensor_properties.requires_grad else ""
    where = _ranks(metadata.shards_metadata)
    return f"ShardedTensor(size={tuple(metadata.size)}, dtype={dtype}, {how}, {where}{grad})"


def headline(metadata: ShardedTensorMetadata) -> str:
    """Size, dtype, bytes, and on which ranks."""
    shards, size = metadata.shards_metadata, tuple(metadata.size)
    dtype = metadata.tensor_properties.dtype
    count = f"{len(shards)} shard{'s' * (len(shards) != 1)}"
    return (
        f"ShardedTensor {size} {str(dtype).removeprefix('torch.')}: "
        f"{show_bytes(math.prod(size) * dtype.itemsize)} in {count} on {_ranks(shards)}"
    )


def drawing(metadata: ShardedTensorMetadata) -> str:
    """The blocks as tables of the two last dims that are cut, one for each block of the others."""
    full = [shard for shard in metadata.shards_metadata if math.prod(shard.shard_sizes)]
    cuts = [cuts_along(full, d) for d in range(len(metadata.size))] if full else []
    cut_dims = [d for d, ranges in enumerate(cuts) if len(ranges) > 1]
    return "\n".join([headline(metadata), *_tables(full, cuts, cut_dims)])


def _ranks(shards: Sequence[ShardMetadata]) -> str:
    """``ranks 0-3``, ``ranks 0, 2``, ``rank 1``; placements without a rank as they are."""
    held = {rank_in(shard.placement) for shard in shards}
    if None in held:
        return ", ".join(sorted({str(shard.placement) for shard in shards}))
    ranks = sorted(rank for rank in held if rank is not None)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def cuts_along(shards: Sequence[ShardMetadata], dim: int) -> list[Range]:
    """The ranges between all places where some shard begins or ends."""
    starts = {s.shard_offsets[dim] for s in shards}
    ends = {s.shard_offsets[dim] + s.shard_sizes[dim] for s in shards}
    return list(itertools.pairwise(sorted(starts | ends)))


def _tables(
    shards: Sequence[ShardMetadata], cuts: list[list[Range]], cut_dims: list[int]
) -> list[str]:
    others, shown = cut_dims[:-2], cut_dims[-2:]
    lines = []
    blocks = list(itertools.product(*(cuts[d] for d in others)))
    for block in blocks[:MOST_TABLES]:
        at = dict(zip(others, block, strict=True))
        if at:
            where = [range_text(at[d]) if d in at else ":" for d in range(len(cuts))]
            lines.append(f"[{', '.join(where)}]")
        lines += _table(shards, cuts, at, shown)
    if len(blocks) > MOST_TABLES:
        lines.append(f"... and {len(blocks) - MOST_TABLES} more blocks")
    return lines


def _table(
    shards: Sequence[ShardMetadata], cuts: list[list[Range]], at: dict[int, Range], dims: list[int]
) -> list[str]:
    """Rows are ranges of the first dim, columns of the second."""
    if not dims:
        return []
    down, across = dims[0], dims[1:]
    rows = cuts[down]
    columns = [{d: c} for d in across for c in cuts[d]] or [{}]
    shown = columns[:MOST_COLUMNS]
    cells = [["", *(f"dim {d} {range_text(c)}" for column in shown for d, c in column.items())]]
    for row in rows[:MOST_ROWS]:
        holders = [_holder(shards, at | {down: row} | column) for column in shown]
        cells.append([f"dim {down} {range_text(row)}", *holders])
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


def range_text(cut: Range) -> str:
    return f"{cut[0]}:{cut[1]}"


def _holder(shards: Sequence[ShardMetadata], place: dict[int, Range]) -> str:
    """Who holds the block that begins there."""
    for shard in shards:
        offsets, sizes = shard.shard_offsets, shard.shard_sizes
        if all(offsets[d] <= a < offsets[d] + sizes[d] for d, (a, _) in place.items()):
            return who(shard)
    return "nobody"


def who(shard: ShardMetadata) -> str:
    """Its rank, or its placement where that names none."""
    rank = rank_in(shard.placement)
    return str(shard.placement) if rank is None else f"rank {rank}"
