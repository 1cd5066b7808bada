"""torch's other tensors of many ranks: DTensor, to and from; its own ShardedTensor as ours, and its
names served by fcoll, so that programs written for it run on ours."""

from __future__ import annotations

import itertools
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
from fcoll.ranks.patches import Patches
from fcoll.sharded import _torch, creators, module_sharding, redistribution, specs
from fcoll.sharded._torch import (
    ChunkShardingSpec,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from fcoll.sharded.errors import MeshesDiffer
from fcoll.sharded.io import pickling
from fcoll.sharded.layout_agreement import check_agreement
from fcoll.sharded.ops import rules
from fcoll.sharded.redistribution import move_blocks, reshard
from fcoll.sharded.sharded_tensor import ShardedTensor, ShardedTensorBase
from fcoll.sharded.shards import blocks_of, empty_of
from fcoll.sharded.specs import (
    GridShardingSpec,
    as_process_group,
    box_of,
    inferred_spec,
    layout_of,
    on_ranks,
    rank_in,
)
from fcoll.sharded.transfer_plan import Box, HeldBlock

# -- DTensor ---


@_torch.uncompiled
def to_dtensor(
    st: ShardedTensor, mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
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
    check_agreement("to_dtensor", st)
    if mesh is None:
        mesh = DeviceMesh.from_group(st._process_group, st.device.type)
    if placements is None:
        placements = _natural(st, mesh)
    blocks = _blocks(st.shape, mesh, placements)
    if missing := sorted({block.rank for block in blocks} - set(group.ranks)):
        why = f"ranks {missing} of the mesh are not in the tensor's group {list(group.ranks)}"
        raise MeshesDiffer(why=why, hint="Make the tensor on a group with all ranks of the mesh.")
    local, stride = _local(st, blocks), torch.empty(st.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=st.shape, stride=stride
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
    st: Any = ShardedTensor._assemble(spec, metadata, shards, pg, anchor=anchor)
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
        raise MeshesDiffer(why=f"no placements for a mesh of {mesh.ndim} dims", hint=hint)
    spec = st.sharding_spec()
    dim = int(spec.dim) if isinstance(spec, ChunkShardingSpec) else 0
    return [ShardedDim(dim % st.ndim) if st.ndim else Replicate()]


def _blocks(size: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[HeldBlock]:
    """Which block each rank of the mesh holds."""
    if any(isinstance(placement, Partial) for placement in placements):
        why = f"a DTensor with placements {tuple(placements)} holds sums that are not made yet"
        hint = "Use Shard and Replicate; x.redistribute(placements=[Shard(0)]) makes the sums."
        raise MeshesDiffer(why=why, hint=hint)
    coordinates = itertools.product(*map(range, mesh.shape))
    return [
        HeldBlock(int(mesh.mesh[at]), Box.of(*_torch.block_of(size, mesh, list(at), placements)))
        for at in coordinates
    ]


def _local(st: ShardedTensor, targets: list[HeldBlock]) -> Tensor:
    """This rank's block; of a rank that is not in the mesh an empty tensor."""
    me = dist.get_rank()
    placed, targeted = ({b for b in blocks if b.box.volume} for blocks in (blocks_of(st), targets))
    if placed == targeted:  # the same answer on every rank
        mine = [s.tensor for s in st._local_shards if HeldBlock(me, box_of(s.metadata)) in targeted]
        if mine:
            return mine[0]
    tensors, anchor = move_blocks(st, targets)
    if tensors:
        return tensors[0]
    return empty_of(st) if anchor is None else anchor


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


# -- torch's ShardedTensor ---

# torch.load reads ours with weights_only, its default
torch.serialization.add_safe_globals(
    [
        ShardedTensor,
        GridShardingSpec,
        pickling.ProcessGroupState,
        pickling.rebuilt,
        *_torch.pickled_types(),
    ]
)


def from_torch(x: Any) -> Any:
    """Ours of torch's own ShardedTensor, on the same group and the same memory; in a state dict (a
    dict, list or tuple) of all that are in it.

    >>> fcoll.sharded.from_torch({"step": 3, "table": torch.ones(1)})  # all else stays as it is
    {'step': 3, 'table': tensor([1.])}
    """
    if isinstance(x, _torch.TheirShardedTensor):
        shards = list(x.local_shards())
        return ShardedTensor._assemble(x.sharding_spec(), x.metadata(), shards, x._process_group)
    if isinstance(x, dict):
        return type(x)((key, from_torch(value)) for key, value in x.items())
    if type(x) in (list, tuple):
        return type(x)(from_torch(value) for value in x)
    return x


def _named(module: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


#: a module below torch.distributed._shard -> its names that are ours meanwhile
SERVED: dict[str, dict[str, Any]] = {
    "sharded_tensor.api": {"ShardedTensor": ShardedTensor, "ShardedTensorBase": ShardedTensorBase},
    "sharded_tensor": {
        "custom_sharded_op_impl": rules.sharded_op,
        "_sharded_op_impl": rules.torch_built_in,
        **_named(module_sharding, "state_dict_hook", "pre_load_state_dict_hook"),
        **_named(creators, "empty", "full", "ones", "rand", "randn", "zeros"),
        **_named(creators, "init_from_local_shards"),
    },
    "sharded_tensor.utils": {"_parse_and_validate_remote_device": specs.owner},
    "sharding_spec.api": {"custom_sharding_spec_op": rules.sharding_spec_op},
    "api": {
        "_shard_tensor": creators.shard_tensor,
        **_named(module_sharding, "shard_parameter", "shard_module"),
        "_reshard_output": module_sharding.reshard_output,
        "_collect_local_shard": module_sharding.collect_local_shard,
        "load_with_process_group": pickling.load_with_process_group,
        "_get_current_process_group": pickling.current_process_group,
    },
}


class ServedNames:
    """Names of torch that are served by fcoll, until ``stop()`` or the end of a with block."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._rpc_needed = redistribution.rpc_needed
        redistribution.rpc_needed = True

    def stop(self) -> None:
        """Put torch's own back."""
        self._patches.undo()
        redistribution.rpc_needed = self._rpc_needed

    def __enter__(self) -> ServedNames:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def serve_torch() -> ServedNames:
    """Serve the names of ``torch.distributed._shard.sharded_tensor`` by fcoll's: in torch's own
    modules (checkpoints, FSDP) and for all that import them from now on.

    >>> from torch.distributed._shard import sharded_tensor
    >>> with fcoll.sharded.serve_torch():
    ...     st = sharded_tensor.ones(fcoll.sharded.chunk(0, n), n, 2)
    >>> isinstance(st, fcoll.sharded.ShardedTensor)
    True
    """
    ours = {
        (f"torch.distributed._shard.{module}", name): value
        for module, names in SERVED.items()
        for name, value in names.items()
    }
    return ServedNames(_torch.replace_everywhere(ours))
