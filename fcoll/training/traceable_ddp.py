"""torch's DistributedDataParallel in traces and fake worlds, on a reducer that can be traced.

A trace shows a step in the middle of training: buckets in the order in which gradients are
expected, those of the last layers first, and no check or broadcast of the first iterations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fcoll.training import _torch, backward_errors
from fcoll.training.assignment import compute_bucket_assignment_by_size
from fcoll.training.bucket_collectives import Collectives
from fcoll.training.logger import Logger
from fcoll.training.overrides import serving
from fcoll.training.reducer import Reducer


class Reducers:
    """The plugin (fcoll/plugins.py) by which a DistributedDataParallel can be traced."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, modules that are wrapped get a reducer that can be traced."""
        replaced = {
            "_verify_params_across_processes": _nothing,
            "_broadcast_coalesced": _broadcast_coalesced,
        }
        with serving(Reducer), _torch.replaced_in_dist(replaced):
            yield

    @contextmanager
    def traced(self, modules: Iterable[nn.Module], notes: list[str]) -> Iterator[None]:
        """``installed``, and modules that were wrapped before have one; notes say what its buckets
        hold."""
        wrapped = [m for m in modules if isinstance(m, DistributedDataParallel)]
        with ExitStack() as stack:
            stack.enter_context(self.installed())
            for module in wrapped:
                stack.enter_context(_on_a_new_reducer(module, notes))
            yield


def _nothing(*_: Any) -> None:
    """Without data there is nothing to compare."""


def _broadcast_coalesced(
    process_group: dist.ProcessGroup, tensors: Sequence[Tensor], buffer_size: int, src: int = 0
) -> None:
    """torch's, in Python: one message for the tensors of each dtype, up to a size."""
    group = Collectives(process_group)
    buckets, _ = compute_bucket_assignment_by_size(tensors, [buffer_size]) if tensors else ([], [])
    with torch.no_grad():
        for members in buckets:
            parts = [tensors[i] for i in members]
            flat = torch.cat([x.detach().reshape(-1) for x in parts])
            whole = group.broadcast_(flat, src)
            for x, part in zip(parts, whole.split([x.numel() for x in parts]), strict=True):
                x.copy_(part.view(x.shape))


@contextmanager
def _on_a_new_reducer(module: Any, notes: list[str]) -> Iterator[None]:
    """Inside, the module has a reducer for the tensors that it has now, as if after many steps."""
    before = dict(module.__dict__)
    old = before["reducer"]
    untouched = isinstance(old, Reducer) and not old.arrivals.seen()["begun"]
    static = bool(module.static_graph)
    module.__dict__.update(
        reducer=_like(module, static),
        static_graph=False,  # or it would reduce nothing before the first backward pass has ended
        find_unused_parameters=module.find_unused_parameters or static,
        _has_rebuilt_buckets=True,
    )
    reducer = module.reducer
    module.__dict__["logger"] = Logger(reducer)
    try:
        yield
        if reducer.arrivals.seen()["order"]:
            notes.extend(_notes(module, reducer))
    finally:
        for name in [name for name in module.__dict__ if name not in before]:
            del module.__dict__[name]
        module.__dict__.update(before)
        if untouched:  # its hooks were called too
            old.arrivals.disarm()


def _like(module: Any, static: bool) -> Reducer:
    """A reducer with the module's options, its buckets filled from the last parameter on."""
    params, sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(params)
    config = module._bucket_config
    caps = list(config.per_bucket_bytes_caps)
    caps = caps or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]
    order = list(range(len(params)))[::-1]
    indices, limits = compute_bucket_assignment_by_size(
        [params[i] for i in order], caps, sparse, order
    )
    reducer = Reducer(
        params,
        indices,
        limits,
        module.process_group,
        sparse,
        config.bucket_bytes_cap,
        find_unused_parameters=module.find_unused_parameters or static,
        param_to_name_mapping=names,
        gradient_as_bucket_view=module.gradient_as_bucket_view,
        skip_all_reduce_unused_params=module.skip_all_reduce_unused_params,
    )
    reducer.rebuilt = True
    if static:
        reducer.used = None  # agreed on in the first iteration
    old = module.reducer
    if isinstance(old, Reducer):
        reducer._hook = old._hook
        reducer._mixed_dtype = old._mixed_dtype
        reducer._optimizes = old._optimizes
    else:
        for hook, state in module._comm_hooks:
            reducer.register_comm_hook(state, hook)
    return reducer


def _notes(module: nn.Module, reducer: Reducer) -> Iterator[str]:
    kind = type(module).__name__
    for bucket in reducer.buckets:
        members = backward_errors.listed(bucket.members)
        yield f"{kind} {bucket.name}, {bucket.bytes} bytes: {members}"


REDUCERS = Reducers()
