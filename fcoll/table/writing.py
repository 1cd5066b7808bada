"""The forms that write to an argument: in place (``all_reduce_``) and into ``out``.

What they send is what their functional row sends, so that is where checks, costs and the rest
come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fcoll.errors import NoGradient
from fcoll.groups import by_name
from fcoll.reductions import REDUCTIONS
from fcoll.table.checks import check_out
from fcoll.table.gather import (
    ALL_GATHER_INTO_TENSOR,
    BROADCAST,
    all_gather_into,
    check_all_gather,
)
from fcoll.table.layout import copied
from fcoll.table.reduce import (
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    REDUCE_SCATTER_TENSOR,
    all_reduce_list,
    check_reduce_scatter,
    reduce_scatter_into,
)
from fcoll.table.row import Call, Collective, Native
from fcoll.table.shapes import gathered, scattered
from fcoll.transport.carriers import carrier_of
from fcoll.transport.protocol import Started, issued


def _no_gradient(grad: object, a: Call) -> Tensor:
    hint = f"Use {a.functional}, which returns a new tensor."
    raise NoGradient(op=a.op, why="it overwrites its argument", hint=hint)


def _writing(row: Collective, name: str, schema: str, run: Any, **changes: Any) -> Collective:
    """The row that does what ``row`` does and writes the result into an argument."""
    return replace(
        row,
        name=name,
        schema=schema,
        run=run,
        adjoint=_no_gradient,
        saves=None,
        functional=row.name,
        targets=(f"_c10d_functional::{name}",),
        native=Native(),
        **changes,
    )


def _in_place(x: Tensor, start: Callable[[Tensor], Started]) -> Tensor:
    """Start a collective on x itself, or on a contiguous copy that is copied back at the wait."""
    if x.is_contiguous():
        return issued(x, *start(x))
    buf = copied(x)
    work, finish = start(buf)

    def fill() -> None:
        if finish:
            finish()
        x.data.copy_(buf)

    return issued(x, work, fill)


# -- all_reduce_ ---


def _run_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    g = by_name(group_name)
    if g.n == 1:
        return input
    carrier, reduction = carrier_of(g, input.device), REDUCTIONS[reduce_op]
    return _in_place(input, lambda buf: carrier.all_reduce_(buf, reduction, g))


ALL_REDUCE_ = _writing(
    ALL_REDUCE,
    "all_reduce_",
    "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
    _run_all_reduce_,
)


# -- all_reduce_coalesced_ ---


def _run_all_reduce_coalesced_(
    inputs: Sequence[Tensor], reduce_op: str, group_name: str
) -> Sequence[Tensor]:
    all_reduce_list(inputs, inputs, reduce_op, by_name(group_name))
    return inputs


ALL_REDUCE_COALESCED_ = _writing(
    ALL_REDUCE_COALESCED,
    "all_reduce_coalesced_",
    "(Tensor[](a!) inputs, str reduce_op, str group_name) -> Tensor[](a!)",
    _run_all_reduce_coalesced_,
)


# -- broadcast_ ---


def _run_broadcast_(input: Tensor, src: int, group_name: str) -> Tensor:
    g = by_name(group_name)
    if g.n == 1:
        return input
    carrier = carrier_of(g, input.device)
    return _in_place(input, lambda buf: (carrier.broadcast_(buf, src, g), None))


BROADCAST_ = _writing(
    BROADCAST,
    "broadcast_",
    "(Tensor(a!) input, int src, str group_name) -> Tensor(a!)",
    _run_broadcast_,
)


# -- all_gather_into_tensor_out ---


def _check_all_gather_out(input: Tensor, group_size: int, group_name: str, *, out: Tensor) -> None:
    op = "all_gather_into_tensor_out"
    check_all_gather(input, group_size, group_name, op=op)
    check_out(op, out, gathered(input, group_size), input)


def _run_all_gather_out(input: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    return all_gather_into(out, input, by_name(group_name))


ALL_GATHER_INTO_TENSOR_OUT = _writing(
    ALL_GATHER_INTO_TENSOR,
    "all_gather_into_tensor_out",
    "(Tensor input, int group_size, str group_name, *, Tensor(a!) out) -> Tensor(a!)",
    _run_all_gather_out,
    check=_check_all_gather_out,
    shape=lambda input, n, group_name, *, out: gathered(input, n),
    own_dim=None,
)


# -- reduce_scatter_tensor_out ---


def _check_reduce_scatter_out(
    input: Tensor, reduce_op: str, group_size: int, group_name: str, *, out: Tensor
) -> None:
    op = "reduce_scatter_tensor_out"
    check_reduce_scatter(input, reduce_op, group_size, group_name, op=op)
    check_out(op, out, scattered(input, group_size, group_name), input)


def _run_reduce_scatter_out(
    input: Tensor, reduce_op: str, group_size: int, group_name: str, *, out: Tensor
) -> Tensor:
    return reduce_scatter_into(out, input, reduce_op, by_name(group_name))


REDUCE_SCATTER_TENSOR_OUT = _writing(
    REDUCE_SCATTER_TENSOR,
    "reduce_scatter_tensor_out",
    "(Tensor input, str reduce_op, int group_size, str group_name, *, Tensor(a!) out)"
    " -> Tensor(a!)",
    _run_reduce_scatter_out,
    check=_check_reduce_scatter_out,
    shape=lambda input, reduce_op, n, group_name, *, out: scattered(input, n, group_name),
)

ROWS = (
    ALL_REDUCE_,
    ALL_REDUCE_COALESCED_,
    BROADCAST_,
    ALL_GATHER_INTO_TENSOR_OUT,
    REDUCE_SCATTER_TENSOR_OUT,
)
