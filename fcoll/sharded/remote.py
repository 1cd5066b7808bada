"""Shards of other ranks: fetched over the group; where torch's RPC runs, as its references."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fcoll.sharded import _torch
from fcoll.sharded._torch import Shard
from fcoll.sharded.agreement import agree
from fcoll.sharded.errors import NoRemoteShards, RpcRanksDiffer
from fcoll.sharded.exchange import exchanged
from fcoll.sharded.layout import held, like, local_tensors
from fcoll.sharded.objects import all_gather_objects
from fcoll.sharded.plan import Held, Plan

# Do tensors with remote shards need RPC, as torch's do? So while torch's names are served.
rpc_needed = False


@dataclass(frozen=True)
class Holder:
    """The rank that holds a shard, as RPC's worker info names it."""

    id: int
    name: str


@dataclass(frozen=True)
class RemoteShard:
    """A shard of another rank. It was fetched when ``remote_shards`` was called."""

    rank: int
    shard: Shard

    def owner(self) -> Holder:
        """Who holds it."""
        return Holder(self.rank, f"rank{self.rank}")

    def to_here(self) -> Shard:
        """Its metadata and a copy of its data."""
        return self.shard


def check_rpc(init_rrefs: bool) -> None:
    """Can a tensor made now give its remote shards?"""
    if not init_rrefs:
        return
    if (worker := _torch.rpc_rank()) is None:
        if rpc_needed:
            why = (
                "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc if "
                "init_rrefs is set to True"
            )
            raise NoRemoteShards(why=why, hint="fcoll.sharded's own names need no RPC.")
    elif worker != dist.get_rank():
        raise RpcRanksDiffer(rank=dist.get_rank(), worker=worker)


@_torch.uncompiled
def remote_shards(st: Any, ranks: Iterable[int] | None) -> dict[int, list[Any]]:
    """See ShardedTensor.remote_shards."""
    if not st._init_rrefs:
        why = "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available"
        raise NoRemoteShards(why=why, hint="Create it with init_rrefs=True.")
    if _torch.rpc_rank() is not None:
        return _references(st, ranks)
    group, blocks, me = st.group, held(st), dist.get_rank()
    agree("remote_shards", st)
    wanted = set(group.ranks if ranks is None else ranks) - {me}
    asked = dict(zip(group.ranks, all_gather_objects(wanted, group), strict=True))
    for rank, theirs in asked.items():  # all ranks raise, so that none waits for another
        if strange := sorted(theirs - set(group.ranks)):
            why = f"rank {rank} asks for ranks {strange}, which are not in {list(group.ranks)}"
            raise NoRemoteShards(why=why, hint="Ask for ranks of the tensor's group.")
    copies = [
        (rank, i)
        for rank in group.ranks
        for i, block in enumerate(blocks)
        if block.rank in asked[rank]
    ]
    plan = Plan(blocks, tuple(Held(rank, blocks[i].box) for rank, i in copies))
    tensors = [tensor.detach() for tensor in local_tensors(st, blocks)]
    made, _ = exchanged(plan, group, tensors, like(st))
    found: dict[int, list[Any]] = {}
    mine = [i for rank, i in copies if rank == me]
    for i, tensor in zip(mine, made, strict=True):
        shard = Shard(tensor, st._metadata.shards_metadata[i])
        found.setdefault(blocks[i].rank, []).append(RemoteShard(blocks[i].rank, shard))
    return dict(sorted(found.items()))


def _references(st: Any, ranks: Iterable[int] | None) -> dict[int, list[Any]]:
    """RPC's references to the shards of the other ranks, also of a group that this rank is not
    in. Every rank calls it; a shard is fetched when its reference is asked."""
    told = _torch.told_by_rpc([_torch.rpc_reference(shard) for shard in st._local_shards])
    return {
        rank: shards
        for rank, shards in told.items()
        if shards and rank != dist.get_rank() and (ranks is None or rank in ranks)
    }
