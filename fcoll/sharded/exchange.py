"""A plan carried out: one all_to_all_single of what moves; what stays is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll import functions
from fcoll.groups import Group
from fcoll.sharded.plan import Plan, Transfer


def exchanged(
    plan: Plan,
    group: Group,
    tensors: Sequence[Tensor],
    like: Tensor,
    anchor: Tensor | None = None,
    into: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """The tensors of this rank's targets, of those of its sources, both in the plan's order.

    ``like`` gives dtype and device; ``into`` are tensors to write. With an anchor the result is
    differentiable: also on a rank that has no tensor before or after, by the anchor that comes
    back.
    """
    if anchor is None:
        return _moved(plan, group, tensors, like, into), None
    anchor, *made = _Exchange.apply(plan, group, like, anchor, *tensors)
    return made, anchor


class _Exchange(torch.autograd.Function):
    """The gradient of an exchange is the exchange back."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, group: Group, like: Tensor, *tensors: Tensor) -> Any:
        ctx.plan, ctx.group, ctx.like = plan, group, like
        anchor, *sources = tensors
        return anchor.clone(), *_moved(plan, group, sources, like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        anchor, *targets = grads
        made = _Exchange.apply(ctx.plan.reversed, ctx.group, ctx.like, anchor, *targets)
        return None, None, None, *made


def _moved(
    plan: Plan,
    group: Group,
    tensors: Sequence[Tensor],
    like: Tensor,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    me = group.ranks[group.rank]
    place = {rank: i for i, rank in enumerate(group.ranks)}
    mine = [i for i, held in enumerate(plan.sources) if held.rank == me]
    sources = dict(zip(mine, tensors, strict=True))
    wanted = [i for i, held in enumerate(plan.targets) if held.rank == me]

    arrived = like.new_empty(0)
    parts: list[Transfer] = []
    if plan.moves:
        sent = _in_order(plan.sent_by(me), place)
        received = _in_order(plan.received_by(me), place)
        packed = _packed(plan, sources, [t for _, ts in sent for t in ts], like)
        splits = _sizes(received, place), _sizes(sent, place)
        arrived = functions.wait_tensor(functions.all_to_all_single(packed, group.name, *splits))
        parts = [t for _, ts in received for t in ts]
    kept = plan.kept_on(me)
    if into is None and len(wanted) == len(parts) == 1 and not kept:
        return [arrived.view(parts[0].box.sizes)]  # it came in one piece: no copy
    made = into or [arrived.new_empty(plan.targets[j].box.sizes) for j in wanted]
    _unpack(plan, dict(zip(wanted, made, strict=True)), sources, kept, parts, arrived)
    return list(made)


_ByRank = list[tuple[int, list[Transfer]]]


def _in_order(by_rank: _ByRank, place: dict[int, int]) -> _ByRank:
    """In the order of the group's ranks, which need not be that of the world's."""
    return sorted(by_rank, key=lambda item: place[item[0]])


def _sizes(by_rank: _ByRank, place: dict[int, int]) -> list[int]:
    """The elements for or from each rank of the group."""
    sizes = [0] * len(place)
    for rank, transfers in by_rank:
        sizes[place[rank]] = sum(t.box.volume for t in transfers)
    return sizes


def _packed(
    plan: Plan, sources: dict[int, Tensor], parts: Sequence[Transfer], like: Tensor
) -> Tensor:
    """What is sent, one behind the other; a shard that goes as it is, is not copied."""
    pieces = [sources[t.source][t.box.within(plan.sources[t.source].box)] for t in parts]
    if len(pieces) == 1:
        return pieces[0].reshape(-1)
    packed = like.new_empty(sum(piece.numel() for piece in pieces))
    for place, piece in zip(packed.split([p.numel() for p in pieces]), pieces, strict=True):
        place.view(piece.shape).copy_(piece)
    return packed


def _unpack(
    plan: Plan,
    made: dict[int, Tensor],
    sources: dict[int, Tensor],
    kept: Sequence[Transfer],
    parts: Sequence[Transfer],
    arrived: Tensor,
) -> None:
    """Write the targets: of what stayed, and of what arrived."""
    for t in kept:
        block = sources[t.source][t.box.within(plan.sources[t.source].box)]
        made[t.target][t.box.within(plan.targets[t.target].box)].copy_(block)
    pieces = arrived.split([t.box.volume for t in parts])
    for t, piece in zip(parts, pieces, strict=True):
        inside = t.box.within(plan.targets[t.target].box)
        made[t.target][inside].copy_(piece.view(t.box.sizes))
