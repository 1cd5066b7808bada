"""What all ranks must agree on in a call: the numbers that shared memory compares.

The C++ kernels make the same of the calls that they serve (transport/native/signature.h).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fcoll.reductions import REDUCTIONS
from fcoll.table.row import Collective

_OPS = {name: i for i, name in enumerate(REDUCTIONS)}


class Facts(NamedTuple):
    """Single arguments of a call; -1 where it has none. The order is that of C++'s Facts."""

    op: int
    root: int
    dim: int
    other_dim: int
    grad: int  # 1: identity
    own_dim: int  # sizes along it are each rank's own


class Signed(NamedTuple):
    """A call as it is compared: the functional row's name, tensors, facts, and more numbers."""

    row: str
    tensors: list[Tensor]
    facts: Facts
    more: list[int]


def signed(row: Collective, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signed:
    """The signature of a call of a row. In place or not, it is the same message."""
    named = {a.name: value for a, value in zip(row.arguments, args, strict=False)} | dict(kwargs)
    named.pop("out", None)
    tensors: list[Tensor] = []
    for a in row.arguments:
        value = named.get(a.name)
        if a.is_tensor and value is not None:
            tensors += value if isinstance(value, (list, tuple)) else [value]
    root = named.get("src", named.get("dst", -1))
    to_ranks = root if isinstance(root, (list, tuple)) else []  # of a permutation
    dims = named.get("dims", [0] * len(tensors) if "dims" in row.position else None)
    own = row.own_dim({"dim": 0, **named}) if row.own_dim else None
    facts = Facts(
        op=_OPS.get(named.get("reduce_op", ""), -1),
        root=-1 if to_ranks else root,
        dim=_dim(row, named),
        other_dim=named.get("shard_dim", -1),
        grad=int(named.get("grad") == "identity"),
        own_dim=-1 if own is None else own,
    )
    return Signed(
        row.message, tensors, facts, [*(named.get("sizes") or []), *(dims or []), *to_ranks]
    )


def _dim(row: Collective, named: Mapping[str, Any]) -> int:
    if "gather_dim" in named:
        return named["gather_dim"]
    # an out form has no dim: it is along the first
    return named.get("dim", 0) if "dim" in row.position or row.has_out else -1
