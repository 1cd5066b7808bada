"""The lowering of every row, derived from what the row says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fcoll.table.collectives import functional_row
from fcoll.table.reduce import ALL_REDUCE
from fcoll.table.row import Collective
from inductor_ext import _torch
from inductor_ext._torch import V, ir, lowering
from inductor_ext.choice import choice_of
from inductor_ext.lower import cuda, one_shot
from inductor_ext.lower.registry import Lower, stock, stock_wait
from inductor_ext.lowered import note
from inductor_ext.state import current, in_order
from inductor_ext.stock.inductor import collective_kernel, last_kernel


def lowering_for(row: Collective) -> Lower:
    """The lowering of a row: read in place, where it has such a form and the passes chose it, else
    the kernel that eager runs."""
    if row.is_wait:
        return _wait
    if row.mutates:
        return _writing(row)
    tries = [_read_in_place] if row.native.arena else []
    if row is ALL_REDUCE:
        tries.append(_on_cuda)

    def lower(*args: Any, **kwargs: Any) -> Any:
        for attempt in tries:
            if (result := attempt(row, args, kwargs)) is not None:
                return result
        return _kernel(row, *args, **kwargs)

    return lower


def _kernel(row: Collective, *args: Any, **kwargs: Any) -> Any:
    out = collective_kernel(row, *args, **kwargs)
    _noted()
    return out


def _noted() -> Any:
    """Have the last kernel, of Inductor's own, write the line about itself before its code."""
    kernel = last_kernel()
    line, codegen = note(V.graph.current_node), kernel.codegen

    def noted(wrapper: Any) -> None:
        wrapper.writeline(wrapper.comment + line)
        codegen(wrapper)

    kernel.codegen = noted
    return kernel


# -- read in place ---


def _read_in_place(row: Collective, args: Any, kwargs: Any) -> Any:
    """A collective whose parts are read where they lie, or None if it is done by its kernel."""
    choice = choice_of(V.graph.current_node)
    if choice is None or choice.form not in one_shot.FORMS:
        return None
    named = dict(zip(row.position, args, strict=False)) | kwargs
    reading = one_shot.InPlaceCall(
        row, named.get("reduce_op", ""), named["group_name"], named.get("dim", 0)
    )
    return one_shot.FORMS[choice.form](reading, named["input"])


def _wait(x: Any) -> Any:
    name = x.get_name() if isinstance(x, ir.TensorBox) else ""
    state = current()
    if name in state.complete:
        state.complete.discard(name)
        return x
    started = state.announced.pop(name, None)
    return one_shot.collect(started) if started else stock_wait(x)


# -- in-place and out forms ---


def _writing(row: Collective) -> Callable[..., Any]:
    """A row that writes to its argument or to ``out``: the collective as a value, waited for, and
    the value written."""
    functional = functional_row(row)

    def lower(x: Any, *args: Any, out: Any = None) -> Any:
        values = collective_kernel(functional, x, *args)
        targets = x if out is None else out
        pairs = zip(targets, values, strict=True) if row.on_lists else [(targets, values)]
        for target, value in pairs:
            lowering.mutate_to(target, stock_wait(value))
        return targets

    return lower


# -- on CUDA ---


def _on_cuda(row: Collective, args: Any, kwargs: Any) -> Any:
    named = dict(zip(row.position, args, strict=False)) | kwargs
    return _by_triton(named["input"], named["reduce_op"], named["group_name"])


def _by_triton(x: Any, reduce_op: str, group_name: str) -> Any:
    """An all-reduce by a Triton kernel, or None if x is elsewhere or it is left to others.

    Only in graphs that the passes have seen: the keys of caches have what decides it for those.
    """
    planned = choice_of(V.graph.current_node) is not None and isinstance(group_name, str)
    result = cuda.all_reduce(x, reduce_op, group_name) if planned and _is_on_cuda(x) else None
    if result is not None:
        in_order(_noted())
        current().complete.add(result.get_name())
    return result


def _is_on_cuda(x: Any) -> bool:
    return x.get_device().type == "cuda"


# torch's own all-reduces, where the passes have left them to stock Inductor: on CUDA the group may
# have symmetric memory where it has none of fcoll's.


def _torchs_all_reduce(x: Any, reduce_op: str, group_name: str) -> Any:
    result = _by_triton(x, reduce_op, group_name)
    return result or _stock_all_reduce(_torch.all_reduce, x, reduce_op, group_name)


def _torchs_all_reduce_(x: Any, reduce_op: str, group_name: str) -> Any:
    result = _by_triton(x, reduce_op, group_name)
    if result is None:
        return _stock_all_reduce(_torch.all_reduce_, x, reduce_op, group_name)
    lowering.mutate_to(x, result)
    current().complete.add(x.get_name())
    return x


def _stock_all_reduce(op: Any, x: Any, reduce_op: str, group_name: str) -> Any:
    return torchs_own(op)(x, reduce_op, group_name)


def torchs_own(op: Any) -> Lower:
    """What stock Inductor makes of one of torch's collectives, with the line about it."""

    def lower(*args: Any, **kwargs: Any) -> Any:
        result = stock(op)(*args, **kwargs)
        if choice_of(V.graph.current_node) is not None:
            _noted()
        return result

    return lower


#: Lowerings of torch's own ops.
TORCHS = {_torch.all_reduce: _torchs_all_reduce, _torch.all_reduce_: _torchs_all_reduce_}
