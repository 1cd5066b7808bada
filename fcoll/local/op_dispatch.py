"""Dispatch of every op on LocalTensors, and of every op in a LocalTensorMode."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from fcoll.local import mesh, over_ranks
from fcoll.local.errors import MixedRanks
from fcoll.local.scan import Seen, scan

if TYPE_CHECKING:
    from fcoll.local.mode import LocalTensorMode

aten = torch.ops.aten
_inside = threading.local()
_COLLECTIVES = ("c10d", "fcoll", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


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
        from fcoll.local import row_calls  # not at import: this may be served early

        run = row_calls.run_c10d if func.namespace == "c10d" else row_calls.run_op
        return run(func, args, kwargs)
    return over_ranks.run(func, args, kwargs, seen, order)


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
