"""Type checks of the public functions' arguments, ahead of everything else.

They return plain values: a Tensor, an int, a list of ints. The values themselves are checked later,
by the row.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from fcoll import reductions
from fcoll._torch import at_trace_time
from fcoll.errors import WrongLayout, WrongType, fail

_LISTS = (list, tuple, torch.Size)
ReduceOpName: TypeAlias = Literal[
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"
]
ReduceOpLike: TypeAlias = ReduceOpName | dist.ReduceOp | dist.ReduceOp.RedOpType


def tensor(op: str, x: Any, arg: str = "x") -> Tensor:
    """A tensor whose elements lie in memory one after the other."""
    if not isinstance(x, Tensor):
        fail(WrongType, op=op, arg=arg, kind=_kind(x), want="a Tensor")
    if not is_compiling() and (x.is_nested or x.layout is not torch.strided or x.is_quantized):
        _refuse_layout(op, arg, x)
    return x


def tensors(op: str, xs: Any, arg: str = "xs") -> list[Tensor]:
    if not isinstance(xs, _LISTS):
        fail(WrongType, op=op, arg=arg, kind=_kind(xs), want="a list of Tensors")
    return [tensor(op, x, f"{arg}[{i}]") for i, x in enumerate(xs)]


def integer(op: str, arg: str, value: Any) -> int:
    """An int, a symbolic size, a NumPy integer or a tensor of one integer.

    >>> integer("broadcast", "src", torch.tensor(1))
    1
    """
    if isinstance(value, (int, torch.SymInt)):
        return value  # type: ignore[return-value]
    if is_compiling():
        fail(WrongType, op=op, arg=arg, kind=_kind(value), want="an int")
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        raise WrongType(op=op, arg=arg, kind=_kind(value), want="an int") from None


def integers(op: str, arg: str, values: Any) -> list[int]:
    if isinstance(values, Tensor) and not is_compiling() and values.dim() == 1:
        values = values.tolist()
    if not isinstance(values, (*_LISTS, range)):
        fail(WrongType, op=op, arg=arg, kind=_kind(values), want="a list of ints")
    return [integer(op, f"{arg}[{i}]", value) for i, value in enumerate(values)]


def maybe_integers(op: str, arg: str, values: Any) -> list[int] | None:
    return None if values is None else integers(op, arg, values)


def text(op: str, arg: str, value: Any) -> str:
    if not isinstance(value, str):
        fail(WrongType, op=op, arg=arg, kind=_kind(value), want="a string")
    return value


def maybe_number(op: str, arg: str, value: Any) -> Any:
    if value is not None and not isinstance(value, (int, float, complex, Tensor)):
        fail(WrongType, op=op, arg=arg, kind=_kind(value), want="a number")
    if isinstance(value, Tensor) and not is_compiling():
        return _one_number(op, arg, value)
    return value


def _one_number(op: str, arg: str, value: Tensor) -> Any:
    if value.numel() != 1:
        raise WrongType(
            op=op, arg=arg, kind=f"a Tensor of {value.numel()} elements", want="a number"
        )
    return value.item()


def scaled(name: str, x: Any, op: ReduceOpLike, factor: float | None) -> tuple[Any, str]:
    """premul_sum is a sum of scaled parts; every other reduce op is itself."""
    factor = maybe_number(name, "factor", factor)
    parsed = reductions.parse(name, op)
    factor = reductions.premul_factor(name, op, factor)
    if factor is None:
        return x, parsed
    if isinstance(x, Tensor):
        return reductions.scaled(name, x, factor), "sum"
    return [reductions.scaled(name, y, factor) for y in x], "sum"


def transfers(op: str, values: Any) -> list[tuple[str, Tensor, int]]:
    """The ("isend", x, dst) and ("irecv", like, src) of a batch."""
    if not isinstance(values, _LISTS):
        want = 'a list of ("isend", x, dst) and ("irecv", like, src)'
        fail(WrongType, op=op, arg="transfers", kind=_kind(values), want=want)
    checked = []
    for i, one in enumerate(values):
        arg = f"transfers[{i}]"
        if not isinstance(one, _LISTS) or len(one) != 3:
            want = '("isend", x, dst) or ("irecv", like, src)'
            fail(WrongType, op=op, arg=arg, kind=_kind(one), want=want)
        kind, x, peer = one
        checked.append((text(op, arg, kind), tensor(op, x, arg), integer(op, arg, peer)))
    return checked


def dims(op: str, dim: Any, xs: Sequence[Tensor]) -> list[int]:
    """A dim for each tensor, from one for all or a list."""
    if isinstance(dim, _LISTS):
        return integers(op, "dim", dim)
    return [integer(op, "dim", dim)] * len(xs)


@at_trace_time
def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _refuse_layout(op: str, arg: str, x: Tensor) -> None:
    kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout)
    raise WrongLayout(op=op, arg=arg, kind=kind.removeprefix("torch."))
