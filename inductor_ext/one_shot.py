"""Collectives read in place: when that is legal and worth it, and the two forms of it.

Every rank's part is in its arena. *Fused*: one extern call says that this rank's part is there and
returns all ranks' parts; what is made of them is an ``ir.Pointwise`` of loads in rank order, which
the scheduler fuses with whatever uses it. *Opaque*: the extern call also reduces them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fcoll.groups import Group
from inductor_ext._torch import V, ir, lowering, ops
from inductor_ext.config import Config
from inductor_ext.ir import ArenaKernel, extern, parts_of, realize_as_comm_buffer

_native = torch.ops.fcoll_native

PLACE_BYTES = 8 << 20  # arena.h: what a comm buffer may have


@dataclass(frozen=True)
class Reads:
    """What a row makes of the ranks' parts: a reduction of them, or one behind the other."""

    combine: Callable[[Sequence[ir.TensorBox], str, int], ir.TensorBox]
    #: Is each rank's share of the parts read, instead of all of them?
    slices: bool = False


def _reduced(parts: Sequence[ir.TensorBox], reduce_op: str, dim: int) -> ir.TensorBox:
    dtype = parts[0].get_dtype()
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    loads = [part.make_loader() for part in parts]

    def inner(index: Any) -> Any:
        values = [load(index) for load in loads]
        if wide != dtype:  # added up in f32, rounded once
            values = [ops.to_dtype(v, wide) for v in values]
        total = functools.reduce(_BINARY[reduce_op], values)
        if reduce_op == "avg":
            total = ops.truediv(total, ops.constant(float(len(parts)), wide))
        return ops.to_dtype(total, dtype) if wide != dtype else total

    return ir.Pointwise.create(
        device=parts[0].get_device(), dtype=dtype, inner_fn=inner, ranges=parts[0].get_size()
    )


# By name: the handler of ops changes while a graph is lowered.
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: ops.add(a, b),
    "avg": lambda a, b: ops.add(a, b),
    "product": lambda a, b: ops.mul(a, b),
    "min": lambda a, b: ops.minimum(a, b),
    "max": lambda a, b: ops.maximum(a, b),
}


def _in_a_row(parts: Sequence[ir.TensorBox], reduce_op: str, dim: int) -> ir.TensorBox:
    return lowering.pointwise_cat(parts, dim)


READS = {
    "all_reduce": Reads(_reduced),
    "all_gather_into_tensor": Reads(_in_a_row),
    "reduce_scatter_tensor": Reads(_reduced, slices=True),
}

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTS = (torch.int32, torch.int64)


def why_not(row: str, args: dict[str, Any], group: Group, config: Config) -> str:
    """The reason why a call of a row is not read in place; empty if it is."""
    if row not in READS:
        return f"{row} has no form that is read in place"
    x: torch.Tensor = args["input"].meta["val"]
    if x.device.type != "cpu":
        return f"it is on {x.device.type}"
    if x.dim() == 0:
        return "it is a scalar"
    if args.get("sizes") is not None:
        return "its parts may differ in size"
    if READS[row].slices and args["dim"] != 0:
        return "its shares are not along dim 0"
    reduce_op = args.get("reduce_op")
    if reduce_op is not None:
        if reduce_op not in _BINARY:
            return f"{reduce_op} is not a reduction of the compiler's"
        if x.dtype not in _FLOATS and (x.dtype not in _INTS or reduce_op == "avg"):
            return f"{reduce_op} of {x.dtype} is left to the eager kernel"
    return _too_large(x, config.one_shot_limit(group.n), group.n)


def _too_large(x: torch.Tensor, limit: int, n: int) -> str:
    limit = min(limit, PLACE_BYTES)
    size = x.numel() * x.element_size()
    hint = size if isinstance(size, int) else size.node.hint
    if hint is None or hint > limit:
        return f"{hint} bytes are more than the {limit} of {n} ranks"
    # A graph for many sizes holds for those that fit: others are compiled anew.
    return "" if size <= limit else "too large"


def fused(row: str, x: ir.TensorBox, reduce_op: str, group_name: str, dim: int) -> ir.TensorBox:
    own, claim = realize_as_comm_buffer(x, group_name)
    out = extern(_native.meet.default, own, row, reduce_op, group_name)
    return READS[row].combine(parts_of(out, claim), reduce_op, dim)


def opaque(row: str, x: ir.TensorBox, reduce_op: str, group_name: str) -> ir.TensorBox:
    own, _ = realize_as_comm_buffer(x, group_name)
    out = extern(_native.meet_and_reduce.default, own, row, reduce_op, group_name)
    out.skip_size_stride_alignment_checks = True
    return ir.TensorBox.create(out)


@dataclass(frozen=True)
class Announced:
    """A collective between its halves, while a graph is lowered."""

    row: str
    own: ir.TensorBox
    claim: Any
    token: ir.TensorBox
    reduce_op: str
    group_name: str
    dim: int
    at: int  # how many operations there were


def announce(row: str, x: ir.TensorBox, reduce_op: str, group_name: str, dim: int) -> Announced:
    own, claim = realize_as_comm_buffer(x, group_name)
    token = extern(_native.announce.default, own, row, reduce_op, group_name)
    at = len(V.graph.operations)
    return Announced(row, own, claim, ir.TensorBox.create(token), reduce_op, group_name, dim, at)


def collect(a: Announced) -> ir.TensorBox:
    between = [op.get_name() for op in V.graph.operations[a.at :]]
    out = ArenaKernel.create(_native.collect.default, a.token, a.own, a.row, a.group_name)
    # Inductor's order for the least memory would put it right after the first half.
    made = next(op for op in reversed(V.graph.operations) if isinstance(op, ArenaKernel))
    V.graph.additional_buffer_deps[made.get_operation_name()].update(between)
    return READS[a.row].combine(parts_of(out, a.claim), a.reduce_op, a.dim)
