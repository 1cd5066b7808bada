"""Reshard and gather: a sharded tensor cut another way, whole on one rank or on all, and the shards
of other ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import functions
from fcoll.eager.small_messages import gather_objects
from fcoll.sharded import _torch
from fcoll.sharded._torch import Shard, ShardedTensorMetadata, ShardingSpec, ShardMetadata
from fcoll.sharded.block_exchange import assemble, exchange
from fcoll.sharded.errors import BadGather, BadLayout, CannotReshard, NoRemoteShards, RpcRanksDiffer
from fcoll.sharded.layout_agreement import (
    View,
    agree_on,
    check_agreement,
    is_traced,
    view_of,
    view_of_layout,
)
from fcoll.sharded.shards import (
    anchor_of,
    anchors_of,
    blocks_of,
    empty_of,
    local_tensors,
    same_layout,
)
from fcoll.sharded.specs import blocks_on, layout_of, owners, shards_here
from fcoll.sharded.transfer_plan import Box, HeldBlock, TransferPlan

# Do tensors with remote shards need RPC, as torch's do? So while torch's names are served.
rpc_needed = False

# -- cut another way ---


@_torch.uncompiled
def reshard(st: Any, spec: ShardingSpec) -> Any:
    """The same tensor cut by another spec, as a new one.

    Elements that stay on their rank are not sent; the others once, in one all_to_all_single.
    Differentiable: the gradient goes the way back.

    >>> st = fcoll.sharded.arange(fcoll.sharded.chunk(0, n), n, 2 * n)
    >>> columns = fcoll.sharded.reshard(st, fcoll.sharded.chunk(1, n))
    >>> columns.local_tensor().shape == (n, 2), st.local_tensor().shape == (1, 2 * n)
    (True, True)
    >>> torch.equal(columns.all_gather(), st.all_gather())
    True
    """
    metadata, shards, anchor = _resharded(st, _agreed_target(st, spec))
    agreed = not is_traced()
    return st._with(shards, spec=spec, metadata=metadata, anchor=anchor, agreed=agreed)


@_torch.uncompiled
def reshard_(st: Any, resharding_spec: ShardingSpec) -> Any:
    """Cut this tensor another way, in place; each element that changes its rank is sent once.

    ``fcoll.sharded.reshard(st, spec)`` is the same as a new tensor.
    """
    spec = resharding_spec
    layout = _agreed_target(st, spec)
    if same_layout(st._sharding_spec, spec):
        return st
    metadata, shards, anchor = _resharded(st, layout)
    if st.requires_grad and not torch.is_grad_enabled():
        for shard in shards:  # a parameter stays one
            shard.tensor.requires_grad_()
    st._local_shards, st._anchor, st._sharding_spec = shards, anchor, spec
    st._metadata = replace(st._metadata, shards_metadata=metadata.shards_metadata)
    st._agreed = not is_traced()
    return st


def _agreed_target(st: Any, spec: ShardingSpec) -> list[ShardMetadata]:
    """The new shards, once all ranks have found the same."""

    def find() -> tuple[list[ShardMetadata], View]:
        layout = _target(st, spec)
        local_tensors(st)  # this rank has what the others count on
        return layout, view_of(st) | view_of_layout("new shard", layout)

    return agree_on("reshard", st.group, st.device, find)


def _target(st: Any, spec: ShardingSpec) -> list[ShardMetadata]:
    old = st._metadata
    try:
        layout = layout_of(spec, old.size, old.tensor_properties)
    except BadLayout as wrong:
        hint = "(torch takes no such spec at all: Only ChunkShardingSpec supported for reshard.)"
        raise CannotReshard(why=f"reshard: {wrong}", hint=hint) from wrong
    # in rank order, as torch's reshard leaves them
    ranks = [rank for rank, _ in owners(st._process_group, layout)]
    return [layout[i] for i in sorted(range(len(layout)), key=ranks.__getitem__)]


def _resharded(
    st: Any, layout: list[ShardMetadata]
) -> tuple[ShardedTensorMetadata, list[Shard], Tensor | None]:
    old, group = st._metadata, st._process_group
    tensors, anchor = move_blocks(st, blocks_on(group, layout))
    mine = zip(tensors, shards_here(group, layout), strict=True)
    shards = [Shard(tensor, shard) for tensor, (shard, _) in mine]
    properties = replace(old.tensor_properties, requires_grad=anchor is not None)
    return ShardedTensorMetadata(layout, old.size, properties), shards, anchor


def move_blocks(
    st: Any,
    targets: Sequence[HeldBlock],
    dtype: torch.dtype | None = None,
    into: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """The tensors of this rank's targets, sent as ``dtype``, and their anchor: see ``exchange``."""
    blocks, like = blocks_of(st), empty_of(st).to(dtype or st.dtype)
    tensors = [tensor.to(like.dtype) for tensor in local_tensors(st, blocks)]
    plan = TransferPlan(blocks, tuple(targets))
    return exchange(plan, st.group, tensors, like, anchor_of(st), into)


# -- whole ---


