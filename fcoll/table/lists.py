"""The forms on lists (``all_reduce_coalesced``): one message carries all tensors of a dtype.

Each tensor is checked, shaped, differentiated and stacked by the row of one tensor; only ``run``
stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.groups import Group
from fcoll.groups import by_name as group_named
from fcoll.reductions import REDUCTIONS
from fcoll.table.checks import check_list
from fcoll.table.gather import ALL_GATHER_INTO_TENSOR
from fcoll.table.layout import chunks
from fcoll.table.partition import Partition
from fcoll.table.reduce import ALL_REDUCE, REDUCE_SCATTER_TENSOR
from fcoll.table.row import Call, Collective, Native, Sizes, by_name, each, torch_ops
from fcoll.table.shapes import gathered
from fcoll.table.stacks import Args
from fcoll.transport.carriers import Then, carrier_of, issued
from fcoll.transport.protocol import Finish


def _coalesced(row: Collective, run: Callable[..., Any]) -> Collective:
    """The row on lists. ``dims`` are the single row's ``dim``, one for each tensor."""
    name = f"{row.name}_coalesced"

    def check(*args: Any) -> None:
        check_list(name, args[0], _dims(row, args))
        for call in _calls(row, args):
            row.check(*call, op=name)

    listed = replace(
        row,
        name=name,
        schema=_schema(row),
        check=check,
        shape=lambda *args: [row.shape(*call) for call in _calls(row, args)],
        adjoint=_adjoint(row),
        stacked=_stacked(row),
        uneven=None,
        own_dim=None,
        single=row.name,
        targets=torch_ops(name),
        native=Native(fast=("xs", *(row.native.fast or ())[1:])),
    )
    return replace(listed, run=by_name(listed, run))


def _schema(row: Collective) -> str:
    schema = row.schema.replace("Tensor input", "Tensor[] inputs")
    schema = schema.replace("int dim=0, SymInt[]? sizes=None", "int[]? dims=None")
    return schema.replace("-> Tensor", "-> Tensor[]")


def _dims(row: Collective, args: Sequence[Any]) -> Sizes:
    at = row.position.get("dim", len(args))
    return args[at] if at < len(args) else None


