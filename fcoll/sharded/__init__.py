"""ShardedTensor: a tensor in shards over the ranks of a group, on fcoll's collectives.

The names of ``torch.distributed._shard.sharded_tensor``, and what it lacks: grids, any layout to
any other, gradients, simulated ranks. ``serve_torch()`` puts them in torch's place.
"""

import sys as _sys

from fcoll.imports import when_imported as _when_imported
from fcoll.sharded import _torch
from fcoll.sharded._torch import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensorMetadata,
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from fcoll.sharded.creators import (
    arange,
    empty,
    from_function,
    from_local_tensor,
    full,
    init_from_local_shards,
    init_from_local_shards_and_global_metadata,
    ones,
    rand,
    randn,
    shard_tensor,
    zeros,
)
from fcoll.sharded.io.checkpoint import checkpoint_writer
from fcoll.sharded.io.pickling import load_files, load_with_process_group
from fcoll.sharded.module_sharding import (
    collect_local_shard,
    pre_load_state_dict_hook,
    reshard_output,
    shard_module,
    shard_parameter,
    state_dict_hook,
)
from fcoll.sharded.ops.rules import sharded_op, sharding_spec_op
from fcoll.sharded.ops.rules import torch_built_in as _sharded_op_impl  # noqa: F401  torch's name
from fcoll.sharded.redistribution import reshard
from fcoll.sharded.sharded_tensor import ShardedTensor, ShardedTensorBase
from fcoll.sharded.specs import GridShardingSpec, chunk, grid
from fcoll.sharded.torch_interop import from_dtensor, from_torch, serve_torch, to_dtensor
from fcoll.sharded.transfer_plan import TransferPlan as Plan

custom_sharded_op_impl = sharded_op  # torch's name
_TENSOR = ShardedTensor.__module__

# Plans, metadata and groups are no tensor code: compiled programs call them as they are. What
# they do with local tensors (``st.local_tensor()`` is in sharded_tensor.py) is compiled.
_when_imported(
    _torch.DECIDES_WHAT_IS_COMPILED,
    lambda: _torch.not_compiled(
        [name for name in _sys.modules if name.startswith(f"{__name__}.") and name != _TENSOR]
    ),
)

__all__ = [
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "GridShardingSpec",
    "Plan",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "arange",
    "checkpoint_writer",
    "chunk",
    "collect_local_shard",
    "custom_sharded_op_impl",
    "empty",
    "from_dtensor",
    "from_function",
    "from_local_tensor",
    "from_torch",
    "full",
    "grid",
    "init_from_local_shards",
    "init_from_local_shards_and_global_metadata",
    "load_files",
    "load_with_process_group",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "reshard",
    "reshard_output",
    "serve_torch",
    "shard_module",
    "shard_parameter",
    "shard_tensor",
    "sharded_op",
    "sharding_spec_op",
    "state_dict_hook",
    "to_dtensor",
    "zeros",
]
