"""Dispatch of every op on LocalTensors, and of every op in a LocalTensorMode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fcoll.local import _torch, mesh
from fcoll.local.call_arguments import Seen, scan
from fcoll.local.elementwise import NotStackable
from fcoll.local.errors import MixedRanks
from fcoll.local.op_by_rank import Order, by_rank, combine, without_tensors
from fcoll.local.op_kinds import kind
from fcoll.local.op_on_stack import on_stack

if TYPE_CHECKING:
    from fcoll.local.mode import LocalTensorMode

aten = torch.ops.aten
_inside = threading.local()
_COLLECTIVES = ("c10d", "fcoll", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# What a call on stacks may raise though the ranks' own calls are right, or wrong in other words: it
# cannot be made so, or torch has no such kernel, or complains of the stack's shapes. Anything else
# is a defect of this package and must be seen.
_NOT_ON_STACKS = (NotStackable, RuntimeError, IndexError, ValueError, TypeError)


def dispatch(func: Any, args: Any, kwargs: dict[str, Any], mode: LocalTensorMode | None) -> Any:
    """What ``__torch_dispatch__`` does; ``mode`` is None if none is active."""
    seen = scan(args, kwargs)
    if seen.foreign:
        return NotImplemented
    inside = getattr(_inside, "now", False)
    if inside and not seen.locals:  # an outer mode sees the calls that an inner one makes
        return func(*args, **kwargs)
    enabled = mode is not None and not mode._disable
    if enabled and func.namespace == "device_mesh":
        return mesh.runtime_coordinate(func, args, kwargs, mode)
    if not seen.locals and (not enabled or seen.tensors):
        return func(*args, **kwargs)
    if func.namespace == "profiler":
        return func(*args, **kwargs)
    _inside.now = True
    try:
        return _for_all_ranks(func, args, kwargs, seen, _order(seen, mode))
    finally:
        _inside.now = inside


def _for_all_ranks(func: Any, args: Any, kwargs: Any, seen: Seen, order: tuple[int, ...]) -> Any:
    if func.namespace == "aten":
        if (uneven := _UNEVEN.get(func.overloadpacket)) and args[0]._uneven is not None:
            return uneven(*args)
    elif func.namespace in _COLLECTIVES:
        from fcoll.local import collective_calls  # not at import: this may be served early

        run = collective_calls.run_c10d if func.namespace == "c10d" else collective_calls.run_op
        return run(func, args, kwargs)
    return _run(func, args, kwargs, seen, order)


def _run(func: Any, args: Any, kwargs: dict[str, Any], seen: Seen, order: Order) -> Any:
    """The op for every rank of ``order``; ``seen`` is what its arguments hold."""
    how = kind(func)
    if special := _SPECIAL.get(func):
        result = special(args, kwargs, order)
        if result is not None:
            return result
    if how.way != "loop" and not seen.local_ints and seen.locals:
        try:
            return on_stack(func, args, kwargs, seen, order, how)
        except _NOT_ON_STACKS:
            pass  # the loop runs it, or says what is wrong in one rank's shapes
    if not seen.locals and not seen.local_ints:
        return without_tensors(func, args, kwargs, order, how)
    return by_rank(func, args, kwargs, order, how)


def _order(seen: Seen, mode: LocalTensorMode | None) -> tuple[int, ...]:
    """The ranks of a call: those of its tensors, or of the mode if it has none."""
    if not seen.locals:
        assert mode is not None
        return mode.order
    first = seen.locals[0]
    for other in seen.locals[1:]:
        if other._order != first._order:
            raise MixedRanks(first=list(first._order), other=list(other._order))
    if mode is not None and not first._ranks <= mode.ranks:
        raise MixedRanks(first=list(first._order), other=f"the mode's {sorted(mode.ranks)}")
    return first._order


def _ints(asked: list[Any]) -> list[int]:
    """Where C++ takes ints only: what differs between ranks says so."""
    return [int(i) for i in asked]


# What a wrapper with ints of each rank is asked for by torch itself. A LocalTensor has a layout
# if all ranks' tensors have it.
_UNEVEN = {
    aten.dim: lambda x: len(x._uneven[0]),
    aten.size: lambda x: _ints(x._uneven[0]),
    aten.sym_size: lambda x: list(x._uneven[0]),
    aten.stride: lambda x: _ints(x._uneven[1]),
    aten.sym_stride: lambda x: list(x._uneven[1]),
    **{
        asked: lambda x, *of, asked=asked: all(asked(t, *of) for t in x._parts.values())
        for asked in (
            aten.is_contiguous,
            aten.is_strides_like_format,
            aten.is_non_overlapping_and_dense,
        )
    },
}

# ---- ops with a shorter way


def _check_storage(args: Any, kwargs: dict[str, Any], order: tuple[int, ...]) -> None:
    """set_ to a storage: one of memory is the same for all ranks, a LocalTensor's is of none."""
    if not _torch.has_memory(args[1]):
        raise NotImplementedError(
            "set_: the storage of a LocalTensor has no memory. Pass the tensor: x.set_(y), or "
            "x.set_(y.as_strided(size, stride, storage_offset))."
        )


def _scalar(args: Any, kwargs: dict[str, Any], order: Order) -> Any:
    stack = args[0]._stack
    if stack is None:
        return None
    return combine(dict(zip(order, stack.reshape(-1).tolist(), strict=True)))


_SPECIAL: dict[Any, Callable[[Any, dict[str, Any], Order], Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.set_.source_Storage: _check_storage,
    aten.set_.source_Storage_storage_offset: _check_storage,
}
