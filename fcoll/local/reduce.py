"""The reduce op that a collective got, and the factor of premul_sum."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

_noted = threading.local()
_NAMES = {getattr(dist.ReduceOp, n.upper()): n for n in (
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum",
)}  # fmt: skip


def noting_factor(old: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a reducing collective: the op that it starts cannot read premul_sum's factor."""
    before = getattr(_noted, "factor", None)
    ops = (v for v in (*args, *kwargs.values()) if isinstance(v, dist.ReduceOp))
    _noted.factor = next((f for op in ops if (f := getattr(op, "factor", None)) is not None), None)
    try:
        return old(*args, **kwargs)
    finally:
        _noted.factor = before


def plain_name(reduce_op: Any) -> str | None:
    """The name of an enum, but premul_sum; None of anything else."""
    if not isinstance(reduce_op, dist.ReduceOp.RedOpType):
        return None
    name = _NAMES.get(reduce_op)
    return None if name == "premul_sum" else name


def name_of(reduce_op: Any) -> str:
    """A reduce op's name: of an enum, of what a c10d op gets, or itself."""
    if isinstance(reduce_op, str):
        return reduce_op.lower()
    op = reduce_op.op
    return _NAMES[op() if callable(op) else op]


def prepared(x: Tensor, reduce_op: Any) -> tuple[Tensor, str]:
    """(x, its reduce op), where premul_sum is a sum of scaled parts."""
    name = name_of(reduce_op)
    if name != "premul_sum":
        return x, name
    factor = getattr(_noted, "factor", None)
    if factor is None:
        raise NotImplementedError(
            "premul_sum without its factor: call dist.all_reduce, dist.reduce or "
            "dist.reduce_scatter with the ReduceOp that has the factor inside"
        )
    return (x * factor).to(x.dtype), "sum"
