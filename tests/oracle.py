"""What each collective gives, computed in one process from the inputs of all ranks.

Plain torch and numpy: nothing here calls fcoll. Floats and complex numbers are reduced in double
precision and rounded once at the end; integers wrap around as numpy's do.

    expected("all_gather_into_tensor", {0: [a], 2: [b]}, {"dim": 0}, group=(2, 0))
        -> {2: [cat(b, a)], 0: [cat(b, a)]}
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor
Lists = list[list[Tensor]]  # [rank within the group][position in the list]

# How numpy folds two parts; torch has no arithmetic on the wider unsigned integers.
_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
# On truth values a sum is "any" and a product "all".
_ON_BOOL = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}


def expected(
    op: str, inputs: dict[int, list[Tensor]], args: dict[str, Any], group: Sequence[int]
) -> dict[int, list[Tensor]]:
    """The outputs of each rank of the group: ``inputs`` by global rank, ``group`` in its order."""
    outputs = ORACLES[op]([inputs[rank] for rank in group], args)
    return dict(zip(group, outputs, strict=True))


def reduced(parts: Sequence[Tensor], reduce_op: str, factor: float | None = None) -> Tensor:
    dtype = parts[0].dtype
    if reduce_op == "premul_sum":
        parts = [(wide(x) * factor).to(dtype) for x in parts]
        reduce_op = "sum"
    if dtype == torch.bool:
        reduce_op = _ON_BOOL.get(reduce_op, reduce_op)
    total = functools.reduce(_FOLD[reduce_op], [wide(x).numpy() for x in parts])
    if reduce_op == "avg":
        total = total / len(parts)
    return torch.from_numpy(np.asarray(total)).to(dtype)


def wide(x: Tensor) -> Tensor:
    """Floats as float64 and complex numbers as complex128; all else as it is."""
    if x.dtype.is_complex:
        return x.to(torch.complex128)
    return x.to(torch.float64) if x.dtype.is_floating_point else x


def rounding(parts: Sequence[Tensor], reduce_op: str) -> float:
    """How far a correct result may be from ``reduced``: a rounding at each step of the fold."""
    dtype = parts[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex) or not parts[0].numel():
        return 0.0
    sizes = [wide(x).abs() for x in parts]
    if reduce_op in ("min", "max"):
        return 0.0
    fold = torch.mul if reduce_op == "product" else torch.add
    # a complex product is four real ones and two sums
    steps = len(parts) * (4 if dtype.is_complex else 1)
    return steps * torch.finfo(dtype).eps * functools.reduce(fold, sizes).max().item()


def _parts(x: Tensor, n: int, dim: int, sizes: Sequence[int] | None) -> list[Tensor]:
    return list(x.split(list(sizes), dim)) if sizes else list(x.tensor_split(n, dim))


def _gathered(xs: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([torch.atleast_1d(x) for x in xs], dim)


def _only_on(rank: int, y: Tensor, n: int) -> Lists:
    return [[y if r == rank else torch.zeros_like(y)] for r in range(n)]


# -- one function a collective: inputs by rank within the group, and the arguments of all ranks ---


def _all_reduce(xs: Lists, a: dict) -> Lists:
    return [[reduced(same, a["reduce_op"], a.get("factor")) for same in _columns(xs)] for _ in xs]


def _columns(xs: Lists) -> Lists:
    """[position][rank] from [rank][position]."""
    return [list(column) for column in zip(*xs, strict=True)]


def _dims(xs: Lists, a: dict) -> Sequence[int]:
    return a.get("dims") or [a.get("dim", 0)] * len(xs[0])


def _all_gather(xs: Lists, a: dict) -> Lists:
    columns = zip(_columns(xs), _dims(xs, a), strict=True)
    whole = [_gathered(same, dim) for same, dim in columns]
    return [whole for _ in xs]


def _reduce_scatter(xs: Lists, a: dict) -> Lists:
    whole = _all_reduce(xs, a)[0]
    dims = zip(whole, _dims(xs, a), strict=True)
    shards = [_parts(y, len(xs), dim, a.get("sizes")) for y, dim in dims]
    return _columns(shards)


def _all_to_all_single(xs: Lists, a: dict) -> Lists:
    rows = a.get("splits") or [None] * len(xs)
    sent = [_parts(x, len(xs), 0, splits) for (x,), splits in zip(xs, rows, strict=True)]
    return [[torch.cat(received)] for received in _columns(sent)]


def _shard_dim_alltoall(xs: Lists, a: dict) -> Lists:
    whole = _gathered([x for (x,) in xs], a["gather_dim"])
    return [[part] for part in _parts(whole, len(xs), a["shard_dim"], None)]


def _broadcast(xs: Lists, a: dict) -> Lists:
    return [xs[a["src"]] for _ in xs]


def _reduce(xs: Lists, a: dict) -> Lists:
    return _only_on(a["dst"], _all_reduce(xs, a)[0][0], len(xs))


def _gather(xs: Lists, a: dict) -> Lists:
    return _only_on(a["dst"], _all_gather(xs, a)[0][0], len(xs))


def _scatter(xs: Lists, a: dict) -> Lists:
    x = xs[a["src"]][0]
    return [[part] for part in _parts(x, len(xs), a.get("dim", 0), a.get("sizes"))]


def _permute(xs: Lists, a: dict) -> Lists:
    outs = [[torch.zeros_like(x)] for (x,) in xs]
    for source, target in enumerate(a["dst"]):
        if target >= 0:
            outs[target] = xs[source]
    return outs


def _isend(xs: Lists, a: dict) -> Lists:
    return [[x.new_empty(0)] for (x,) in xs]


def _irecv(xs: Lists, a: dict) -> Lists:
    """Every rank sends to the one ``shift`` places on."""
    return [xs[(r - a["shift"]) % len(xs)] for r in range(len(xs))]


def _batch_p2p_ops(xs: Lists, a: dict) -> Lists:
    """Every tensor is sent, then a tensor like it received."""
    tokens = [[x.new_empty(0) for x in mine] for mine in xs]
    return [token + got for token, got in zip(tokens, _irecv(xs, a), strict=True)]


def _barrier(xs: Lists, a: dict) -> Lists:
    return [[torch.empty(0)] for _ in xs]


def _unchanged(xs: Lists, a: dict) -> Lists:
    return xs


ORACLES: dict[str, Callable[[Lists, dict], Lists]] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "all_reduce_coalesced_": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather,
    "all_gather_into_tensor_coalesced": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "all_to_all_single": _all_to_all_single,
    "shard_dim_alltoall": _shard_dim_alltoall,
    "broadcast": _broadcast,
    "broadcast_": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "permute": _permute,
    "isend": _isend,
    "irecv": _irecv,
    "batch_p2p_ops": _batch_p2p_ops,
    "barrier": _barrier,
    "wait_tensor": _unchanged,
}
