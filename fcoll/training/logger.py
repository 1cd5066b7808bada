"""Logger: facts of a reducer and times of its iterations, under torch's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fcoll.training.assignment import compute_bucket_assignment_by_size
from fcoll.training.overrides import override, override_class
from fcoll.training.parameter_check import verify_params_across_processes
from fcoll.training.reducer import Reducer

# Environment variables that are written down under their names, those of backends for theirs.
_ENVIRONMENT = "MASTER_PORT MASTER_ADDR CUDA_VISIBLE_DEVICES TORCH_DISTRIBUTED_DEBUG"
_OF_BACKEND = {
    "gloo": "GLOO_SOCKET_IFNAME GLOO_DEVICE_TRANSPORT",
    "nccl": "NCCL_SOCKET_IFNAME TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_ASYNC_ERROR_HANDLING "
    "NCCL_DEBUG NCCL_NTHREADS NCCL_IB_TIMEOUT",
}
GLOO_THREADS = 2
# C++'s names of dtypes, which torch's logger writes
_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


@dataclass
class LoggingData:
    """What torch calls DDPLoggingData."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class Logger:
    """The statistics of a reducer, those of its iterations from the ones that are sampled.

    >>> reducer = fcoll.Reducer([torch.ones(4, requires_grad=True)], [[0]], [9], dist.group.WORLD)
    >>> logger = fcoll.Logger(reducer)
    >>> logger.set_construction_data_and_log("Net", [], -1, True, False, False)
    >>> logger.as_dict()["bucket_sizes"], logger.as_dict()["total_parameter_size_bytes"]
    ('16', 16)
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.data = LoggingData()
        self._sampled = 0  # iterations

    # -- construction -----------------------------------------------------------------------------

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Log the facts that are known when the module is wrapped."""
        reducer, strs, ints = self.reducer, self.data.strs_map, self.data.ints_map
        if static_graph:
            self._set_static_graph()
        strs["module_name"] = module_name
        strs["device_ids"] = ", ".join(map(str, device_ids))
        strs["dtypes"] = ", ".join(sorted({_dtype(p.dtype) for p in reducer.params}))
        strs["bucket_sizes"] = self._bucket_sizes()
        strs["backend_name"] = backend = reducer.group.pg.name()
        ints |= {
            "world_size": reducer.group.n,
            "rank": reducer.group.rank,
            "iteration": 0,
            "is_multi_device_module": int(len({p.device for p in reducer.params}) > 1),
            "num_parameter_tensors": len(reducer.params),
            "total_parameter_size_bytes": sum(_bytes(p) for p in reducer.params),
            "output_device": output_device,
            "broadcast_buffers": int(broadcast_buffers),
            "has_sync_bn": int(has_sync_bn),
            "bucket_cap_bytes": reducer.bucket_bytes_cap,
            "find_unused_parameters": int(reducer.finds_unused),
            "gradient_as_bucket_view": int(reducer.shares),
        }
        if backend == "gloo":
            ints["gloo_num_threads"] = GLOO_THREADS
        for variable in f"{_ENVIRONMENT} {_OF_BACKEND.get(backend, '')}".split():
            name = variable.lower().replace("torch_nccl", "nccl")
            strs[name] = os.environ.get(variable, "N/A")

    def _set_static_graph(self) -> None:
        self.data.ints_map["static_graph"] = 1

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self.data.strs_map["comm_hook"] = comm_hook

    def _set_uneven_input_join(self) -> None:
        self.data.ints_map["join_uneven_inputs"] = 1

    def set_error_and_log(self, error: str) -> None:
        """The iteration that is running failed."""
        self.data.ints_map |= {"has_error": 1, "iteration": self.reducer.stats.iteration}
        self.data.strs_map["error"] = error

    # -- iterations -------------------------------------------------------------------------------

    @torch.compiler.disable
    def set_runtime_stats_and_log(self) -> None:
        """At the start of an iteration: what the last one took, if it was sampled."""
        reducer, strs, ints = self.reducer, self.data.strs_map, self.data.ints_map
        stats = reducer.stats
        if not stats.sampled:
            return
        self._sampled += 1
        ints["iteration"] = stats.iteration
        if reducer.finds_unused or reducer.static_graph:
            ints["unused_parameter_size"] = sum(_bytes(reducer.params[i]) for i in reducer._unused)
        else:
            ints["unused_parameter_size"] = 0
        if reducer.rebuilt and not ints.get("has_rebuilt_buckets"):
            ints["has_rebuilt_buckets"] = 1
            strs["rebuilt_bucket_sizes"] = self._bucket_sizes()
            of = (" ".join(map(str, members)) for members in reducer.indices)
            strs["rebuilt_per_bucket_param_indices"] = ", ".join(of)
        order = ", ".join(map(str, reducer.arrivals.seen()["order"]))
        strs["prev_iteration_grad_ready_order_indices"] = order
        ints["num_buckets_reduced"] = len(reducer.indices)
        self._set_times()

    def _set_times(self) -> None:
        t, ints = self.reducer.stats.times, self.data.ints_map
        spans = {
            "forward_compute_time": (t.forward_start, t.backward_start),
            "backward_compute_time": (t.backward_start, t.backward_end),
            "backward_comm_time": (t.comm_start, t.comm_end),
            "backward_compute_comm_overlap_time": (t.comm_start, t.backward_end),
        }
        for name, (begin, end) in spans.items():
            took = end - begin if 0 <= begin <= end else 0
            if name == "backward_compute_comm_overlap_time":
                took = min(took, ints["backward_comm_time"], ints["backward_compute_time"])
            ints[name] = took
            mean = ints.get(f"avg_{name}", 0)
            ints[f"avg_{name}"] = round((mean * (self._sampled - 1) + took) / self._sampled)
        ints |= {
            "forward_compute_time_start": t.forward_start,
            "backward_compute_time_start": t.backward_start,
            "backward_compute_time_end": t.backward_end,
            "backward_comm_time_start": t.comm_start,
            "backward_comm_time_end": t.comm_end,
        }

    def _bucket_sizes(self) -> str:
        return ", ".join(str(bucket.bytes) for bucket in self.reducer.buckets)

    def _get_ddp_logging_data(self) -> LoggingData:
        return self.data

    def as_dict(self) -> dict[str, str | int]:
        """All of it."""
        return {**self.data.strs_map, **self.data.ints_map}


def _dtype(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


# -- torch.distributed's names that take a reducer or a logger ---

override_class("Logger", Logger, lambda reducer=None: isinstance(reducer, Reducer))
_OURS: dict[str, Callable[..., Any]] = {
    "_register_comm_hook": Reducer.register_comm_hook,
    "_register_builtin_comm_hook": Reducer.register_builtin_comm_hook,
    "_verify_params_across_processes": verify_params_across_processes,
    "_compute_bucket_assignment_by_size": compute_bucket_assignment_by_size,
}
for _name, _ours in _OURS.items():
    override(_name, _ours, (Reducer, Logger))
