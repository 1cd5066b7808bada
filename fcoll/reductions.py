"""The reduce ops: one row each, with what it takes and how its gradient runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch
from fcoll.errors import MissingFactor, UnknownReduceOp, WrongDtype, fail

PREMUL_SUM = "premul_sum"


@dataclass(frozen=True)
class Reduction:
    """One reduce op: the dtypes it takes, how two parts combine, the op on 0/1 bytes that gives
    the same truth values, and how one rank's part shares in the gradient (table/reduce.py)."""

    name: str
    c10d: dist.ReduceOp.RedOpType
    takes: str
    fold: Callable[[Tensor, Tensor], Tensor]
    on_bool: str | None = None
    share: str | None = None


def _row(
    name: str, takes: str, fold: Callable, on_bool: str | None, share: str | None
) -> Reduction:
    return Reduction(name, getattr(dist.ReduceOp, name.upper()), takes, fold, on_bool, share)


# takes: any | number (no complex) | inexact (float or complex) | bits (int or bool)
REDUCTIONS: dict[str, Reduction] = {
    r.name: r
    for r in (
        _row("sum", "any", torch.add, "max", "whole"),
        _row("avg", "inexact", torch.add, None, "mean"),
        _row("product", "any", torch.mul, "min", "others_product"),
        _row("min", "number", torch.minimum, "min", "tied"),
        _row("max", "number", torch.maximum, "max", "tied"),
        _row("band", "bits", torch.bitwise_and, "min", None),
        _row("bor", "bits", torch.bitwise_or, "max", None),
        _row("bxor", "bits", torch.bitwise_xor, "bxor", None),
    )
}

_BY_ENUM = {int(r.c10d): r.name for r in REDUCTIONS.values()} | {
    int(dist.ReduceOp.PREMUL_SUM): PREMUL_SUM
}
_REASON = {
    "inexact": "The mean of integers is not an integer: convert to a float, or use sum.",
    "number": "Complex numbers have no order: reduce abs(), or real and imag apart.",
    "bits": "Bitwise ops take integers and bool.",
}


def reduction(op: str, reduce_op: str) -> Reduction:
    """The row of a reduce op; ``op`` is the collective, for the message."""
    row = REDUCTIONS.get(reduce_op)
    if row is None:
        raise UnknownReduceOp(op=op, reduce_op=reduce_op, known=known())
    return row


def known() -> str:
    return ", ".join([*REDUCTIONS, PREMUL_SUM])


@_torch.at_trace_time
def parse(op: str, reduce_op: str | dist.ReduceOp) -> str:
    """The name of a reduce op that a user passes.

    >>> parse("all_reduce", "SUM"), parse("all_reduce", dist.ReduceOp.MAX)
    ('sum', 'max')
    """
    is_name = isinstance(reduce_op, str)
    name = reduce_op.lower() if is_name else _BY_ENUM.get(_enum(reduce_op), "")
    if name not in REDUCTIONS and name != PREMUL_SUM:
        raise UnknownReduceOp(op=op, reduce_op=reduce_op, known=known())
    return name


def premul_factor(op: str, reduce_op: str | dist.ReduceOp, factor: float | None) -> float | None:
    """The factor of premul_sum: the argument's, or the one inside the ReduceOp."""
    scales = parse(op, reduce_op) == PREMUL_SUM
    if scales and factor is None:
        factor = _factor_inside(reduce_op)
    if scales != (factor is not None):
        fail(MissingFactor, op=op, reduce_op=reduce_op, factor=f"{factor}")
    return factor


@_torch.at_trace_time
def _factor_inside(reduce_op: str | dist.ReduceOp) -> float | None:
    factor = getattr(reduce_op, "factor", None)
    return factor.item() if isinstance(factor, Tensor) else factor


def scaled(op: str, x: Tensor, factor: float) -> Tensor:
    """x times the factor of premul_sum, in x's own dtype."""
    kind = torch.float32
    for python, torchs in _DTYPES:
        if isinstance(factor, python):
            kind = torchs
            break
    if not _castable(kind, x.dtype):
        hint = f"Times {factor} it would be another type: convert it first, or use sum."
        fail(WrongDtype, op=op, reduce_op=PREMUL_SUM, dtype=x.dtype, hint=hint)
    return (x.to(accumulator(x.dtype)) * factor).to(x.dtype)


_DTYPES = ((bool, torch.bool), (int, torch.int64), (complex, torch.complex64))


@_torch.at_trace_time
def _castable(source: torch.dtype, to: torch.dtype) -> bool:
    return torch.can_cast(source, to)


def _enum(reduce_op: dist.ReduceOp) -> int:
    kind = getattr(reduce_op, "op", reduce_op)
    return int(kind) if isinstance(kind, dist.ReduceOp.RedOpType) else -1  # no other numbers


@_torch.at_trace_time
def check_reduction(op: str, reduce_op: str, dtype: torch.dtype) -> None:
    """Raise unless the reduce op is known and has a meaning for the dtype."""
    row = reduction(op, reduce_op)
    inexact = dtype.is_floating_point or dtype.is_complex
    fits = {
        "any": True,
        "number": not dtype.is_complex,
        "inexact": inexact,
        "bits": not inexact,
    }[row.takes]
    if not fits:
        raise WrongDtype(op=op, reduce_op=reduce_op, dtype=dtype, hint=_REASON[row.takes])


def fold(row: Reduction, parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Reduce the leading dimension, or a list, in rank order; narrow floats accumulate in f32."""
    dtype = parts[0].dtype
    if dtype == torch.uint64:
        return _fold_uint64(row, parts if isinstance(parts, Tensor) else torch.stack(list(parts)))
    wide = accumulator(dtype)
    each = parts.to(wide).unbind() if isinstance(parts, Tensor) else [x.to(wide) for x in parts]
    total = functools.reduce(row.fold, each)
    if row.name == "avg":
        total = total / len(parts)
    return total.to(dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts of this one are added up."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    if dtype == torch.complex32:
        return torch.complex64
    if dtype in (torch.uint16, torch.uint32):
        return torch.int64  # torch has no arithmetic on them; the low bits are the same
    return dtype


def _fold_uint64(row: Reduction, parts: Tensor) -> Tensor:
    # torch has no arithmetic on uint64. As int64 the low bits of sums and products are the same,
    # and flipping the sign bit keeps the order.
    flip = torch.iinfo(torch.int64).min if row.takes == "number" else 0
    total = functools.reduce(row.fold, (parts.view(torch.int64) ^ flip).unbind())
    return (total ^ flip).view(torch.uint64)
