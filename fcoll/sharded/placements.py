"""Who holds a shard: placements as ``rank:1/cpu``, checked against a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fcoll.groups import GroupLike, resolve
from fcoll.sharded import _torch
from fcoll.sharded._torch import RemoteDevice, ShardMetadata
from fcoll.sharded.errors import BadPlacement, NoSuchWorker

#: A rank and the device that it keeps a shard on.
Owner = tuple[int, torch.device]


def process_group(group: GroupLike) -> Any:
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
    """The same for all shards."""
    members = _members(pg)
    return [_owner(shard.placement, members) for shard in shards]


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