@_torch.uncompiled
def gather(
    st: Any,
    dst: int = 0,
    out: Tensor | None = None,
    enforce_dtype: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the whole tensor into ``out`` on rank dst of the group; elsewhere out is None.

    ``dtype``: the elements are sent as this. ``enforce_dtype`` is torch's old name for sending
    them as they are, which is what happens. ``out`` gets values, no gradient.
    """
    if enforce_dtype:
        message = "`enforce_dtype` is deprecated. Please use `dtype` instead."
        warnings.warn(message, FutureWarning, stacklevel=3)
    g, size = st.group, st._metadata.size
    if not isinstance(dst, int) or not 0 <= dst < g.n:
        hint = f"Ranks are counted within the group: 0 to {g.n - 1}."
        raise BadGather(rank=g.rank, why=f"dst={dst!r} is none of its {g.n} ranks", hint=hint)
    _check_out(g.rank, dst, size, out)
    check_agreement("gather", st)
    with torch.no_grad():
        whole = HeldBlock(g.ranks[dst], Box.whole(size))
        move_blocks(st, [whole], dtype, into=[] if out is None else [out])


def _check_out(rank: int, dst: int, size: torch.Size, out: Tensor | None) -> None:
    if rank != dst:
        if out is not None:
            why = "Argument ``dst_tensor`` must NOT be specified on non-destination ranks."
            raise BadGather(rank=rank, why=why, hint=f"Pass out= on rank {dst} only.")
        return
    if out is None:
        why = f"Argument ``dst_tensor`` must be specified on destination rank {dst}"
        raise BadGather(rank=rank, why=why, hint=f"Pass out=torch.empty({tuple(size)}).")
    if out.size() != size:
        why = f"Argument ``dst_tensor`` have size {tuple(out.size())},but should be {tuple(size)}"
        raise BadGather(rank=rank, why=why, hint="Allocate it so.")


@_torch.uncompiled
def all_gather(st: Any) -> Tensor:
    """The whole tensor, on every rank. Differentiable: its gradient is summed over ranks."""
    check_agreement("all_gather", st)
    g, size, blocks = st.group, st._metadata.size, blocks_of(st)
    ordered = [block.box for rank in g.ranks for block in blocks if block.rank == rank]
    sizes = [sum(b.box.volume for b in blocks if b.rank == rank) for rank in g.ranks]
    flat = [tensor.reshape(-1) for tensor in local_tensors(st, blocks)] + anchors_of(st)
    mine = torch.cat(flat) if len(flat) > 1 else flat[0] if flat else empty_of(st)
    gathered = functions.wait_tensor(functions.all_gather_into_tensor(mine, g.name, sizes=sizes))
    return assemble(gathered, ordered, size)


# -- shards of other ranks ---


@dataclass(frozen=True)
class RemoteOwner:
    """The rank that holds a shard, as RPC's worker info names it."""

    id: int
    name: str


@dataclass(frozen=True)
class RemoteShard:
    """A shard of another rank. It was fetched when ``remote_shards`` was called."""

    rank: int
    shard: Shard

    def owner(self) -> RemoteOwner:
        """The rank that holds it."""
        return RemoteOwner(self.rank, f"rank{self.rank}")

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
def remote_shards(st: Any, ranks: Iterable[int] | None = None) -> dict[int, list[Any]]:
    """The shards of other ranks: those of each rank that holds any, or of the ranks given.
    The tensor was made with ``init_rrefs=True``.

    Every rank of the group calls it, also one that wants none (``ranks=[]``): what is asked
    for is fetched then, in one all_to_all_single, and ``to_here()`` of each is its Shard.
    Where torch's RPC runs they are its RRefs, on all workers, fetched by ``to_here()``.

    >>> st = fcoll.sharded.arange(fcoll.sharded.chunk(0, n), n, 2, init_rrefs=True)
    >>> last = st.remote_shards([n - 1])
    >>> [shard.to_here().tensor.tolist() for shard in last.get(n - 1, [])] == (
    ...     [] if rank == n - 1 else [[[2 * n - 2, 2 * n - 1]]])
    True
    """
    if not st._init_rrefs:
        why = "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available"
        raise NoRemoteShards(why=why, hint="Create it with init_rrefs=True.")
    if _torch.rpc_rank() is not None:
        return _references(st, ranks)
    group, blocks, me = st.group, blocks_of(st), dist.get_rank()
    check_agreement("remote_shards", st)
    own_request = set(group.ranks if ranks is None else ranks) - {me}
    requests = dict(zip(group.ranks, gather_objects(own_request, group), strict=True))
    for rank, theirs in requests.items():  # all ranks raise, so that none waits for another
        if strange := sorted(theirs - set(group.ranks)):
            why = f"rank {rank} asks for ranks {strange}, which are not in {list(group.ranks)}"
            raise NoRemoteShards(why=why, hint="Ask for ranks of the tensor's group.")
    copies = [
        (rank, i)
        for rank in group.ranks
        for i, block in enumerate(blocks)
        if block.rank in requests[rank]
    ]
    with torch.no_grad():
        tensors, _ = move_blocks(st, [HeldBlock(rank, blocks[i].box) for rank, i in copies])
    fetched: dict[int, list[Any]] = {}
    mine = [i for rank, i in copies if rank == me]
    for i, tensor in zip(mine, tensors, strict=True):
        shard = Shard(tensor, st._metadata.shards_metadata[i])
        fetched.setdefault(blocks[i].rank, []).append(RemoteShard(blocks[i].rank, shard))
    return dict(sorted(fetched.items()))


def _references(st: Any, ranks: Iterable[int] | None) -> dict[int, list[Any]]:
    """RPC's references to the shards of the other ranks, also of a group that this rank is not
    in. Every rank calls it; a shard is fetched when its reference is asked."""
    by_rank = _torch.gathered_by_rpc([_torch.rpc_reference(shard) for shard in st._local_shards])
    return {
        rank: shards
        for rank, shards in by_rank.items()
        if shards and rank != dist.get_rank() and (ranks is None or rank in ranks)
    }
