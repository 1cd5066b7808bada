"""torch's names, served by fcoll: programs written for torch's ShardedTensor run on ours."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from fcoll.ranks.patches import Patches
from fcoll.sharded import (
    _torch,
    creators,
    dispatch,
    modules,
    pickling,
    placements,
    remote,
    scatter,
    tensor,
)

SHARD = "torch.distributed._shard"

#: (torch's module, the name) -> ours
SERVED: dict[tuple[str, str], Any] = {
    (f"{SHARD}.sharded_tensor.api", "ShardedTensor"): tensor.ShardedTensor,
    (f"{SHARD}.sharded_tensor.api", "ShardedTensorBase"): tensor.ShardedTensorBase,
    **{
        (f"{SHARD}.sharded_tensor", name): getattr(creators, name)
        for name in ("empty", "full", "init_from_local_shards", "ones", "rand", "randn", "zeros")
    },
    (f"{SHARD}.sharded_tensor", "custom_sharded_op_impl"): dispatch.sharded_op,
    (f"{SHARD}.sharded_tensor", "_sharded_op_impl"): dispatch.built_in,
    (f"{SHARD}.sharded_tensor.utils", "_parse_and_validate_remote_device"): placements.owner,
    (f"{SHARD}.sharding_spec.api", "custom_sharding_spec_op"): dispatch.sharding_spec_op,
    (f"{SHARD}.sharded_tensor", "state_dict_hook"): modules.state_dict_hook,
    (f"{SHARD}.sharded_tensor", "pre_load_state_dict_hook"): modules.pre_load_state_dict_hook,
    (f"{SHARD}.api", "_shard_tensor"): scatter.shard_tensor,
    (f"{SHARD}.api", "shard_parameter"): modules.shard_parameter,
    (f"{SHARD}.api", "shard_module"): modules.shard_module,
    (f"{SHARD}.api", "_reshard_output"): modules.reshard_output,
    (f"{SHARD}.api", "_collect_local_shard"): modules.collect_local_shard,
    (f"{SHARD}.api", "load_with_process_group"): pickling.load_with_process_group,
    (f"{SHARD}.api", "_get_current_process_group"): pickling.current_process_group,
}


class Serving:
    """Names of torch that are served by fcoll, until ``stop()`` or the end of a with block."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._rpc_needed = remote.rpc_needed
        remote.rpc_needed = True

    def stop(self) -> None:
        """Put torch's own back."""
        self._patches.undo()
        remote.rpc_needed = self._rpc_needed

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def serve_torch() -> Serving:
    """Serve the names of ``torch.distributed._shard.sharded_tensor`` by fcoll's: in torch's own
    modules (checkpoints, FSDP) and for all that import them from now on.

    >>> from torch.distributed._shard import sharded_tensor
    >>> with fcoll.sharded.serve_torch():
    ...     st = sharded_tensor.ones(fcoll.sharded.chunk(0, n), n, 2)
    >>> isinstance(st, fcoll.sharded.ShardedTensor)
    True
    """
    return Serving(_torch.replace_everywhere(SERVED))
