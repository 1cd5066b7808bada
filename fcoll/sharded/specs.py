"""How a tensor is cut and who holds its shards.

Specs are torch's chunk and enumerable ones, and grids in any number of dims; placements are
``rank:1/cpu``, checked against a group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.groups import GroupLike, resolve
from fcoll.sharded import _torch
from fcoll.sharded._torch import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    RemoteDevice,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from fcoll.sharded.errors import BadLayout, BadPlacement, NoSuchWorker, NotSharded
from fcoll.sharded.transfer_plan import Box, HeldBlock, first_gap, first_overlap

#: A rank and the device that it keeps a shard on.
Owner = tuple[int, torch.device]


@dataclass
class GridShardingSpec(ShardingSpec):
    """A tensor cut along several dims: ``grid[d]`` chunks along dim d, one along dims that the
    grid does not reach. The blocks, last dim first, go to the placements in order.

    >>> spec = GridShardingSpec((2, 2), on_ranks(4))
    >>> for shard in spec.build_metadata(torch.Size([4, 6]), TensorProperties()).shards_metadata:
    ...     print(shard.shard_offsets, shard.shard_sizes, shard.placement)
    [0, 0] [2, 3] rank:0/cpu
    [0, 3] [2, 3] rank:1/cpu
    [2, 0] [2, 3] rank:2/cpu
    [2, 3] [2, 3] rank:3/cpu

    Along each dim sizes are those of torch.chunk, filled up with empty ones.
    """

    grid: Sequence[int]
    placements: list[RemoteDevice | str]

    def __post_init__(self) -> None:
        if not all(isinstance(n, int) and n > 0 for n in self.grid):
            hint = "Give the number of chunks along each dim, as (2, 2)."
            raise BadLayout(why=f"a grid of {tuple(self.grid)} blocks", hint=hint)
        self.grid = tuple(self.grid)
        self.placements = [
            p if isinstance(p, RemoteDevice) else RemoteDevice(p) for p in self.placements
        ]
        if math.prod(self.grid) != len(self.placements):
            why = f"a grid of {self.grid} has {math.prod(self.grid)} blocks"
            hint = f"Give a placement for each; there are {len(self.placements)}."
            raise BadLayout(why=why, hint=hint)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        if len(self.grid) > len(tensor_sizes):
            why = f"a grid of {len(self.grid)} dims for a tensor of {len(tensor_sizes)}"
            raise BadLayout(why=why, hint="Cut no more dims than there are.")
        cuts = [
            chunks_of(size, n)
            for size, n in itertools.zip_longest(tensor_sizes, self.grid, fillvalue=1)
        ]
        blocks = zip(itertools.product(*cuts), self.placements, strict=True)
        shards = [
            ShardMetadata([start for start, _ in block], [size for _, size in block], placement)
            for block, placement in blocks
        ]
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)

    def shard(self, tensor: Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        from fcoll.sharded.creators import scatter

        return scatter(tensor, self, src_rank, process_group)


def chunk(dim: int, ranks: int | Iterable[int], device: str = "cpu") -> ChunkShardingSpec:
    """Chunks along a dim, one for each rank (0 to n - 1, or those listed, in this order).

    >>> chunk(0, 2)
    ChunkShardingSpec(dim=0, placements=[rank:0/cpu, rank:1/cpu])
    """
    return ChunkShardingSpec(dim, on_ranks(ranks, device))


def grid(shape: Sequence[int], ranks: int | Iterable[int], device: str = "cpu") -> GridShardingSpec:
    """Blocks of a grid, one for each rank.

    >>> grid((2, 1, 2), [3, 2, 1, 0]).placements[0]
    rank:3/cpu
    """
    return GridShardingSpec(shape, on_ranks(ranks, device))


def chunks_of(size: int, n: int) -> list[tuple[int, int]]:
    """Where n chunks of a dim begin, and how long they are.

    >>> chunks_of(5, 4)
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // n)
    starts = [min(i * step, size) for i in range(n)]
    return [(a, min(step, size - a)) for a in starts]


