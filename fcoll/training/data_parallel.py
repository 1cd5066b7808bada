"""DataParallel: a module whose gradients are averaged over a group, in eager and compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from fcoll.errors import BadCommHook, JoinCompiled, UnknownGroup, fail
from fcoll.functions import all_reduce, broadcast, wait_tensor
from fcoll.groups import Group, GroupLike, resolve
from fcoll.training import _torch, tags
from fcoll.training.assignment import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    compute_bucket_assignment_by_size,
)
from fcoll.training.averaged import averaged, in_one_message
from fcoll.training.overrides import serving
from fcoll.training.parameter_check import verify_params_across_processes
from fcoll.training.reducer import Reducer
from fcoll.transport.acceleration import Acceleration

FunctionalHook = Callable[[Tensor], Tensor]


def accelerate_ddp() -> Acceleration:
    """Have torch's DistributedDataParallel run on :class:`fcoll.Reducer`: the same options, comm
    hooks and results.

    Models that are wrapped while it is in force keep it; all ranks must do it.

    >>> with fcoll.accelerate_ddp():
    ...     ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    >>> type(ddp.reducer) is fcoll.Reducer
    True
    """
    names = ExitStack()
    names.enter_context(_torch.replaced_in_dist({"Reducer": Reducer}))
    return Acceleration(names.close)


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of the forward and backward pass, of the messages, and of floating buffers.

    Parameters, their gradients and the optimizer stay as they are.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class DataParallel(DistributedDataParallel):
    """Averages the gradients of a module over a group while the backward pass runs.

    It is torch's DistributedDataParallel on :class:`fcoll.Reducer`: its options, ``no_sync()``,
    ``join()``, ``register_comm_hook``, state dicts with the prefix ``module.``. Besides:

    - ``torch.compile(..., fullgraph=True)`` takes it, alone or inside a step. Then the all-reduces
      are functional collectives of the compiled backward, one for each bucket of ``bucket_cap_mb``
      (the first of 1 MiB), wherever graphs are cut.
    - ``group`` is anything that names a group.
    - ``comm_hook`` is a function from the flat gradients of a bucket to the reduced ones, and
      traces: ``lambda x: fcoll.all_reduce(x.bfloat16(), "avg", group).to(x.dtype)``.
    - ``mixed_precision`` is a dtype, or a MixedPrecision; it runs on any device.
    - ranks whose parameters differ all raise, with the parameter's name, before anything is sent.

    Compiled, a parameter that the loss does not use gets the gradient zero; with
    ``find_unused_parameters`` or ``static_graph`` it stays None, and each gradient is a message of
    its own. All ranks must then take the same branches. Hooks of torch's kind and ``join()`` are
    for eager.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...>
    >>> model = fcoll.DataParallel(torch.nn.Linear(2, 2))
    >>> model(torch.ones(1, 2) * (rank + 1)).sum().backward()
    >>> bool((model.module.weight.grad == (n + 1) / 2).all())
    True
    """

    def __init__(
        self,
        module: nn.Module,
        group: GroupLike = None,
        *,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
        mixed_precision: MixedPrecision | torch.dtype | None = None,
        comm_hook: FunctionalHook | None = None,
        init_sync: bool = True,
        process_group: GroupLike = None,
        **options: Any,
    ) -> None:
        resolved = _one_of(group, process_group)
        number = tags.UNKNOWN
        if init_sync:
            compared = {
                "broadcast_buffers": broadcast_buffers,
                "find_unused_parameters": find_unused_parameters,
                "static_graph": static_graph,
                "bucket_cap_mb": bucket_cap_mb,
            }
            number = _verify(module, resolved.pg, compared)
        if not broadcast_buffers:
            options[_NOT_SYNCED] = False
        with serving(Reducer):
            super().__init__(
                module,
                process_group=resolved.pg,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                gradient_as_bucket_view=gradient_as_bucket_view and not _is_nested(module),
                bucket_cap_mb=bucket_cap_mb,
                init_sync=init_sync,
                **options,
            )
        self.group_name = resolved.name
        self.mixed = _precision(mixed_precision)
        self.comm_hook = comm_hook
        self._eager_hook = False
        self._carries = False
        self._alone = find_unused_parameters or static_graph
        cap = BUCKET_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * (1 << 20))
        self._caps = cap, cap if bucket_cap_mb else FIRST_BUCKET_BYTES
        self._set_up_reducer(number)
        if self.mixed.buffer_dtype is not None:
            _cast_buffers(module, self.mixed.buffer_dtype)

    # -- its reducer ------------------------------------------------------------------------------

    def _set_up_reducer(self, number: int) -> None:
        """Configure a reducer that torch has just made: our settings, and this module's hooks."""
        self.reducer.warns_of_late = True
        self.reducer.set_number(number)
        if self.comm_hook is not None or self.mixed.reduce_dtype is not None:
            self.reducer.register_functional_hook(self._reduce)
        sharing = tags.sharing(self.reducer.params)
        if len(sharing) > 1:  # it is inside of another one, or wrapped twice
            for reducer in sharing:
                reducer.stop_sharing()
        ignored = self.parameters_to_ignore
        named = self.module.named_parameters()
        self._frozen = [p for n, p in named if not p.requires_grad and n not in ignored]
        self._was_cast = False
        self._compiled_buckets = self._planned(*self._caps)

    def _renew_reducer(self) -> None:
        """Parameters were cast, or are no longer frozen: reduce what there is now."""
        self.reducer.check_finalized()
        number = self.reducer.number
        with serving(Reducer):
            _torch.make_reducer(self)
        self._start_over(number)

    def _start_over(self, number: int) -> None:
        """With another reducer than the one before: as in the first iteration, with its hooks."""
        self._set_up_reducer(number)
        self._has_rebuilt_buckets = False
        self._static_graph_delay_allreduce_enqueued = False
        for hook, state in self._comm_hooks:
            self.reducer.register_comm_hook(state, hook)

    def _is_outdated(self) -> bool:
        cast = self.reducer.arrivals.changed() >= 0 or (
            self._was_cast and self.reducer.has_other_nodes()
        )
        self._was_cast = False
        return cast or any(p.requires_grad for p in self._frozen)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._was_cast = True  # by double() and the like; it may have changed nothing
        return super()._apply(fn, recurse)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy (``copy.deepcopy``, ``torch.load``) has a reducer of its own, and the hooks."""
        with serving(Reducer):
            super().__setstate__(state)
        self._start_over(tags.UNKNOWN)

    def _planned(self, cap: int, first: int) -> tuple[tuple[str, ...], ...]:
        """The names of each bucket's parameters for a compiled step, those used last first."""
        ignored = self.parameters_to_ignore
        params = {
            name: p
            for name, p in self.module.named_parameters()
            if p.requires_grad and name not in ignored
        }
        names = list(params)[::-1]
        if self._alone or not names:
            return tuple((name,) for name in names)
        tensors = [params[name] for name in names]
        indices, _ = compute_bucket_assignment_by_size(tensors, [first, cap])
        return tuple(tuple(names[i] for i in members) for members in indices)

    # -- both ways --------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's, of this rank's inputs."""
        if torch.compiler.is_compiling():
            return self._compiled_forward(inputs, kwargs)
        if self._is_outdated():
            self._renew_reducer()
        self.reducer.arrivals.late = False  # gradients of this pass, wherever they are to go
        return super().forward(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer.watch(_torch.tensors_of(output))
        return output

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.mixed.param_dtype is None:
            return super()._run_ddp_forward(*inputs, **kwargs)
        return self._call(dict(self.module.named_parameters()), inputs, kwargs)

    def _call(self, params: dict[str, Tensor], inputs: Any, kwargs: Any) -> Any:
        """The module with these parameters, in the dtype of the forward pass."""
        dtype = self.mixed.param_dtype
        if dtype is not None:
            params = {name: _cast(p, dtype) for name, p in params.items()}
            inputs = tree_map_only(Tensor, lambda x: _cast(x, dtype), inputs)
            kwargs = tree_map_only(Tensor, lambda x: _cast(x, dtype), kwargs)
        return functional_call(self.module, params, inputs, kwargs)

    def _reduce(self, flat: Tensor) -> Tensor:
        """The mean of a bucket over the ranks, or what the hook makes of it."""
        narrow = flat if self.mixed.reduce_dtype is None else flat.to(self.mixed.reduce_dtype)
        if self.comm_hook is not None:
            reduced = self.comm_hook(narrow)
        else:
            reduced = all_reduce(narrow, "avg", self.group_name)
        return reduced if reduced.dtype == flat.dtype else wait_tensor(reduced).to(flat.dtype)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have ``hook(state, bucket) -> Future[Tensor]`` reduce the buckets, in eager."""
        super().register_comm_hook(state, hook)
        self._eager_hook = True

    def _check_comm_hook(self, hook: Any) -> None:
        """torch's check; but bf16 is not for GPUs alone, and an argument must be named bucket."""
        if callable(hook) and "bucket" not in inspect.signature(hook).parameters:
            fail(
                BadCommHook,
                why=f"{getattr(hook, '__name__', 'the hook')} has no argument named bucket",
                hint="Write hook(state, bucket) -> torch.futures.Future[torch.Tensor].",
            )
        if getattr(hook, "__name__", "") not in _BF16_HOOKS:
            super()._check_comm_hook(hook)

    # -- compiled ---------------------------------------------------------------------------------

    def _compiled_forward(self, inputs: Any, kwargs: Any) -> Any:
        if self._join_config.enable:
            hint = "Call the module itself inside join(), or give all ranks as many inputs."
            fail(JoinCompiled, hint=hint)
        if self._eager_hook:
            fail(
                BadCommHook,
                why="a communication hook with futures cannot be compiled",
                hint="Pass comm_hook=, a function from tensor to tensor.",
            )
        params = dict(self.module.named_parameters())
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._sync_buffers_in_graph()
            # the engine runs the node that was made last first, and the first bucket is to be first
            for names in reversed(self._compiled_buckets):
                members = [params[name] for name in names]
                carried = [_taken_gradient(p) for p in members] if self._carries else []
                synced = averaged(members, hook=self._reduce, carried=carried)
                params.update(zip(names, synced, strict=True))
            self._carries = False
        elif torch.is_grad_enabled():
            self._carries = True  # gradients of this rank alone, until the next message
        return self._call(params, inputs, kwargs)

    def _sync_buffers_in_graph(self) -> None:
        """Rank 0's buffers on all ranks, a message for each dtype."""
        if not self.forward_sync_buffers:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name, buffer in self.module.named_buffers():
            if name not in self.parameters_to_ignore:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in by_dtype.values():
                rank0s = in_one_message(buffers, lambda x: broadcast(x, 0, self.group_name))
                for buffer, source in zip(buffers, rank0s, strict=True):
                    buffer.copy_(source)


_BF16_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")

# torch 2.13 renamed broadcast_buffers, which still goes but warns
_NOT_SYNCED = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def _one_of(group: GroupLike, process_group: GroupLike) -> Group:
    """The group of two arguments that mean the same."""
    if group is None or process_group is None:
        return resolve(process_group if group is None else group)
    one, other = resolve(group), resolve(process_group)
    if one.name != other.name:
        both = f"that is both {one.name!r} (group=) and {other.name!r} (process_group=)"
        raise UnknownGroup(group=both, hint="They are one argument: pass one of them. ")
    return one


def _is_nested(module: nn.Module) -> bool:
    return any(isinstance(inner, DistributedDataParallel) for inner in module.modules())


def _verify(module: nn.Module, pg: Any, options: dict[str, Any]) -> int:
    """Have the ranks the same model and options? A number for the reducer on which they agree."""
    ignored: Sequence[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad and n not in ignored]
    if not named:
        return tags.UNKNOWN
    names, params = zip(*named, strict=True)
    return verify_params_across_processes(pg, params, names=names, options=options)


def _precision(value: Any) -> MixedPrecision:
    if isinstance(value, torch.dtype):
        return MixedPrecision(value, None, value)
    if value is None:
        return MixedPrecision()
    return MixedPrecision(value.param_dtype, value.reduce_dtype, value.buffer_dtype)


def _taken_gradient(p: Tensor) -> Tensor:
    """The gradient that a parameter has, which the next one will contain."""
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    p.grad = None
    return grad


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.to(dtype)
