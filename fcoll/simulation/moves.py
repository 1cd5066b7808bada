"""What each collective does to the tensors of its ranks, once all of them are there.

A move takes the parts of all ranks in rank order. Tensors are written through ``.data``: no real
backend's write is seen by autograd either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fcoll import reductions
from fcoll.reductions import PREMUL_SUM, REDUCTIONS
from fcoll.simulation.baton import this_rank


class Misfit(Exception):
    """Two ranks' tensors do not fit; ``ranks`` of the group, ``why`` says how."""

    def __init__(self, ranks: tuple[int, int], why: str) -> None:
        super().__init__(why)
        self.ranks = ranks


@dataclass(eq=False)
class Part:
    """What one rank brings to a collective: what it gives, and where results go."""

    ins: Sequence[Tensor] = ()
    outs: Sequence[Tensor] = ()
    reduce_op: str = ""
    factor: Any = None  # of premul_sum
    root: int = -1
    value: Any = None  # of calls about no tensors
    extra: dict[str, Any] = field(default_factory=dict)


Move = Callable[[list[Part]], None]


def _put(out: Tensor, x: Tensor) -> None:
    if out.is_sparse:  # .data of one has indices of its own
        with torch.no_grad():
            out.copy_(x)
    elif out is not x:
        out.data.copy_(x if out.shape == x.shape else x.reshape(out.shape))


def _reduced(parts: Sequence[Part], tensors: Sequence[Tensor]) -> Tensor:
    """The reduction of one tensor of each rank, in the shape of the first."""
    first = parts[0]
    shape = tensors[0].shape
    each = [x.detach() if x.shape == shape else x.detach().reshape(shape) for x in tensors]
    me = this_rank()
    by = reductions if me is None else me.session.arithmetic
    if first.reduce_op == PREMUL_SUM:
        each = [by.scaled("all_reduce", x, p.factor) for p, x in zip(parts, each, strict=True)]
        return by.fold(REDUCTIONS["sum"], each)
    return by.fold(REDUCTIONS[first.reduce_op], each)


def all_reduce(parts: list[Part]) -> None:
    for i in range(len(parts[0].ins)):
        total = _reduced(parts, [p.ins[i] for p in parts])
        for p in parts:
            _put(p.outs[i], total)


def reduce(parts: list[Part]) -> None:
    root = parts[parts[0].root]
    for i in range(len(root.ins)):
        _put(root.outs[i], _reduced(parts, [p.ins[i] for p in parts]))


def broadcast(parts: list[Part]) -> None:
    root = parts[parts[0].root]
    for i, x in enumerate(root.ins):
        for p in parts:
            if p is not root or p.outs[i] is not x:
                _put(p.outs[i], x.detach())


def all_gather(parts: list[Part]) -> None:
    """``ins`` are k tensors, ``outs`` k times n: those of the first, then of the second."""
    n = len(parts)
    for to, p in enumerate(parts):
        for i, out in enumerate(p.outs):
            source = i % n
            x = parts[source].ins[i // n]
            _check((source, to), "gives", x, "expects", out)
            _put(out, x.detach())


def reduce_scatter(parts: list[Part]) -> None:
    """``outs`` are k tensors, ``ins`` k times n."""
    n = len(parts)
    for to, p in enumerate(parts):
        for i, out in enumerate(p.outs):
            given = [q.ins[i * n + to] for q in parts]
            for source, x in enumerate(given):
                _check((source, to), "gives", x, "expects", out)
            _put(out, _reduced(parts, given))


def all_to_all(parts: list[Part]) -> None:
    for to, p in enumerate(parts):
        for source, out in enumerate(p.outs):
            x = parts[source].ins[to]
            _check((source, to), "sends", x, "expects", out)
            _put(out, x.detach())


def gather(parts: list[Part]) -> None:
    to = parts[0].root
    for source, out in enumerate(parts[to].outs):
        x = parts[source].ins[0]
        _check((source, to), "gives", x, "expects", out)
        _put(out, x.detach())


def scatter(parts: list[Part]) -> None:
    source = parts[0].root
    for to, p in enumerate(parts):
        x = parts[source].ins[to]
        _check((source, to), "gives", x, "expects", p.outs[0])
        _put(p.outs[0], x.detach())


def nothing(parts: list[Part]) -> None:
    pass


def _check(ranks: tuple[int, int], gives: str, x: Tensor, takes: str, out: Tensor) -> None:
    if x.numel() != out.numel() or x.dtype != out.dtype:
        source, to = ranks
        who = "it" if source == to else f"rank {to}, which"
        raise Misfit(ranks, f"rank {source} {gives} {amount(x)} to {who} {takes} {amount(out)}")


def amount(x: Tensor) -> str:
    """ "4 float32" """
    return f"{x.numel()} {str(x.dtype).removeprefix('torch.')}"


MOVES: dict[str, Move] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "gather": gather,
    "scatter": scatter,
    "barrier": nothing,
    "monitored_barrier": nothing,
    "init_process_group": nothing,
    "new_group": nothing,
    "split_group": nothing,
}