def box_of(shard: ShardMetadata) -> Box:
    return Box.of(shard.shard_offsets, shard.shard_sizes)


def layout_of(
    spec: ShardingSpec, size: Sequence[int], properties: TensorProperties | None = None
) -> list[ShardMetadata]:
    """The shards of a tensor of this size under the spec, checked to tile it."""
    if not isinstance(spec, ShardingSpec):
        want = "a ShardingSpec, as fcoll.sharded.chunk(0, 4) makes one"
        what = f"Expecting ShardingSpec but got: {type(spec)}: the spec"
        raise NotSharded(what=what, kind=repr(spec), want=want)
    if isinstance(spec, EnumerableShardingSpec):  # torch's own check refuses some empty shards
        shards = spec.shards
    else:
        shape = torch.Size(size)
        shards = spec.build_metadata(shape, properties or TensorProperties()).shards_metadata
    check_layout(shards, size)
    return list(shards)


def check_layout(shards: Sequence[ShardMetadata], size: Sequence[int]) -> None:
    """Raise unless the shards cover a tensor of this size, each element once. Shards with no
    elements may be anywhere."""
    if not shards:
        raise BadLayout(why="shards_metadata must not be empty!", hint="Name at least one shard.")
    for shard in shards:
        if len(shard.shard_sizes) != len(size):
            why = f"Rank of tensor is {len(size)}, but shards rank is {len(shard.shard_sizes)}"
            raise _layout_error(why, "Give as many offsets and sizes as dims.", shard)
    full = [(shard, box_of(shard)) for shard in shards if math.prod(shard.shard_sizes)]
    for shard, box in full:
        for d, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if offset + length > size[d]:
                why = f"Shard offset {offset} and length {length} exceeds tensor dim: {size[d]}"
                raise _layout_error(f"{why} (dim {d}) for shard {shard}", "Cut it shorter.", shard)
    boxes = [box for _, box in full]
    if pair := first_overlap(boxes):
        a, b = (full[i][0] for i in pair)
        both = boxes[pair[0]].meet(boxes[pair[1]])
        raise _layout_error(f"Shards {a} and {b} overlap", f"Both hold {_shown(both)}.", a, b)
    covered, volume = sum(box.volume for box in boxes), math.prod(size)
    if covered != volume:
        gap = first_gap(boxes, Box.whole(size))
        why = (
            f"Total volume of shards: {covered} does not match tensor volume: {volume}, in other "
            "words all the individual shards do not cover the entire tensor"
        )
        raise _layout_error(why, f"No shard holds {_shown(gap)}.")


def _layout_error(why: str, hint: str, *shards: ShardMetadata) -> BadLayout:
    return BadLayout(why=why, hint=hint, shards=shards)


def _shown(box: Box | None) -> str:
    """A block as one would index it: [0:2, 3:5]."""
    assert box is not None
    ranges = zip(box.offsets, box.ends, strict=True)
    return f"[{', '.join(f'{a}:{b}' for a, b in ranges)}]"


def describe(spec: ShardingSpec, count: int) -> str:
    """How it cuts a tensor into ``count`` shards, in a few words."""
    if isinstance(spec, ChunkShardingSpec):
        return f"chunks along dim {spec.dim}"
    if isinstance(spec, GridShardingSpec):
        return f"{'x'.join(map(str, spec.grid))} grid"
    return f"{count} shards"


