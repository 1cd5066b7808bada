"""How one rank's part x shares in the gradient G of the reduced value y, by reduce op.

The function differentiated is the global one: every rank has a loss of its own, and a gradient is
that of their sum. So the adjoint of a collective is the collective that runs the bytes backwards,
and of a reduction each part then takes its share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fcoll.errors import NoGradient
from fcoll.groups import by_name, rank_here, size_here
from fcoll.reductions import REDUCTIONS
from fcoll.table.row import Call, each


def _whole(G: Tensor, x: Tensor, y: Tensor, a: Call) -> Tensor:
    return G


def _mean(G: Tensor, x: Tensor, y: Tensor, a: Call) -> Tensor:
    return G / size_here(a.group_name)


def _others_product(G: Tensor, x: Tensor, y: Tensor, a: Call) -> Tensor:
    # Not y / x, which zeros spoil: the product of all parts but ours. Differentiable again.
    n, rank = by_name(a.group_name).n, rank_here(a.group_name)
    parts = a.call("all_gather_into_tensor", x.unsqueeze(0), n, a.group_name)
    if isinstance(rank, int):
        others = parts.roll(-rank, 0)[1:]  # ours is first, then left out
    else:
        ours = torch.arange(n, device=x.device).view(-1, *[1] * x.dim()) == rank
        others = parts.masked_fill(ours, 1)
    return G * others.prod(0).conj()


def _tied(G: Tensor, x: Tensor, y: Tensor, a: Call) -> Tensor:
    # Parts that tie for the extreme share alike, as torch.amax does.
    tied = (x == y).to(G.dtype)
    return G * tied / a.call("all_reduce", tied, "sum", a.group_name)


_SHARE: dict[str, Callable[[Tensor, Tensor, Tensor, Call], Tensor]] = {
    "whole": _whole,
    "mean": _mean,
    "others_product": _others_product,
    "tied": _tied,
}


def share(G: Tensor, x: Tensor, y: Tensor, a: Call) -> Tensor:
    """The gradient of this rank's part x, from the gradient G of the whole result y; or of each in
    lists of them."""
    kind = REDUCTIONS[a.reduce_op].share
    if kind is None:
        why = "bits do not vary smoothly"
        raise NoGradient(op=f"{a.op} with {a.reduce_op}", why=why, hint="")
    rule = _SHARE[kind]
    return each(lambda G, x, y: rule(G, x, y, a), G, x, y)


def share_of(whole: Callable[[Tensor], Tensor], grad: Tensor, a: Call) -> Tensor:
    """The gradient of this rank's part, where ``whole`` makes of this rank's piece of a result, or
    of its gradient, all of it."""
    y = whole(a.saved_output) if a.saved_output is not None else None
    return share(whole(grad), a.saved_input, y, a)  # type: ignore[arg-type]


def saves(a: Call) -> tuple[str, ...]:
    """Whose values the gradient needs."""
    needed = {"others_product": ("input",), "tied": ("input", "output")}
    return needed.get(REDUCTIONS[a.reduce_op].share or "", ())