def _calls(row: Collective, args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The arguments of the single row's call for each tensor."""
    inputs, *rest = args
    if "dim" not in row.position:
        return [(x, *rest) for x in inputs]
    before = rest[: row.position["dim"] - 1]
    return [(x, *before, dim) for x, dim in with_dims(inputs, _dims(row, args))]


def with_dims(inputs: Sequence[Tensor], dims: Sizes) -> list[tuple[Tensor, int]]:
    """The tensors of a list, each with its dim: the first, if none are given."""
    return list(zip(inputs, dims if dims is not None else [0] * len(inputs), strict=True))


def _adjoint(row: Collective) -> Callable[[list[Tensor], Call], list[Tensor]]:
    """The single row's on lists: its collectives of lists are coalesced too."""

    def adjoint(grads: list[Tensor], a: Call) -> list[Tensor]:
        def call(name: str, x: Any, *args: Any) -> Any:
            if isinstance(x, Tensor):
                return a.call(name, x, *args)
            return a.call(f"{name}_coalesced", x, *(arg for arg in args if arg is not None))

        assert row.adjoint is not None
        on_lists = {"call": call, "identity": lambda xs: each(a.identity, xs)}
        parts = {"dim": getattr(a, "dims", None), "sizes": None}
        return row.adjoint(grads, Call(**{**vars(a), **on_lists, **parts}))

    return adjoint


def _stacked(row: Collective) -> Callable[[Sequence[Tensor], Args, Partition], list[Tensor]]:
    def stacked(xs_W: Sequence[Tensor], args: Args, groups: Partition) -> list[Tensor]:
        assert row.stacked is not None
        pairs = with_dims(xs_W, args.get("dims"))
        return [row.stacked(x_W, {**args, "dim": dim}, groups) for x_W, dim in pairs]

    return stacked


# -- one message for all tensors of a dtype ---


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The positions of the tensors of each dtype, in the order of first appearance."""
    same: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        same.setdefault(x.dtype, []).append(i)
    return list(same.values())


def _issue(
    outs: Sequence[Tensor],
    parts: Sequence[Tensor],
    work: dist.Work | None,
    finish: Finish | None,
) -> None:
    """One work for many results: the first that is waited for fills them all."""

    def fill() -> None:
        if finish:
            finish()
        for out, part in zip(outs, parts, strict=True):
            out.data.copy_(part.reshape(out.shape))

    if work is None:
        fill()
        return
    completion = Then([work], fill)
    for out in outs:
        issued(out, completion)


def _run_all_reduce(inputs: Sequence[Tensor], reduce_op: str, group_name: str) -> list[Tensor]:
    outs = [x.new_empty(x.shape) for x in inputs]
    all_reduce_into(outs, inputs, reduce_op, group_named(group_name))
    return outs


def all_reduce_into(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], reduce_op: str, g: Group
) -> None:
    for same_dtype in _by_dtype(inputs):
        flat = torch.cat([inputs[i].reshape(-1) for i in same_dtype])
        work, finish = None, None
        if g.n > 1:
            carrier = carrier_of(g, flat.device)
            work, finish = carrier.all_reduce_(flat, REDUCTIONS[reduce_op], g)
        parts = flat.split([inputs[i].numel() for i in same_dtype])
        _issue([outs[i] for i in same_dtype], parts, work, finish)


def _run_all_gather(inputs: Sequence[Tensor], group_name: str, dims: Sizes = None) -> list[Tensor]:
    g, pairs = group_named(group_name), with_dims(inputs, dims)
    outs = [x.new_empty(gathered(x, g.n, dim)) for x, dim in pairs]
    for same_dtype in _by_dtype(inputs):
        packed = torch.cat([inputs[i].reshape(-1) for i in same_dtype])
        parts = packed.new_empty((g.n, *packed.shape))
        work = None
        if g.n == 1:
            parts.copy_(packed)
        else:
            work = carrier_of(g, packed.device).all_gather(parts, packed, g)
        columns = parts.split([inputs[i].numel() for i in same_dtype], 1)
        sources = []
        for i, column in zip(same_dtype, columns, strict=True):
            shape = list(inputs[i].shape) or [1]
            # [n, *shape] with the ranks moved in front of the gathered dim, as out is laid out
            sources.append(column.reshape(g.n, *shape).movedim(0, pairs[i][1]))
        _issue([outs[i] for i in same_dtype], sources, work, None)
    return outs


def _run_reduce_scatter(
    inputs: Sequence[Tensor], reduce_op: str, group_name: str, dims: Sizes = None
) -> list[Tensor]:
    g = group_named(group_name)
    cut = [chunks(x, dim, g.n, None) for x, dim in with_dims(inputs, dims)]
    outs = [parts.new_empty(parts.shape[1:]) for parts in cut]
    for same_dtype in _by_dtype(inputs):
        packed = torch.cat([cut[i].flatten(1) for i in same_dtype], dim=1)
        mine = packed.new_empty(packed.shape[1:])
        work, finish = None, None
        if g.n == 1:
            mine.copy_(packed[0])
        else:
            carrier = carrier_of(g, packed.device)
            work, finish = carrier.reduce_scatter(mine, packed, REDUCTIONS[reduce_op], g)
        parts = mine.split([outs[i].numel() for i in same_dtype])
        _issue([outs[i] for i in same_dtype], parts, work, finish)
    return outs


ALL_REDUCE_COALESCED = _coalesced(ALL_REDUCE, _run_all_reduce)

ROWS = (
    ALL_REDUCE_COALESCED,
    _coalesced(ALL_GATHER_INTO_TENSOR, _run_all_gather),
    _coalesced(REDUCE_SCATTER_TENSOR, _run_reduce_scatter),
)
