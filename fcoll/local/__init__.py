"""LocalTensor's face: the tensors of all ranks in one process, with torch's names.

The names of ``torch.distributed._local_tensor``: programs written for it run on this package, with
collectives and elementwise ops on all ranks at once instead of one after another. Use it directly,
or serve it in torch's place: ``sys.modules["torch.distributed._local_tensor"] = fcoll.local`` and
``sys.modules["torch.distributed._local_tensor._c10d"] = fcoll.local._c10d``.
"""

# ruff: noqa: F401  private names that torch's module has as well
from fcoll.local import _c10d
from fcoll.local.active_mode import (
    enabled_local_tensor_mode,
    get_local_tensor_mode_list,
    local_tensor_mode,
)
from fcoll.local.ints import LocalIntNode
from fcoll.local.local_tensor import LocalTensor
from fcoll.local.mode import LocalTensorMode
from fcoll.local.per_rank import (
    _for_each_rank_run_func,
    maybe_disable_local_tensor_mode,
    maybe_run_for_local_tensor,
    rank_map,
    reconcile_args,
    tensor_map,
)
from fcoll.local.rng import get_generator_seed_for_device_type
from fcoll.local.rng_tracker import (
    _LocalDeviceHandle,
    _LocalOffsetBasedRNGTracker,
    _LocalPhiloxState,
    maybe_enable_local_tracker,
)
from fcoll.local.runner import LocalRunnerMode

__all__ = [
    "LocalIntNode",
    "LocalRunnerMode",
    "LocalTensor",
    "LocalTensorMode",
    "enabled_local_tensor_mode",
    "get_generator_seed_for_device_type",
    "get_local_tensor_mode_list",
    "local_tensor_mode",
    "maybe_disable_local_tensor_mode",
    "maybe_enable_local_tracker",
    "maybe_run_for_local_tensor",
    "rank_map",
    "reconcile_args",
    "tensor_map",
]
