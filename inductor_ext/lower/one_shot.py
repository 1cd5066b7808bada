"""Collectives read in place: when that is legal and worth it, and the three forms of it.

Every rank's part is in its arena, and the others read it where it lies. *Fused*: one extern call
says that this rank's part is there and returns all ranks' parts; what is made of them is an
``ir.Pointwise`` of loads in rank order, which the scheduler fuses with whatever uses it. *Split*:
the same in two calls, with other work between them. *Opaque*: the extern call also reduces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fcoll.groups import Group
from fcoll.table.row import Collective
from inductor_ext._torch import ir, lowering, ops
from inductor_ext.config import Config
from inductor_ext.lower.ir import ArenaKernel, extern, parts_of, realize_as_comm_buffer
from inductor_ext.state import current

_native = torch.ops.fcoll_native

PLACE_BYTES = 8 << 20  # arena.h: what one place of a lane, a comm buffer, may have


# -- what is made of the parts ---


def combined(row: Collective, parts: Sequence[ir.TensorBox], reduce_op: str, dim: int) -> Any:
    """A row's result of the ranks' parts: a reduction of them, or one behind the other."""
    if "reduce_op" in row.position:
        return _reduced(parts, reduce_op)
    return lowering.pointwise_cat(parts, dim)


def _reduced(parts: Sequence[ir.TensorBox], reduce_op: str) -> ir.TensorBox:
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


# -- when ---

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTS = (torch.int32, torch.int64)


def why_not(row: Collective, args: dict[str, Any], group: Group, config: Config) -> str:
    """The reason why a call of a row is not read in place; empty if it is."""
    if row.native.arena is None:
        return f"{row.name} has no form that is read in place"
    x: torch.Tensor = args["input"].meta["val"]
    if x.device.type != "cpu":
        return f"it is on {x.device.type}"
    if x.dim() == 0:
        return "it is a scalar"
    if args.get("sizes") is not None:
        return "its parts may differ in size"
    if row.native.arena == "share" and args["dim"] != 0:
        return "its shares are not along dim 0"
    why = _not_reduced(x.dtype, args.get("reduce_op"))
    return why or _too_large(x, config.one_shot_limit(group.n), group.n)


def _not_reduced(dtype: torch.dtype, reduce_op: str | None) -> str:
    if reduce_op is None:  # nothing is to be reduced
        return "" if _is_selectable(dtype) else f"Inductor selects among no values of {dtype}"
    if reduce_op not in _BINARY:
        return f"{reduce_op} is not a reduction of the compiler's"
    if dtype not in _FLOATS and (dtype not in _INTS or reduce_op == "avg"):
        return f"{reduce_op} of {dtype} is left to the eager kernel"
    return ""


def _is_selectable(dtype: torch.dtype) -> bool:
    """Can a loop take each element from one of several parts? Inductor promotes the values of such
    a choice with booleans, which torch refuses for float8 and for unsigned integers above 8 bits.
    """
    try:
        torch.promote_types(torch.bool, dtype)
    except RuntimeError:
        return False
    return True


def _too_large(x: torch.Tensor, limit: int, n: int) -> str:
    limit = min(limit, PLACE_BYTES)
    size = x.numel() * x.element_size()
    hint = size if isinstance(size, int) else size.node.hint
    if hint is None or hint > limit:
        return f"{hint} bytes are more than the {limit} of {n} ranks"
    # A graph for many sizes holds for those that fit: others are compiled anew.
    return "" if size <= limit else "too large"


# -- forms ---


@dataclass(frozen=True)
class InPlaceCall:
    """A call of a row that is read in place, but for its tensor."""

    row: Collective
    reduce_op: str
    group_name: str
    dim: int

    def arguments(self, own: ir.TensorBox) -> tuple[Any, ...]:
        """What the arena's ops take of it."""
        return own, self.row.name, self.reduce_op, self.group_name, self.dim


def fused(call: InPlaceCall, x: ir.TensorBox) -> ir.TensorBox:
    own, claim = realize_as_comm_buffer(x, call.group_name)
    parts = parts_of(extern(_native.meet.default, *call.arguments(own)), claim)
    return combined(call.row, parts, call.reduce_op, call.dim)


def opaque(call: InPlaceCall, x: ir.TensorBox) -> ir.TensorBox:
    own, _ = realize_as_comm_buffer(x, call.group_name)
    out = extern(_native.meet_and_reduce.default, *call.arguments(own))
    out.skip_size_stride_alignment_checks = True
    return ir.TensorBox.create(out)


@dataclass(frozen=True)
class Announced:
    """A collective between its halves, while a graph is lowered."""

    call: InPlaceCall
    own: ir.TensorBox
    claim: Any
    token: ir.TensorBox


def announce(call: InPlaceCall, x: ir.TensorBox) -> ir.TensorBox:
    """The first half, which the wait finds by the token that this gives."""
    own, claim = realize_as_comm_buffer(x, call.group_name)
    token = ir.TensorBox.create(extern(_native.announce.default, *call.arguments(own)))
    announced = Announced(call, own, claim, token)
    current().announced[token.get_name()] = announced
    return token


def collect(a: Announced) -> ir.TensorBox:
    """The second half."""
    where = a.token, a.own, a.call.row.name, a.call.group_name
    out = ArenaKernel.create(_native.collect.default, *where)
    return combined(a.call.row, parts_of(out, a.claim), a.call.reduce_op, a.call.dim)


#: Form -> how it is lowered.
FORMS = {"fused": fused, "opaque": opaque, "split": announce}
