"""To DTensor and back. Both are blocks on ranks: what lies right already is not sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardedDim
from torch.distributed.tensor.placement_types import Placement

from fcoll.groups import GroupLike
from fcoll.sharded import _torch
from fcoll.sharded._torch import (
    ChunkShardingSpec,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from fcoll.sharded.agreement import agree
from fcoll.sharded.boxes import Box
from fcoll.sharded.errors import BadMesh
from fcoll.sharded.exchange import exchanged
from fcoll.sharded.layout import anchor_of, held, like, local_tensors
from fcoll.sharded.placements import on_ranks, rank_in
from fcoll.sharded.placements import process_group as as_process_group
from fcoll.sharded.plan import Held, Plan
from fcoll.sharded.resharding import reshard
from fcoll.sharded.specs import box_of, inferred_spec, layout_of
from fcoll.sharded.tensor import ShardedTensor


@_torch.uncompiled
def to_dtensor(
    st: ShardedTensor,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """The same tensor as a DTensor: by default on a mesh of the group's ranks, cut along the dim
    that it is cut along already (0 for other specs).

    Any mesh of ranks of its group and any placements but Partial: elements that a rank has not
    are sent, in one all_to_all_single. Where each rank has its block already, memory is shared.
    Every rank of the group calls it. Differentiable.

    >>> st = fcoll.sharded.arange(fcoll.sharded.chunk(0, n), n, 2, dtype=torch.float32)
    >>> x = fcoll.sharded.to_dtensor(st)
    >>> x.placements, torch.equal(x.full_tensor(), st.all_gather())
    ((Shard(dim=0),), True)
    """
    group = st.group
    agree("to_dtensor", st)
    if mesh is None:
        mesh = DeviceMesh.from_group(st._process_group, st.device.type)
    if placements is None:
        placements = _natural(st, mesh)
    blocks = _blocks(st.shape, mesh, placements)
    if missing := sorted({block.rank for block in blocks} - set(group.ranks)):
        why = f"ranks {missing} of the mesh are not in the tensor's group {list(group.ranks)}"
        raise BadMesh(why=why, hint="Make the tensor on a group with all ranks of the mesh.")
    local = _local(st, blocks)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=st.shape, stride=_strides(st.shape)
    )


@_torch.uncompiled
def from_dtensor(
    x: DTensor, sharding_spec: ShardingSpec | None = None, process_group: GroupLike = None
) -> ShardedTensor:
    """A DTensor as a sharded tensor, cut by the spec; by default as it lies, of blocks that
    several ranks hold (Replicate) the first rank's.

    Without a spec nothing is sent and memory is shared. The group is that of the mesh's ranks, or
    one that has them all. Every rank of the group calls it. Differentiable.

    >>> from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
    >>> mesh = dist.init_device_mesh("cpu", (n,))
    >>> x = distribute_tensor(torch.arange(4.0 * n).view(4, n), mesh, [Shard(1)])
    >>> st = fcoll.sharded.from_dtensor(x)
    >>> st.sharding_spec() == fcoll.sharded.chunk(1, n), st.local_tensor().shape
    (True, torch.Size([4, 1]))
    >>> fcoll.sharded.from_dtensor(x, fcoll.sharded.chunk(0, n)).shape == (4, n)
    True
    """
    spec, me = _spec_of(x), dist.get_rank()
    layout = layout_of(spec, x.shape)
    tracked = x.requires_grad and torch.is_grad_enabled()
    local = _to_local(x)
    shards = [Shard(local, shard) for shard in layout if rank_in(shard.placement) == me]
    properties = TensorProperties(dtype=x.dtype, requires_grad=tracked)
    metadata = ShardedTensorMetadata(layout, x.size(), properties)
    pg = _group_of(x.device_mesh, process_group)
    anchor = local.reshape(-1)[:0] if tracked else None
    st: Any = ShardedTensor._made(spec, metadata, shards, pg, anchor=anchor)
    return st if sharding_spec is None else reshard(st, sharding_spec)


def _spec_of(x: DTensor) -> ShardingSpec:
    """How it is cut: one block a rank, and each block on one rank."""
    mesh, placement = x.device_mesh, x.placements[0]
    blocks = _blocks(x.shape, mesh, x.placements)
    if mesh.ndim == 1 and type(placement) is ShardedDim:
        ranks = on_ranks([block.rank for block in blocks], mesh.device_type)
        return ChunkShardingSpec(placement.dim, ranks)
    first = {block.box: block.rank for block in reversed(blocks)}  # of equal ones the first stays
    full = [box for box in first if box.volume] or [blocks[0].box]
    shards = [
        ShardMetadata(list(box.offsets), list(box.sizes), *on_ranks([first[box]], mesh.device_type))
        for box in sorted(full, key=lambda box: box.offsets)
    ]
    return inferred_spec(shards, x.shape)


def _natural(st: ShardedTensor, mesh: DeviceMesh) -> list[Placement]:
    if mesh.ndim != 1:
        hint = "Pass one for each, as [Shard(0), Replicate()]."
        raise BadMesh(why=f"no placements for a mesh of {mesh.ndim} dims", hint=hint)
    spec = st.sharding_spec()
    dim = int(spec.dim) if isinstance(spec, ChunkShardingSpec) else 0
    return [ShardedDim(dim % st.ndim) if st.ndim else Replicate()]


def _blocks(size: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Held]:
    """Which block each rank of the mesh holds."""
    if any(isinstance(placement, Partial) for placement in placements):
        why = f"a DTensor with placements {tuple(placements)} holds sums that are not made yet"
        hint = "Use Shard and Replicate; x.redistribute(placements=[Shard(0)]) makes the sums."
        raise BadMesh(why=why, hint=hint)
    found = []
    for coordinate in torch.cartesian_prod(*(torch.arange(n) for n in mesh.shape)).view(
        -1, mesh.ndim
    ):
        place = coordinate.tolist()
        offsets, lengths = _torch.block_of(size, mesh, place, placements)
        found.append(Held(int(mesh.mesh[tuple(place)]), Box.of(offsets, lengths)))
    return found


def _local(st: ShardedTensor, wanted: list[Held]) -> Tensor:
    """This rank's block; of a rank that is not in the mesh an empty tensor."""
    blocks, me = held(st), dist.get_rank()
    tensors = local_tensors(st, blocks)
    have = [block for block in blocks if block.box.volume]
    want = [block for block in wanted if block.box.volume]
    if set(have) == set(want):  # the same answer on every rank
        found = [s.tensor for s in st._local_shards if Held(me, box_of(s.metadata)) in want]
        if found:
            return found[0]
    anchor = anchor_of(st)
    made, anchor = exchanged(Plan(blocks, tuple(wanted)), st.group, tensors, like(st), anchor)
    if made:
        return made[0]
    return like(st) if anchor is None else anchor


def _to_local(x: DTensor) -> Tensor:
    """The local tensor. Its gradient comes back on the one rank that keeps the block: a sum, of
    which the other ranks hold none."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.to_local().detach()
    return x.to_local(
        grad_placements=[Partial() if isinstance(p, Replicate) else p for p in x.placements]
    )


def _group_of(mesh: DeviceMesh, group: GroupLike) -> Any:
    ranks = mesh.mesh.flatten().tolist()
    if group is None and ranks != list(range(dist.get_world_size())):
        group = mesh if mesh.ndim == 1 else ranks
    return as_process_group(group)


def _strides(size: torch.Size) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()
