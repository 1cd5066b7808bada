"""torch's own sharded tensors as ours, and what torch.load may read of ours."""

from __future__ import annotations

from typing import Any

import torch

from fcoll.sharded import _torch, pickling
from fcoll.sharded.specs import GridShardingSpec
from fcoll.sharded.tensor import ShardedTensor

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
        return ShardedTensor._made(x.sharding_spec(), x.metadata(), shards, x._process_group)
    if isinstance(x, dict):
        return type(x)((key, from_torch(value)) for key, value in x.items())
    if type(x) in (list, tuple):
        return type(x)(from_torch(value) for value in x)
    return x
