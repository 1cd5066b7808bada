"""Random sizes and specs, and what they mean: computed element by element, without fcoll."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fcoll.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardingSpec,
    ShardMetadata,
)

RANKS = 4


def plain(size: tuple[int, ...]) -> Tensor:
    """A tensor of which every element is another one."""
    return torch.arange(torch.Size(size).numel(), dtype=torch.float32).view(size)


@st.composite
def sizes(draw: Any, most: int = 7) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, most), min_size=1, max_size=3)))


@st.composite
def specs(draw: Any, size: tuple[int, ...]) -> ShardingSpec:
    """Chunks or a grid on some of the ranks, some of them with several blocks or none, or blocks
    of any shape."""
    kind = draw(st.sampled_from(["chunk", "grid", "blocks"]))
    if kind == "chunk":
        dim = draw(st.integers(-len(size), len(size) - 1))
        return ChunkShardingSpec(dim, placements(draw(st.lists(ranks(), min_size=1, max_size=6))))
    if kind == "grid":
        dims = draw(st.integers(1, len(size)))
        grid = tuple(draw(st.integers(1, 3)) for _ in range(dims))
        blocks = torch.Size(grid).numel()
        held = draw(st.lists(ranks(), min_size=blocks, max_size=blocks))
        return GridShardingSpec(grid, placements(held))
    cut = random.Random(draw(st.integers(0, 1 << 30)))
    return EnumerableShardingSpec(
        [
            ShardMetadata(list(offsets), list(lengths), f"rank:{cut.randrange(RANKS)}/cpu")
            for offsets, lengths in tiling(cut, (0,) * len(size), size, 5)
        ]
    )


@st.composite
def two_layouts(draw: Any) -> tuple[tuple[int, ...], ShardingSpec, ShardingSpec]:
    size = draw(sizes())
    return size, draw(specs(size)), draw(specs(size))


def ranks() -> st.SearchStrategy[int]:
    return st.integers(0, RANKS - 1)


def placements(held: list[int]) -> list[Any]:
    return [f"rank:{r}/cpu" for r in held]


def tiling(cut: random.Random, offsets: tuple, lengths: tuple, times: int) -> list[tuple]:
    """A block cut in two at random, and the halves again."""
    dims = [d for d, n in enumerate(lengths) if n > 1]
    if not times or not dims or cut.random() < 0.2:
        return [(offsets, lengths)]
    d = cut.choice(dims)
    k = cut.randrange(1, lengths[d])
    first = (*lengths[:d], k, *lengths[d + 1 :])
    rest = (*lengths[:d], lengths[d] - k, *lengths[d + 1 :])
    behind = (*offsets[:d], offsets[d] + k, *offsets[d + 1 :])
    return [*tiling(cut, offsets, first, times - 1), *tiling(cut, behind, rest, times - 1)]


def blocks(spec: ShardingSpec, size: tuple[int, ...]) -> list[tuple[int, tuple, tuple]]:
    """(rank, offsets, lengths) of each block with elements: of chunks by torch.chunk."""
    if isinstance(spec, EnumerableShardingSpec):
        found = [
            (s.placement.rank(), tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in spec.shards
        ]
    else:
        counts = [1] * len(size)
        if isinstance(spec, ChunkShardingSpec):
            counts[spec.dim] = len(spec.placements)
        else:
            counts[: len(spec.grid)] = spec.grid
        cuts = [pieces(n, count) for n, count in zip(size, counts, strict=True)]
        held = [placement.rank() for placement in spec.placements]
        found = [
            (rank, tuple(a for a, _ in block), tuple(n for _, n in block))
            for rank, block in zip(held, itertools.product(*cuts), strict=True)
        ]
    return [(r, o, n) for r, o, n in found if torch.Size(n).numel()]


def pieces(size: int, count: int) -> list[tuple[int, int]]:
    """Where the chunks of torch.chunk begin and how long they are, and empty ones behind."""
    found, start = [], 0
    for part in torch.arange(size).chunk(count) if size else []:
        found.append((start, len(part)))
        start += len(part)
    return found + [(size, 0)] * (count - len(found))


def holders(spec: ShardingSpec, size: tuple[int, ...]) -> Tensor:
    """The rank that holds each element."""
    held = torch.full(size, -1)
    for rank, offsets, lengths in blocks(spec, size):
        held[tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))] = rank
    return held


def check_local(tensor: Any, spec: ShardingSpec, size: tuple[int, ...], rank: int) -> None:
    """This rank holds the blocks that the spec gives it, with their values."""
    mine = sorted((o, n) for r, o, n in blocks(spec, size) if r == rank)
    found = {}
    for shard in tensor.local_shards():
        if shard.tensor.numel():
            found[tuple(shard.metadata.shard_offsets)] = shard
            assert tuple(shard.metadata.shard_sizes) == tuple(shard.tensor.shape)
            assert shard.tensor.is_contiguous()
    assert sorted((o, tuple(s.tensor.shape)) for o, s in found.items()) == mine
    for offsets, shard in found.items():
        place = tuple(slice(a, a + n) for a, n in zip(offsets, shard.tensor.shape, strict=True))
        assert torch.equal(shard.tensor, plain(size)[place])
