"""Functions that run for each rank, or for the one rank of a real process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from fcoll.local import _torch, active_mode, rng
from fcoll.local.errors import BadCallback
from fcoll.local.local_tensor import LocalTensor, local
from fcoll.local.op_by_rank import combine, on_rank

P = ParamSpec("P")
R = TypeVar("R")


def maybe_run_for_local_tensor(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: in a LocalTensorMode, run the function for each rank and combine the results.

    LocalTensors and ints of ranks among the arguments become the rank's own, so the function may
    branch on them. Tensors are combined to LocalTensors, ints to ints of ranks; everything else
    must be the same on all ranks. It must have no side effects and make no collective calls.
    """

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        mode = active_mode.enabled_local_tensor_mode()
        if mode is None:
            return func(*args, **kwargs)
        with mode.disable():
            return _for_each_rank_run_func(func, mode.ranks, args, kwargs)

    return wrapper


def _for_each_rank_run_func(
    func: Callable[..., Any],
    ranks: frozenset[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    alias: bool = False,
) -> Any:
    """``func`` for each rank; a random function starts from the same state on all."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    wait = _torch.AsyncCollectiveTensor
    leaves = [v.wait() if isinstance(v, wait) else v for v in leaves]
    results, before = {}, rng.get_state()
    for r in sorted(ranks):
        rng.set_state(*before)
        given, named = pytree.tree_unflatten([on_rank(v, r) for v in leaves], spec)
        results[r] = func(*given, **named)
    return combine(results)


def rank_map(cb: Callable[[int], Tensor]) -> Tensor:
    """``cb(rank)``: of this process's rank, or in a LocalTensorMode of all, as a LocalTensor."""
    mode = active_mode.enabled_local_tensor_mode()
    return cb(dist.get_rank()) if mode is None else mode.rank_map(cb)


def tensor_map(tensor: Tensor, cb: Callable[[int, Tensor], Tensor | None]) -> Tensor:
    """``cb(rank, tensor)``: of this process's rank, or in a LocalTensorMode of all."""
    mode = active_mode.enabled_local_tensor_mode()
    if mode is not None:
        return mode.tensor_map(local(tensor, "tensor_map: its"), cb)
    found = cb(dist.get_rank(), tensor)
    if found is None:
        hint = "Return a tensor: only in a LocalTensorMode may a rank have none."
        raise BadCallback(what="tensor_map: the callback returned None", hint=hint)
    return found


def maybe_disable_local_tensor_mode() -> contextlib.AbstractContextManager[None]:
    """A context in which the LocalTensorMode, if there is one, is disabled."""
    mode = active_mode.local_tensor_mode()
    return mode.disable() if mode is not None else contextlib.nullcontext()


def reconcile_args(args: Any, kwargs: dict[str, Any] | None = None) -> Any:
    """(args, kwargs) with every LocalTensor replaced by the tensor that all ranks have."""
    return pytree.tree_map(
        lambda v: v.reconcile() if isinstance(v, LocalTensor) else v, (args, kwargs or {})
    )
