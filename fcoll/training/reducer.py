"""Reducer: gradients are put into buckets as they become ready, and full buckets are reduced.

It has the constructor, the methods and the behaviour of ``torch.distributed.Reducer``, so that
torch's DistributedDataParallel can run on it: ``fcoll.accelerate_ddp()``. An iteration is

    prepare_for_forward -> forward pass -> prepare_for_backward(outputs) -> backward pass

in which arriving gradients are counted (``arrivals.py``). A bucket with all its gradients is sent
as soon as those before it were: on all ranks in the same order. When the backward pass ends the
results go back into the gradients.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from fcoll.errors import (
    BadBuckets,
    BadGradient,
    FcollError,
    GraphChanged,
    ReadyTwice,
    ReductionUnfinished,
    ResetElsewhere,
    StaticGraphTooLate,
)
from fcoll.scheduling.buckets import Bucket as PlannedBucket
from fcoll.source import Frames, part, show, user_sites
from fcoll.training import _torch, backward_errors, comm_hooks, tags
from fcoll.training import bucket as buckets
from fcoll.training.arrivals import arrivals_of
from fcoll.training.assignment import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    agreed,
    in_ready_order,
    planned,
)
from fcoll.training.bucket import GradBucket, GradientBucket
from fcoll.training.bucket_collectives import Collectives, Started
from fcoll.training.overrides import install_overrides
from fcoll.training.reducer_settings import ReducerSettings
from fcoll.training.shared import put_into_shared_memory
from fcoll.training.statistics import Statistics
from fcoll.training.unused import UsedMap, gradient_accumulator, not_reached, warn_all_used

# Dynamo does not look into a reducer: it breaks the graph, as at torch's
_eager = torch.compiler.disable


class Reducer(ReducerSettings):
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
        lazy_bucket_allocation: bool = False,  # torch has it from 2.15 on
    ) -> None:
        if not params:
            raise BadBuckets(why="Expected at least one parameter", hint="Pass the parameters.")
        if lazy_bucket_allocation:
            warnings.warn(backward_errors.KEEPS_BUCKETS, stacklevel=2)
        install_overrides()
        super().__init__()
        self.params = list(params)
        self.group = Collectives(process_group)
        self.sparse = [*expect_sparse_gradients] or [False] * len(self.params)
        self.caps = list(bucket_bytes_cap_list) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self.bucket_bytes_cap = bucket_bytes_cap
        self.finds_unused = find_unused_parameters
        self.shares = gradient_as_bucket_view
        mapping = param_to_name_mapping or {}
        self.names = [mapping.get(i, f"parameter {i}") for i in range(len(self.params))]
        self.static_graph = False
        self.skips_unused = skip_all_reduce_unused_params
        self.warns_of_late = False  # torch's says nothing
        self.stats = Statistics()
        self._unused: list[int] = []
        self._triggered = [0] * len(self.params)  # hooks in the first iteration of a static graph
        self._reduced = 0  # backward passes
        self.used: UsedMap | None = None
        self._to_come: UsedMap | None = None
        if find_unused_parameters:
            self.used = UsedMap(len(self.params), self.params[0].device)
            if skip_all_reduce_unused_params:
                self._to_come = UsedMap(len(self.params), self.params[0].device)
        self._accumulators = [gradient_accumulator(p) for p in self.params]
        self._dtypes = [p.dtype for p in self.params]
        self._listen(use_python_reducer)
        self._reset()
        self.rebuilt = False
        self.initialize_buckets(bucket_indices)
        tags.register(self)

    def _listen(self, to_nothing: bool) -> None:
        """Listen to gradients. Their hooks know the reducer weakly: it goes when its owner does,
        and its hooks with it, so that another can take its place."""
        me = weakref.ref(self)

        def tell(event: int, index: int) -> None:
            reducer = me()
            if reducer is not None:
                tellers = (reducer._begin_pass, reducer._send_full, reducer._refuse, reducer._late)
                tellers[event](index)

        self.arrivals = arrivals_of(self.params, tell)
        if not to_nothing:
            self.arrivals.listen()
        weakref.finalize(self, self.arrivals.remove)

    def _reset(self) -> None:
        self._expects = False  # between prepare_for_backward and the end of the reduction
        self._unfinished = False  # a gradient was ready, the reduction has not ended
        self._reached: Frames | None = None  # the line of a backward pass that came to the module
        self._reduced += self.arrivals.disarm()
        self._divisor: float | None = None
        self._order: list[int] = []  # in which gradients became ready in the first iteration
        self.passes: list[Frames] = []  # the lines of this iteration's backward passes
        self._ended = 0  # of them

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
        real = not self.group.fake
        self._buckets = [buckets.make(b, self.params, self.sparse, real) for b in self.indices]
        put_into_shared_memory(self._buckets, self.group)
        self.set_number(self.number)
        bucket_of, views = [0] * len(self.params), [None] * len(self.params)
        for b, bucket in enumerate(self._buckets):
            for i, view in zip(bucket.indices, bucket.views, strict=True):
                bucket_of[i], views[i] = b, view
        named = [backward_errors.listed(self.names[i] for i in members) for members in self.indices]
        self._parts = [f"bucket_{b}: {names}" for b, names in enumerate(named)]
        self.arrivals.into(bucket_of, views, self.shares)
        if self.shares:
            for bucket in self._buckets:
                bucket.adopt()

    def stop_sharing(self) -> None:
        """Leave gradients where they are: others reduce some of them too, who would find in a
        bucket what was scaled for this one."""
        self.warns_of_late = False
        if self.shares:
            self.shares = False
            self.initialize_buckets(self.indices)

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
            names = backward_errors.listed(self.names[i] for i in sorted(missing))
            self._fail(
                BadBuckets(
                    why=f"{len(self._order)} gradients became ready for {len(self.params)} "
                    f"parameters; none came for {names or 'none'}",
                    hint="Run one backward pass for each forward pass.",
                )
            )
        indices = in_ready_order(self.params, self._order, self.caps, self.sparse)
        self.rebuilt = True
        self._order = []
        number = self.number or tags.proposed()
        indices, number = agreed(indices, number, self.group, self.params[0].device)
        self.number = self.number or number
        self.initialize_buckets(indices)
        return True

    def get_grad_buckets(self, return_zero_tensors: bool = True) -> list[GradBucket]:
        """The GradBucket that a comm hook would get of each bucket, in the order of reduction."""
        grad_buckets = []
        for i, b in enumerate(self._buckets):
            buffer = b.buffer
            if return_zero_tensors and b.sparse:
                buffer = torch.sparse_coo_tensor(size=b.sizes[0], dtype=buffer.dtype)
            elif return_zero_tensors:
                buffer = torch.zeros_like(buffer)
            grad_buckets.append(GradBucket(i, len(self._buckets), buffer, b.params, b.sizes))
        return grad_buckets

    # -- an iteration -----------------------------------------------------------------------------

    @_eager
    def prepare_for_forward(self) -> None:
        """A forward pass begins."""
        self._joining = False
        self.stats.forward()

    @_eager
    def prepare_for_backward(self, outputs: Sequence[Tensor] | Tensor = ()) -> None:
        """A forward pass gave these outputs, and gradients are to be reduced.

        Without this call they are only accumulated. Outputs are needed to find parameters that the
        backward pass will not reach.
        """
        _torch.note_this_thread()
        self.stats.mark("backward_start")
        self._expects = True
        for bucket in self._buckets:
            bucket.work = None
        self.passes.clear()
        self._ended = 0
        expected = list(self._triggered) if self.static_graph else [1] * len(self.params)
        members = [len(bucket.indices) for bucket in self._buckets]
        self.arrivals.arm(members, expected, not self._first_of_static)
        if self._mixed_dtype is None:
            self._check_dtypes()
        if self._graph_may_change:
            self._find_unused([outputs] if isinstance(outputs, Tensor) else outputs)

    def _check_dtypes(self) -> None:
        """A parameter of another dtype has another node in the graph, which has no hook of ours."""
        index = self.arrivals.changed()
        if index >= 0:
            hint = f"{self.names[index]} changed after the reducer was made: make it anew."
            want, got = self._dtypes[index], self.params[index].dtype
            self._fail(BadGradient(want=f"{want}", got=f"{got}", hint=hint))

    def has_other_nodes(self) -> bool:
        """Do gradients of some parameters go to other nodes than those that are listened to? They
        do after a change of dtype or device, and after a change back."""
        return [gradient_accumulator(p) for p in self.params] != self._accumulators

    @property
    def _graph_may_change(self) -> bool:
        return self.finds_unused and not self.static_graph

    @property
    def _first_of_static(self) -> bool:
        return self.static_graph and not self._reduced

    def _find_unused(self, outputs: Sequence[Tensor]) -> None:
        with _torch.shown_in_profiles("torch.distributed.ddp.reducer::search_unused_parameters"):
            before, self._unused = self._unused, not_reached(outputs, self._accumulators)
        if self.stats.iteration > 1:
            self.graph_is_static &= before == self._unused
        if not self._unused and self.used is not None:
            warn_all_used()

    def _begin_pass(self, index: int) -> None:
        """A backward pass has its first gradient. In the first pass of an iteration, parameters
        that it will not reach count as ready."""
        self.passes.append(user_sites())
        self._unfinished = True
        _torch.at_end_of_backward(self._end_pass)
        if len(self.passes) > 1:
            return
        if self._to_come is not None and self._graph_may_change and not self._joining:
            reached = [1] * len(self.params)
            for unused in self._unused:
                reached[unused] = 0
            self._to_come.start(self.group, reached)
        self.arrivals.scale = self._scale()
        self.arrivals.copies = _torch.nobody_watches()
        for unused in self._unused:
            self.arrivals.mark(unused)

    def _end_pass(self) -> None:
        """No exception has ended it."""
        self._ended += 1

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Note when a backward pass reaches a module's outputs: it may raise before there is
        any gradient of a parameter."""
        me = weakref.ref(self)

        @unserializable_hook  # whoever saves an output is not warned of it
        def reached(_: Tensor) -> None:
            reducer = me()
            if reducer is not None and reducer._expects and reducer._reached is None:
                reducer._reached = user_sites()
                _torch.at_end_of_backward(reducer._leave)

        for x in outputs:
            if x.grad_fn is not None:
                x.register_hook(reached)

    def _leave(self) -> None:
        """A backward pass that had reached the module has ended by itself."""
        self._reached = None

    def _line(self, number: int) -> str:
        """The line of a backward pass."""
        return show(*self.passes[number]) or "?"

    def _late(self, index: int) -> None:
        """A gradient came after all were reduced, and no forward pass since: it stays here."""
        warnings.warn(
            backward_errors.late(self.names[index], self._line(-1) if self.passes else ""),
            stacklevel=2,
        )

    def _scale(self) -> float:
        return 1.0 if self._hook else 1.0 / self._divide_factor()

    def _send_full(self, index: int) -> None:
        """A bucket is full, and those before it were sent."""
        if not index:
            self.stats.mark("comm_start")
        self._send(index)
        if index == len(self._buckets) - 1:
            if self._graph_may_change and self.used is not None:
                self.used.start(self.group, self.arrivals.seen()["used"])
            _torch.at_end_of_backward(self._end_backward)

    def _refuse(self, index: int) -> None:
        """A parameter got a gradient too many."""
        name = self.names[index]
        if self.static_graph:
            then = backward_errors.gradients(self._triggered[index])
            self._fail(GraphChanged(index=index, name=name, then=then))
        first = self._line(self.arrivals.seen()["ready_in"][index])
        unused = backward_errors.MARKED_UNUSED if index in self._unused else ""
        now = self._line(-1)
        self._fail(ReadyTwice(index=index, name=name, first=first, now=now, unused=unused))

    def _send(self, index: int) -> None:
        bucket = self._buckets[index]
        if self._skips(bucket):
            return
        try:
            with torch.no_grad(), part(self._parts[index]):
                if uncopied := self.arrivals.not_copied(index):
                    bucket.fill(self._scale(), self.shares, self._mixed_dtype, uncopied)
                if self.stats.iteration <= 1:
                    bucket.check_strides()
                if self._hook is None:
                    bucket.work = self._sum(index, bucket)
                else:
                    bucket.work = self._run_hook(self._grad_bucket(index, bucket))
        except (RuntimeError, FcollError) as error:
            under_way = [i for i in range(index) if self._buckets[i].work is not None]
            self._fail(error, [index, *under_way])

    def _skips(self, bucket: GradientBucket) -> bool:
        """Is it to be left out, on all ranks? A parameter that one of them uses is reduced."""
        used = self.used if self.static_graph else self._to_come
        if not self.skips_unused or self._joining or used is None:
            return False
        return all(used.unused(i) for i in bucket.indices)

    def _sum(self, index: int, bucket: GradientBucket) -> Started:
        if bucket.shared is not None and not self._joining:
            tag = self.tags[index].value
            if (started := bucket.shared.sum_(bucket.buffer, self.group, tag)) is not None:
                return started
            bucket.shared = None
        last = index == len(self._buckets) - 1  # it is waited for at once
        if bucket.tail is None or self._joining:
            return self.group.sum_(bucket.buffer, at_once=last)
        self.tags[index].write(bucket.tail)
        return self.group.sum_(bucket.message, at_once=last)

    def _run_hook(self, bucket: GradBucket) -> Any:
        assert self._hook is not None
        if not _torch.has_no_data(bucket.buffer()):
            return self._hook(bucket)
        with _torch.futures_with_tensors():
            return self._hook(bucket)

    def _grad_bucket(self, index: int, b: GradientBucket) -> GradBucket:
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
        self.stats.mark("backward_end")
        if self.should_rebuild_buckets():
            order = self.arrivals.seen()["order"]
            self._order = list(dict.fromkeys(reversed(order)))[::-1]  # by their last gradients
            self._order += self._unused if self.static_graph else []
        self._finalize()

    def _finalize(self) -> None:
        """Wait for all buckets and put the results into the gradients."""
        self._expects = self._unfinished = False
        self._reduced += self.arrivals.disarm()
        agrees = self.used is not None and (self.static_graph or self.finds_unused)
        for index, bucket in enumerate(self._buckets):
            work, bucket.work = bucket.work, None
            if work is None:
                continue
            keep = [self.used.unused(i) for i in bucket.indices] if agrees else []  # type: ignore[union-attr]
            try:
                with torch.no_grad(), part(self._parts[index]):
                    if self._hook is None:
                        result = self._gradients_in(work.wait(), index)
                    else:
                        result = comm_hooks.result_of(work)
                    own = result is bucket.buffer and not any(keep)
                    if not self._optimizes and not (own and self.arrivals.give_back(index)):
                        bucket.spread(result, self.shares, keep)
            except (RuntimeError, FcollError) as error:
                self._fail(error, [index])
        for future in self._futures:
            future.wait()
        self._futures = ()
        self._divisor = None
        if self.used is not None:
            self._forget_used() if self._graph_may_change else self.used.finish()
        self.arrivals.late = self.warns_of_late
        self.stats.mark("comm_end")

    def _forget_used(self) -> None:
        if self.used is not None:
            self.used.reset()
            self.arrivals.forget_used()
        if self._to_come is not None:
            self._to_come.reset()

    @_eager
    def delay_all_reduce(self) -> None:
        """Reduce all gradients now, at the end of the first backward pass of a static graph."""
        self.stats.mark("backward_end")
        self.stats.mark("comm_start")
        assert self.used is not None
        arrived = self.arrivals.seen()
        self.used.start(self.group, arrived["used"])
        for index in arrived["order"]:
            self._triggered[index] += 1
        self._unused = [i for i, n in enumerate(self._triggered) if not n]
        self._unfinished = True
        for index in range(len(self._buckets)):
            self._send(index)
        self._finalize()

    # -- errors -----------------------------------------------------------------------------------

    @_eager
    def check_finalized(self) -> None:
        """Raise if the reduction of the last iteration has not ended."""
        if not self._unfinished and self._reached is None:
            return
        missing = [i for i, n in enumerate(self.arrivals.seen()["ready_in"]) if n < 0]
        cause = backward_errors.unfinished(self, missing, self._raised_at())
        parameters = tuple(self.names[i] for i in missing)
        self._fail(ReductionUnfinished(cause=cause, parameters=parameters))

    def _raised_at(self) -> str:
        """The line of a backward pass that an exception has ended."""
        if self._ended < len(self.passes):
            return self._line(self._ended)
        return show(*self._reached) or "?" if self._reached is not None else ""

    # -- settings of iterations -------------------------------------------------------------------

    def set_static_graph(self) -> None:
        """Say that every iteration uses the same parameters, as often."""
        if self.stats.iteration:
            self._fail(StaticGraphTooLate())
        self.static_graph = True
        self.used = UsedMap(len(self.params), self.params[0].device)

    def push_rebuilt_params_for_all_indices(self) -> None:
        """On a rank that has joined: its order is any, rank 0's counts."""
        if self.should_rebuild_buckets() and not self._order:
            self._order = list(range(len(self.params)))

    def reset_state(self) -> None:
        """Forget an iteration that failed; buckets are made anew after the next one.

        All ranks meet here: if some have gone on to the next iteration, those that call it raise.
        """
        self._reset()
        met = self.group.sum_(torch.ones(3, dtype=torch.int64, device=self.params[0].device)).wait()
        if not _torch.has_no_data(met) and met.tolist() != [self.group.n] * 3:
            self._fail(ResetElsewhere())
        self.rebuilt = False
        if self.finds_unused:
            self._forget_used()
        if any(bucket.shared is not None for bucket in self._buckets):
            # what was under way may still be written to by peers: go on in other memory
            self.initialize_buckets(self.indices)

    # torch's names in Python of the methods above
    _rebuild_buckets = rebuild_buckets
    _set_static_graph = set_static_graph
    _delay_all_reduce = delay_all_reduce
    _get_zeros_like_grad_buckets = get_grad_buckets
    _push_all_rebuilt_params = push_rebuilt_params_for_all_indices
    _check_reducer_finalized = check_finalized
    _reset_state = reset_state
