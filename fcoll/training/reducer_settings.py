"""Settings and getters of a reducer: its comm hook, its logger, the small calls of torch's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.errors import BadCommHook, CollectiveMismatch
from fcoll.source import show, user_sites
from fcoll.training import _torch, backward_errors, comm_hooks, tags
from fcoll.training.bucket import GradBucket, GradientBucket
from fcoll.training.bucket_collectives import Collectives
from fcoll.training.statistics import Statistics
from fcoll.training.unused import UsedMap


class ReducerSettings:
    """A reducer's comm hook, its logger and what else is set on it."""

    group: Collectives
    names: list[str]
    indices: list[list[int]]
    stats: Statistics
    used: UsedMap | None
    _buckets: list[GradientBucket]
    arrivals: Any

    def __init__(self) -> None:
        self.graph_is_static = True  # so far
        self._logger: Callable[[], Any] = lambda: None
        self._hook: comm_hooks.Hook | None = None
        self._mixed_dtype: torch.dtype | None = None
        self._optimizes = False
        self._futures: Sequence[Any] = ()
        self._forward_work: tuple[Any, bool] | None = None
        self.number = tags.UNKNOWN
        self.tags: list[tags.Tag] = []
        self.made_at = show(*user_sites()) or "?"
        # ranks that have joined send zeros from other memory: meanwhile nobody sums in place
        self._joining = False

    # -- comm hooks -------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have ``hook(state, bucket)`` reduce the buckets: torch's interface."""
        self._set_hook(comm_hooks.python_hook(state, hook))

    def register_functional_hook(self, hook: Callable[[Tensor], Tensor]) -> None:
        """Have ``hook(flat gradients)`` reduce the buckets: a function from tensor to tensor."""
        self._set_hook(comm_hooks.functional_hook(hook))

    def register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Have one of torch's two built-in hooks reduce the buckets."""
        self._set_hook(comm_hooks.BUILTIN[comm_hook_type](lambda: self.group))

    def _set_hook(self, hook: comm_hooks.Hook) -> None:
        if self._hook is not None:
            self._fail(
                BadCommHook(
                    why="register_comm_hook or register_builtin_comm_hook can only be called once.",
                    hint="A reducer has one hook: let it call the other.",
                )
            )
        self._hook = hook

    def run_comm_hook(self, bucket: GradBucket) -> Any:
        """What the hook makes of a bucket; without one, the sum over the ranks."""
        return self._hook(bucket) if self._hook else self.run_allreduce_hook(bucket)

    def run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """A future of a list with the bucket's buffer, added up over the ranks in place."""
        return comm_hooks.done([self.group.sum_(bucket.buffer()).wait()])

    # -- set ---------------------------------------------------------------------------------------

    def set_logger(self, logger: Any) -> None:
        self._logger = weakref.ref(logger)

    def set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        """The all-reduce that counts the ranks that still have inputs."""
        self._forward_work = (work, use_static_world_size)
        self._joining = True

    def set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Gradients come in this dtype."""
        self._mixed_dtype = dtype

    def set_optimizer_in_backward(self) -> None:
        """The comm hook runs the optimizer: gradients need not be copied back."""
        self._optimizes = True

    def set_sparse_metadata(self, metadata: Mapping[str, Tensor]) -> None:
        """Indices for backends that reduce sparse tensors of known indices; others do not need
        them."""

    def set_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Look at one in so many iterations, after the first ten."""
        self.stats.rate = sample_rate

    def install_futures(self, futures: Sequence[Any]) -> None:
        """Wait for these too at the end of the backward pass."""
        self._futures = [*self._futures, *futures]

    def update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Reduce over another group from now on."""
        self.group = Collectives(new_process_group)
        self.set_number(tags.UNKNOWN)
        for bucket in self._buckets:
            bucket.shared = None  # the memory is shared by the other group's ranks

    def set_number(self, number: int) -> None:
        """Have this number among the group's reducers, on all ranks: buckets are told apart by it
        and by the names of their parameters."""
        self.number = number
        self.tags = [tags.Tag(number, [self.names[i] for i in b]) for b in self.indices]

    def remove_autograd_hooks(self) -> None:
        """Be called for gradients no more."""
        self.arrivals.remove()

    # -- read --------------------------------------------------------------------------------------

    def ddp_graph_static(self) -> bool:
        """Has the set of unused parameters been the same so far?"""
        return self.graph_is_static

    def get_backward_stats(self) -> list[int]:
        """When each gradient was ready: ns from the start of the backward pass."""
        return list(self.arrivals.seen()["ready_ns"])

    def get_local_used_map_on_device(self) -> Tensor:
        """How many ranks used each parameter, after the backward pass; else zeros."""
        if self.used is None:
            return torch.zeros(0, dtype=torch.int32)
        return self.used.on_device

    def shown(self, index: int) -> str:
        """A bucket, as errors speak of it."""
        names = [self.names[i] for i in self.indices[index]]
        return backward_errors.bucket(index, len(self.indices), names, self.made_at)

    # -- errors ------------------------------------------------------------------------------------

    def _gradients_in(self, message: Tensor, index: int) -> Tensor:
        """The gradients in a reduced message; an error if other ranks sent another bucket."""
        bucket, tag = self._buckets[index], self.tags[index]
        if bucket.tail is None or message is not bucket.message:
            return message
        # a mode may have other values than these numbers
        other = tag.others(bucket.tail, self.group.n) if _torch.nobody_watches() else tag.value
        if other != tag.value:
            mine, theirs = self.shown(index), tags.whose(other, self.group.name)
            text = f"rank {self.group.rank} reduces {mine}, where others reduce {theirs}"
            raise CollectiveMismatch(message=text)
        return bucket.buffer

    def _fail(self, error: Exception, buckets: Sequence[int] = ()) -> None:
        """Raise, after telling the logger; of buckets that may have failed, with parameters."""
        if error.args:
            error.args = (tags.with_names(str(error.args[0]), self.group.name), *error.args[1:])
        if buckets and error.args and self.shown(buckets[0]) not in error.args[0]:
            text = ", or ".join(self.shown(b) for b in buckets)
            error.args = (f"{error.args[0]}\nIt was {text}.", *error.args[1:])
        logger = self._logger()
        if logger is not None:
            logger.set_error_and_log(str(error))
        raise error

    # torch's names in Python of the methods above
    _run_comm_hook = run_comm_hook
    _run_allreduce_hook = run_allreduce_hook
    _ddp_graph_static = ddp_graph_static
    _set_forward_pass_work_handle = set_forward_pass_work_handle
    _set_mixed_precision_param_dtype = set_mixed_precision_param_dtype
    _set_optimizer_in_backward = set_optimizer_in_backward
    _set_sparse_metadata = set_sparse_metadata
    _set_ddp_runtime_logging_sample_rate = set_runtime_logging_sample_rate
    _install_post_backward_futures = install_futures
    _get_local_used_map = get_local_used_map_on_device
    _remove_autograd_hooks = remove_autograd_hooks
    _update_process_group = update_process_group
