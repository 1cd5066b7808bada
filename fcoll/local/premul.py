"""The factor of premul_sum: the op that a collective becomes cannot read it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from fcoll import reductions
from fcoll.errors import MissingFactor
from fcoll.local.local_tensor import LocalTensor, apart


class _Noted(threading.local):
    factor: Any = None


_noted = _Noted()


@contextlib.contextmanager
def noted(args: Sequence[Any]) -> Iterator[None]:
    """Around a call of a group's method: its factor is inside the last argument, the options."""
    before, op = _noted.factor, getattr(args[-1] if args else None, "reduceOp", None)
    _noted.factor = getattr(op, "factor", None) if op == dist.ReduceOp.PREMUL_SUM else None
    try:
        yield
    finally:
        _noted.factor = before


def scaled(op: str, x: LocalTensor) -> LocalTensor:
    """What is left to be summed."""
    factor = _noted.factor
    if factor is None:
        raise MissingFactor(op=op, reduce_op=reductions.PREMUL_SUM, factor=None)
    return apart({r: (t * factor).to(t.dtype) for r, t in x._tensors().items()}, owned=True)
