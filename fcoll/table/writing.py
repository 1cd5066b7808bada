"""The forms that write to an argument: in place (``all_reduce_``) and into ``out``.

What they send is what their functional row sends, so that is where all but the writing comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fcoll.errors import NoGradient
from fcoll.groups import by_name as group_named
from fcoll.reductions import REDUCTIONS
from fcoll.table.checks import check_out
from fcoll.table.gather import ALL_GATHER_INTO_TENSOR, BROADCAST, run_all_gather
from fcoll.table.lists import ALL_REDUCE_COALESCED, all_reduce_into
from fcoll.table.reduce import ALL_REDUCE, REDUCE_SCATTER_TENSOR, run_reduce_scatter
from fcoll.table.row import Call, Collective, Native, by_name
from fcoll.transport.carriers import carrier_of, issued
from fcoll.transport.protocol import Started


def _no_gradient(grad: object, a: Call) -> Tensor:
    hint = f"Use {a.functional}, which returns a new tensor."
    raise NoGradient(op=a.op, why="it overwrites its argument", hint=hint)


def _writing(row: Collective, name: str, schema: str, run: Any) -> Collective:
    form = replace(
        row,
        name=name,
        schema=schema,
        adjoint=_no_gradient,
        saves=None,
        functional=row.name,
        targets=(f"_c10d_functional::{name}",),
        native=Native(),
    )
    return replace(form, run=by_name(form, run))


def _arguments(row: Collective) -> str:
    """The text of the schema's arguments up to the group's name: all that torch's forms have."""
    return row.schema.partition("str group_name")[0][1:] + "str group_name"


def _in_place(row: Collective, run: Callable[..., Any]) -> Collective:
    """The row that overwrites its first argument with the result."""
    kind, _, rest = _arguments(row).partition(" ")
    return _writing(row, f"{row.name}_", f"({kind}(a!) {rest}) -> {kind}(a!)", run)


def _out(row: Collective, run: Callable[..., Any]) -> Collective:
    """The row that writes the result, along the first dim, into ``out``."""
    schema = f"({_arguments(row)}, *, Tensor(a!) out) -> Tensor(a!)"
    form = _writing(row, f"{row.name}_out", schema, run)

    def check(*args: Any, out: Tensor) -> None:
        row.check(*args, op=form.name)
        check_out(form.name, out, row.shape(*args), args[0])

    return replace(form, check=check, own_dim=None)


def _on_itself(x: Tensor, start: Callable[[Tensor], Started]) -> Tensor:
    """Start a collective on x itself, or on a contiguous copy that is copied back at the wait."""
    if x.is_contiguous():
        return issued(x, *start(x))
    buf = x.clone(memory_format=torch.contiguous_format)
    work, finish = start(buf)

    def fill() -> None:
        if finish:
            finish()
        x.data.copy_(buf)

    return issued(x, work, fill)


def _run_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    g = group_named(group_name)
    if g.n == 1:
        return input
    carrier, reduction = carrier_of(g, input.device), REDUCTIONS[reduce_op]
    return _on_itself(input, lambda buf: carrier.all_reduce_(buf, reduction, g))


def _run_all_reduce_coalesced_(
    inputs: Sequence[Tensor], reduce_op: str, group_name: str
) -> Sequence[Tensor]:
    all_reduce_into(inputs, inputs, reduce_op, group_named(group_name))
    return inputs


def _run_broadcast_(input: Tensor, src: int, group_name: str) -> Tensor:
    g = group_named(group_name)
    if g.n == 1:
        return input
    carrier = carrier_of(g, input.device)
    return _on_itself(input, lambda buf: (carrier.broadcast_(buf, src, g), None))


ROWS = (
    _in_place(ALL_REDUCE, _run_all_reduce_),
    _in_place(ALL_REDUCE_COALESCED, _run_all_reduce_coalesced_),
    _in_place(BROADCAST, _run_broadcast_),
    _out(ALL_GATHER_INTO_TENSOR, run_all_gather),
    _out(REDUCE_SCATTER_TENSOR, run_reduce_scatter),
)