def inferred_spec(shards: Sequence[ShardMetadata], size: Sequence[int]) -> ShardingSpec:
    """A chunk spec if it cuts the tensor into these shards, which have been checked, else one that
    lists them.

    >>> shards = chunk(1, [1, 0]).build_metadata(torch.Size([2, 4]), TensorProperties())
    >>> inferred_spec(shards.shards_metadata, (2, 4))
    ChunkShardingSpec(dim=1, placements=[rank:1/cpu, rank:0/cpu])
    """
    cut = {d for shard in shards for d, offset in enumerate(shard.shard_offsets) if offset}
    if len(cut) == 1 and all(shard.placement is not None for shard in shards):
        dim = cut.pop()
        ordered = sorted(shards, key=lambda shard: shard.shard_offsets[dim])
        spec = ChunkShardingSpec(dim, [shard.placement for shard in ordered])
        chunks = spec.build_metadata(torch.Size(size), TensorProperties()).shards_metadata
        if chunks == ordered:
            return spec
    listed = object.__new__(EnumerableShardingSpec)  # torch's own check refuses some empty shards
    listed.shards = list(shards)
    return listed


# -- placements ---


def as_process_group(group: GroupLike) -> Any:
    """The ProcessGroup of anything that names one. What new_group gives to ranks that are not in
    the group stays as it is: they may hold a sharded tensor's metadata."""
    if isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return group
    if group is None and dist.is_initialized():
        return _torch.default_group()  # also one without a name, which no collective can use
    return resolve(group).pg


def on_ranks(ranks: int | Iterable[int], device: str = "cpu") -> list[str | RemoteDevice]:
    """Placements on these ranks, or on ranks 0 to n - 1.

    >>> on_ranks([2, 0])
    ['rank:2/cpu', 'rank:0/cpu']
    """
    ranks = range(ranks) if isinstance(ranks, int) else ranks
    return [f"rank:{r}/{device}" for r in ranks]


def owner(pg: Any, placement: Any) -> Owner:
    """The global rank and the device that a placement names."""
    return _owner(placement, _members(pg))


def owners(pg: Any, shards: Sequence[ShardMetadata]) -> list[Owner]:
    """``owner`` of all shards."""
    members = _members(pg)
    return [_owner(shard.placement, members) for shard in shards]


def shards_here(pg: Any, shards: Sequence[ShardMetadata]) -> list[tuple[ShardMetadata, Owner]]:
    """The shards that are placed on this rank, and where."""
    placed = zip(shards, owners(pg, shards), strict=True)
    return [(shard, owner) for shard, owner in placed if owner[0] == dist.get_rank()]


def blocks_on(pg: Any, shards: Sequence[ShardMetadata]) -> tuple[HeldBlock, ...]:
    """The shards as blocks on ranks of the group, in their order."""
    placed = zip(shards, owners(pg, shards), strict=True)
    return tuple(HeldBlock(rank, box_of(shard)) for shard, (rank, _) in placed)


def rank_in(placement: Any) -> int | None:
    """The rank that a placement names itself, if it does."""
    return placement.rank() if isinstance(placement, RemoteDevice) else None


def _members(pg: Any) -> tuple[int, ...] | None:
    """The group's global ranks; None where this rank is none of them, so cannot know."""
    if pg is None or not _torch.is_member(pg):
        return None
    return tuple(dist.get_process_group_ranks(pg))


def _owner(placement: Any, members: tuple[int, ...] | None) -> Owner:
    if placement is None:
        raise BadPlacement(why="its remote device is None", hint='Give one, as "rank:0/cpu"')
    rank, worker = placement.rank(), placement.worker_name()
    if worker is not None:
        rank = _rank_of_worker(worker)
    if rank is None:
        raise BadPlacement(why=f"{placement} names no rank", hint=f"Write rank:0/{placement}.")
    if worker is None and members is not None and rank not in members:
        why = f"Global rank {rank} does not exist in input process group: {list(members)}"
        raise BadPlacement(why=why, hint="Placements name global ranks of the group.")
    return rank, placement.device()


def _rank_of_worker(name: str) -> int:
    hint = 'Name the rank instead, as in "rank:0/cpu".'
    try:
        rank = _torch.rank_of_worker(name)
    except LookupError:
        why = f"RPC framework needs to be initialized for using worker names: {name}"
        raise NoSuchWorker(why=why, hint=hint) from None
    if rank is None:
        raise BadPlacement(why=f"Invalid worker name: {name}", hint=hint)
    return rank
