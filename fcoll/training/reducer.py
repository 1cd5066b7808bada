"""Reducer: gradients are put into buckets as they become ready, and full buckets are reduced.

It has the constructor, the methods and the behaviour of ``torch.distributed.Reducer``, so that

    torch.distributed.Reducer = fcoll.Reducer

has torch's DistributedDataParallel run on it. An iteration is

    prepare_for_forward -> forward pass -> prepare_for_backward(outputs) -> backward pass

in which each gradient calls ``_autograd_hook``. A bucket with all its gradients is sent as soon as
those before it were: on all ranks in the same order. When the backward pass ends the results go
back into the gradients.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.errors import (
    BadBuckets,
    BadGradient,
    FcollError,
    GraphChanged,
    ReadyTwice,
    ReductionUnfinished,
)
from fcoll.scheduling.buckets import Bucket as PlannedBucket
from fcoll.source import user_line
from fcoll.training import _torch, explain, hooks
from fcoll.training import bucket as buckets
from fcoll.training.assignment import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    compute_bucket_assignment_by_size,
    planned,
)
from fcoll.training.bucket import Bucket, GradBucket
from fcoll.training.collectives import Collectives
from fcoll.training.doors import open_doors
from fcoll.training.statistics import Statistics
from fcoll.training.unused import UsedMap, gradient_accumulator, not_reached, warn_all_used

# Dynamo does not look into a reducer: it breaks the graph, as at torch's
_eager = torch.compiler.disable


class Reducer:
    """Reduces the gradients of ``params`` over a process group, in buckets.

    ``bucket_indices`` say which parameters are in which bucket; after the first iteration buckets
    are made anew, in the order in which gradients became ready on rank 0, with
    ``first_bucket_bytes_cap`` and then ``bucket_bytes_cap`` bytes, or ``bucket_bytes_cap_list``.

    >>> model = torch.nn.Linear(2, 2)
    >>> params = list(model.parameters())
    >>> reducer = fcoll.Reducer(params, [[0, 1]], [1 << 20], dist.group.WORLD)
    >>> reducer.prepare_for_forward()
    >>> loss = model(torch.ones(1, 2) * (rank + 1)).sum()
    >>> reducer.prepare_for_backward([])
    >>> loss.backward()  # every rank has the mean of all ranks' gradients
    >>> bool((model.weight.grad == (n + 1) / 2).all())
    True
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: dist.ProcessGroup,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = BUCKET_BYTES,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: Mapping[int, str] | None = None,
        first_bucket_bytes_cap: int = FIRST_BUCKET_BYTES,
        skip_all_reduce_unused_params: bool = False,
        use_python_reducer: bool = False,
        bucket_bytes_cap_list: Sequence[int] = (),
        batched_grad_copy: bool = False,  # they always are: a bucket is filled when it is sent
    ) -> None:
        if not params:
            raise BadBuckets(why="Expected at least one parameter", hint="Pass the parameters.")
        open_doors()
        self.params = list(params)
        self._dtypes = [p.dtype for p in self.params]
        self.group = Collectives(process_group)
        self.sparse = [*expect_sparse_gradients] or [False] * len(self.params)
        self.caps = list(bucket_bytes_cap_list) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self.bucket_bytes_cap = bucket_bytes_cap
        self.finds_unused = find_unused_parameters
        self.shares = gradient_as_bucket_view
        given = param_to_name_mapping or {}
        self.names = [given.get(i, f"parameter {i}") for i in range(len(self.params))]
        self.static_graph = False
        self.skips_unused = skip_all_reduce_unused_params
        self.stats = Statistics(len(self.params))
        self.graph_is_static = True  # so far
        self._logger: Callable[[], Any] = lambda: None
        self._hook: hooks.Hook | None = None
        self._mixed_dtype: torch.dtype | None = None
        self._optimizes = False
        self._futures: Sequence[Any] = ()
        self._forward_work: tuple[Any, bool] | None = None
        self._unused: list[int] = []
        self._triggered = [0] * len(self.params)  # hooks in the first iteration of a static graph
        self._backwards = 0
        self.used: UsedMap | None = None
        if find_unused_parameters:
            self.used = UsedMap(len(self.params), self.params[0].device)
        self._reset()
        self.rebuilt = False
        self.initialize_buckets(bucket_indices)
        self._accumulators: list[Any] = []
        self._handles: list[Any] = []
        if not use_python_reducer:
            self._listen()
        weakref.finalize(self, _remove, self._handles)

    def _reset(self) -> None:
        self._expects = False  # between prepare_for_backward and the end of the reduction
        self._unfinished = False  # a gradient was ready, the reduction has not ended
        self._first_hook = False  # of this backward pass
        self._divisor: float | None = None
        self._order: list[int] = []  # in which gradients became ready in the first iteration
        self._ready: dict[int, int] = {}  # parameter -> the backward pass that made it ready
        self._passes: list[str] = []  # the lines of the backward passes of this iteration
        self._task = -1
        self._marked_unused = False
        self._next = 0  # bucket to be sent
        self._started_ns = 0

    def _listen(self) -> None:
        """Be called for each gradient. Hooks know the reducer weakly: it goes when its owner does,
        and its hooks with it, so that another can take its place."""
        me = weakref.ref(self)

        def hook_of(index: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                reducer = me()
                if reducer is not None:
                    reducer._autograd_hook(index)

            return hook

        for index, param in enumerate(self.params):
            node = gradient_accumulator(param)
            self._accumulators.append(node)
            self._handles.append(node.register_hook(hook_of(index)))

    # -- buckets ----------------------------------------------------------------------------------

    def initialize_buckets(self, bucket_indices: Sequence[Sequence[int]]) -> None:
        """Put the parameters into these buckets."""
        if self._expects:
            self._fail(
                BadBuckets(
                    why="`initialize_buckets` must NOT be called during autograd execution",
                    hint="Call it between iterations.",
                )
            )
        self.indices = [list(members) for members in bucket_indices]
        self._buckets = [buckets.made(b, self.params, self.sparse) for b in self.indices]
        self._bucket_of = {i: b for b, members in enumerate(self.indices) for i in members}
        if self.shares:
            for bucket in self._buckets:
                bucket.adopt()

    @property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        """The buckets in the order in which they are reduced, parameters by name.

        >>> params = [torch.ones(4, requires_grad=True)]
        >>> reducer = fcoll.Reducer(params, [[0]], [1 << 20], dist.group.WORLD)
        >>> [(bucket.members, bucket.bytes) for bucket in reducer.buckets]
        [(('parameter 0',), 16)]
        """
        return planned(self.params, self.indices, self.names, self.group.name or "")

    def should_rebuild_buckets(self) -> bool:
        """Once, and not if the parameters in use may change."""
        return (self.static_graph or not self.finds_unused) and not self.rebuilt

    @_eager
    def rebuild_buckets(self) -> bool:
        """Make the buckets anew, in the order in which gradients became ready on rank 0."""
        self.check_finalized()
        if not self.should_rebuild_buckets() or not self._order:
            return False
        if len(self._order) != len(self.params):
            missing = {*range(len(self.params))} - {*self._order}
            names = explain.listed(self.names[i] for i in sorted(missing))
            self._fail(
                BadBuckets(
                    why=f"{len(self._order)} gradients became ready for {len(self.params)} "
                    f"parameters; none came for {names or 'none'}",
                    hint="Run one backward pass for each forward pass.",
                )
            )
        last_is_small = os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"
        order = self._order[::-1] if last_is_small else self._order
        tensors = [self.params[i] for i in order]
        indices, _ = compute_bucket_assignment_by_size(tensors, self.caps, self.sparse, order)
        self.rebuilt = True
        self._order = []
        self.initialize_buckets(self._agreed(indices[::-1] if last_is_small else indices))
        return True

    def _agreed(self, indices: list[list[int]]) -> list[list[int]]:
        """Rank 0's buckets."""
        flat = [i for members in indices for i in members]
        of = [b for b, members in enumerate(indices) for _ in members]
        mine = torch.tensor([flat, of], dtype=torch.int32).to(self.params[0].device)
        agreed = self.group.broadcast_(mine)
        if _torch.is_fake(agreed):
            return indices
        made: list[list[int]] = [[] for _ in range(1 + int(agreed[1].max()))]
        for index, b in zip(*agreed.tolist(), strict=True):
            made[b].append(index)
        return made

    def get_grad_buckets(self, return_zero_tensors: bool = True) -> list[GradBucket]:
        """What a comm hook would get of each bucket, in the order in which they are reduced."""
        found = []
        for i, b in enumerate(self._buckets):
            buffer = b.buffer
            if return_zero_tensors and b.sparse:
                buffer = torch.sparse_coo_tensor(size=b.sizes[0], dtype=buffer.dtype)
            elif return_zero_tensors:
                buffer = torch.zeros_like(buffer)
            found.append(GradBucket(i, len(self._buckets), buffer, b.params, b.sizes))
        return found

    # -- an iteration -----------------------------------------------------------------------------

    @_eager
    def prepare_for_forward(self) -> None:
        """A forward pass begins."""
        self.stats.forward()

    @_eager
    def prepare_for_backward(self, outputs: Sequence[Tensor] | Tensor = ()) -> None:
        """A forward pass gave these outputs, and gradients are to be reduced.

        Without this call they are only accumulated. Outputs are needed to find parameters that the
        backward pass will not reach.
        """
        self._started_ns = time.perf_counter_ns()
        self.stats.backward()
        self.stats.ready_order = []
        self._expects = True
        self._next = 0
        for bucket in self._buckets:
            bucket.pending = len(bucket.indices)
            bucket.work = None
        self._left = list(self._triggered)
        self._marked_unused = False
        self._ready.clear()
        self._passes.clear()
        self._task = -1
        if self._mixed_dtype is None:
            self._check_dtypes()
        if self._graph_may_change:
            given = [outputs] if isinstance(outputs, Tensor) else outputs
            self._find_unused(given)

    def _check_dtypes(self) -> None:
        """A parameter of another dtype has another node in the graph: nobody would hear of it."""
        for i, (param, dtype) in enumerate(zip(self.params, self._dtypes, strict=True)):
            if param.dtype is not dtype:
                hint = f"{self.names[i]} changed after the reducer was made: make it anew."
                self._fail(BadGradient(want=f"{dtype}", got=f"{param.dtype}", hint=hint))

    @property
    def _graph_may_change(self) -> bool:
        return self.finds_unused and not self.static_graph

    @property
    def _first_of_static(self) -> bool:
        return self.static_graph and self._backwards == 1

    def _find_unused(self, outputs: Sequence[Tensor]) -> None:
        before, self._unused = self._unused, not_reached(outputs, self._accumulators)
        if self.stats.iteration > 1:
            self.graph_is_static &= before == self._unused
        if not self._unused and self.used is not None:
            warn_all_used()

    def _autograd_hook(self, index: int) -> None:
        """The gradient of a parameter has been accumulated."""
        if not self._first_hook:
            self._first_hook = True
            self._backwards += 1
        first_of_static = self.static_graph and self._backwards == 1
        if self.used is not None and (first_of_static or self._graph_may_change):
            # without a gradient the hook is called where an output is not in the loss
            self.used.local[index] |= self.params[index].grad is not None
        if not self._expects:
            return
        self.stats.ready_order.append(index)
        if first_of_static:
            self._triggered[index] += 1
            return
        if not self._marked_unused:
            self._marked_unused = True
            for unused in self._unused:
                self._mark_ready(unused)
        if self.static_graph:
            if not self._left[index]:
                text = explain.graph_changed(index, self.names[index], self._triggered[index])
                self._fail(GraphChanged(message=text))
            self._left[index] -= 1
            if self._left[index]:
                return
        if not self.rebuilt and self.should_rebuild_buckets():
            self._order.append(index)
        self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        task = _torch.backward_pass()
        if task != self._task:
            self._task = task
            self._passes.append(user_line() or "?")
        if index in self._ready:
            self._fail_ready_twice(index)
        self._ready[index] = len(self._passes) - 1
        self.stats.ready_ns[index] = time.perf_counter_ns() - self._started_ns
        self._unfinished = True
        bucket = self._buckets[self._bucket_of[index]]
        bucket.pending -= 1
        if not bucket.pending:
            self._send_ready()

    def _send_ready(self) -> None:
        """Send buckets that are full, in their order."""
        before = self._next
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            if not self._next:
                self.stats.sends()
            self._send(self._next)
            self._next += 1
        if before < self._next == len(self._buckets):
            if self._graph_may_change and self.used is not None:
                self.used.start(self.group)
            _torch.at_end_of_backward(self._end_backward)

    def _send(self, index: int) -> None:
        bucket = self._buckets[index]
        if self.skips_unused and {*bucket.indices} <= {*self._unused}:
            return
        scale = 1.0 if self._hook else 1.0 / self._divide_factor()
        try:
            with torch.no_grad():
                bucket.fill(scale, self.shares, self._mixed_dtype)
                if self.stats.iteration <= 1:
                    bucket.check_strides()
                if self._hook is None:
                    bucket.work = self.group.sum_(bucket.buffer)
                else:
                    bucket.work = self._run_hook(self._grad_bucket(index, bucket))
        except (RuntimeError, FcollError) as error:
            self._fail(error, index)

    def _run_hook(self, bucket: GradBucket) -> Any:
        assert self._hook is not None
        if not _torch.is_fake(bucket.buffer()):
            return self._hook(bucket)
        with _torch.futures_with_tensors():
            return self._hook(bucket)

    def _grad_bucket(self, index: int, b: Bucket) -> GradBucket:
        return GradBucket(index, len(self._buckets), b.buffer, b.params, b.sizes)

    def _divide_factor(self) -> float:
        """The number of ranks, or of those that still have inputs."""
        if self._divisor is None:
            self._divisor = self.group.n
            if self._forward_work is not None and not self._forward_work[1]:
                work = self._forward_work[0]
                work.wait()
                self._divisor = int(work.result()[0].item())
        return self._divisor

    def _end_backward(self) -> None:
        self.stats.computed()
        if self.static_graph and not self._first_of_static and self.should_rebuild_buckets():
            self._order += self._unused
        self._finalize()

    def _finalize(self) -> None:
        """Wait for all buckets and put the results into the gradients."""
        self._expects = self._unfinished = self._first_hook = False
        agrees = self.used is not None and (self.static_graph or self.finds_unused)
        for index, bucket in enumerate(self._buckets):
            work, bucket.work = bucket.work, None
            if work is None:
                continue
            keep = [agrees and self.used.unused(i) for i in bucket.indices]  # type: ignore[union-attr]
            try:
                with torch.no_grad():
                    result = work.wait() if self._hook is None else hooks.result_of(work)
                    if not self._optimizes:
                        bucket.spread(result, self.shares, keep)
            except (RuntimeError, FcollError) as error:
                self._fail(error, index)
        for future in self._futures:
            future.wait()
        self._futures = ()
        self._divisor = None
        if self.used is not None:
            self.used.reset() if self._graph_may_change else self.used.finish()
        self.stats.received()

    @_eager
    def delay_all_reduce(self) -> None:
        """Reduce all gradients now, at the end of the first backward pass of a static graph."""
        self.stats.computed()
        self.stats.sends()
        assert self.used is not None
        self.used.start(self.group)
        self._unused = [i for i, n in enumerate(self._triggered) if not n]
        self._unfinished = True
        for index in range(len(self._buckets)):
            self._send(index)
        self._finalize()

    # -- errors -----------------------------------------------------------------------------------

    @_eager
    def check_finalized(self) -> None:
        """Raise if the reduction of the last iteration has not ended."""
        if not self._unfinished:
            return
        missing = [i for i in range(len(self.params)) if i not in self._ready]
        facts = explain.Facts(
            self.group.rank,
            missing,
            self.names,
            self.finds_unused,
            self.static_graph,
            len(self._passes),
        )
        error = ReductionUnfinished(message=explain.unfinished(facts))
        error.parameters = tuple(self.names[i] for i in missing)
        self._fail(error)

    def _fail_ready_twice(self, index: int) -> None:
        first = self._passes[self._ready[index]]
        marked = index in self._unused and self._marked_unused
        text = explain.ready_twice(index, self.names[index], first, self._passes[-1], marked)
        self._fail(ReadyTwice(message=text))

    def _fail(self, error: Exception, bucket: int | None = None) -> None:
        """Raise, after telling the logger; of a bucket that failed, with its parameters."""
        if bucket is not None and error.args:
            names = [self.names[i] for i in self.indices[bucket]]
            text = explain.of_bucket(bucket, len(self._buckets), names)
            error.args = (f"{error.args[0]}\n{text}.", *error.args[1:])
        logger = self._logger()
        if logger is not None:
            logger.set_error_and_log(str(error))
        raise error

    # -- settings ---------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have ``hook(state, bucket)`` reduce the buckets: torch's interface."""
        self._set_hook(hooks.python_hook(state, hook))

    def register_functional_hook(self, hook: Callable[[Tensor], Tensor]) -> None:
        """Have ``hook(flat gradients)`` reduce the buckets: a function from tensor to tensor."""
        self._set_hook(hooks.functional_hook(hook))

    def register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Have one of torch's two built-in hooks reduce the buckets."""
        self._set_hook(hooks.BUILTIN[comm_hook_type](lambda: self.group))

    def _set_hook(self, hook: hooks.Hook) -> None:
        if self._hook is not None:
            self._fail(
                hooks.BadCommHook(
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
        return hooks.done([self.group.sum_(bucket.buffer()).wait()])

    def set_static_graph(self) -> None:
        """Say that every iteration uses the same parameters, as often."""
        if self.stats.iteration:
            why = (
                "set_static_graph() should be called before training loop starts and after "
                "DistributedDataParallel is constructed"
            )
            self._fail(GraphChanged(message=f"{why}."))
        self.static_graph = True
        self.used = UsedMap(len(self.params), self.params[0].device)

    def ddp_graph_static(self) -> bool:
        """Has the set of unused parameters been the same so far?"""
        return self.graph_is_static

    def set_logger(self, logger: Any) -> None:
        self._logger = weakref.ref(logger)

    def set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        """The all-reduce that counts the ranks that still have inputs."""
        self._forward_work = (work, use_static_world_size)

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

    def get_backward_stats(self) -> list[int]:
        """When each gradient was ready: ns from the start of the backward pass."""
        return list(self.stats.ready_ns)

    def get_local_used_map_on_device(self) -> Tensor:
        """How many ranks used each parameter, after the backward pass; else zeros."""
        if self.used is None:
            return torch.zeros(0, dtype=torch.int32)
        return self.used.on_device

    def push_rebuilt_params_for_all_indices(self) -> None:
        """On a rank that has joined: its order is any, rank 0's counts."""
        if self.should_rebuild_buckets() and not self._order:
            self._order = list(range(len(self.params)))

    def remove_autograd_hooks(self) -> None:
        """Be called for gradients no more."""
        _remove(self._handles)

    def update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Reduce over another group from now on."""
        self.group = Collectives(new_process_group)

    def reset_state(self) -> None:
        """Forget an iteration that failed; buckets are made anew after the next one."""
        self._reset()
        self.rebuilt = False
        if self.finds_unused and self.used is not None:
            self.used.reset()

    # torch's names in Python of the methods above
    _rebuild_buckets = rebuild_buckets
    _run_comm_hook = run_comm_hook
    _run_allreduce_hook = run_allreduce_hook
    _set_static_graph = set_static_graph
    _delay_all_reduce = delay_all_reduce
    _ddp_graph_static = ddp_graph_static
    _set_forward_pass_work_handle = set_forward_pass_work_handle
    _set_mixed_precision_param_dtype = set_mixed_precision_param_dtype
    _set_optimizer_in_backward = set_optimizer_in_backward
    _set_sparse_metadata = set_sparse_metadata
    _set_ddp_runtime_logging_sample_rate = set_runtime_logging_sample_rate
    _install_post_backward_futures = install_futures
    _get_zeros_like_grad_buckets = get_grad_buckets
    _get_local_used_map = get_local_used_map_on_device
    _push_all_rebuilt_params = push_rebuilt_params_for_all_indices
    _remove_autograd_hooks = remove_autograd_hooks
    _check_reducer_finalized = check_finalized
    _update_process_group = update_process_group
    _reset_state = reset_state


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
