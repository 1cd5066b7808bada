"""Blocks between ranks: a plan carried out by one all_to_all_single, and lists of tensors for each
rank, as lookups and products send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll import functions
from fcoll.eager.small_messages import is_fake
from fcoll.groups import Group
from fcoll.sharded.layout_agreement import is_traced
from fcoll.sharded.transfer_plan import BlockTransfer, Box, TransferPlan, are_rows_of
from fcoll.table.stacks import Linear


def all_to_all(packed: Tensor, group: Group, outs: Sequence[int], ins: Sequence[int]) -> Tensor:
    """``outs[r]`` elements from each rank r of the group, for ``ins[r]`` of the flat tensor."""
    if is_fake(group) and not is_traced():  # torch's fake groups refuse ranks that send nothing
        return packed.new_zeros(sum(outs))
    return functions.wait_tensor(
        functions.all_to_all_single(packed, group.name, list(outs), list(ins))
    )


def exchange_lists(
    group: Group,
    sent: Sequence[Sequence[Tensor]],
    expected: Sequence[int],
    like: Tensor,
    anchors: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Tensor]]:
    """What the ranks sent to this one, as one flat tensor and by rank.

    ``sent[r]`` are tensors for rank r of the group, ``expected[r]`` is the number of elements that
    come from it. ``anchors`` are empty tensors that tie a rank which sends nothing to the graph.
    """
    pieces = [piece.reshape(-1) for to in sent for piece in to]
    splits = [sum(piece.numel() for piece in to) for to in sent]
    packed = torch.cat([*pieces, *anchors]) if pieces or anchors else like
    arrived = all_to_all(packed, group, expected, splits)
    return arrived, list(arrived.split(list(expected)))


def exchange(
    plan: TransferPlan,
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
    anchor, *results = _Exchange.apply(plan, group, like, anchor, *tensors)
    return results, anchor


class _Exchange(torch.autograd.Function):
    """The gradient of an exchange is the exchange back."""

    @staticmethod
    def forward(ctx: Any, plan: TransferPlan, group: Group, like: Tensor, *tensors: Tensor) -> Any:
        ctx.plan, ctx.group, ctx.like = plan, group, like
        anchor, *sources = tensors
        return anchor.clone(), *_moved(plan, group, sources, like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        anchor, *targets = grads
        sources = _Exchange.apply(ctx.plan.reversed, ctx.group, ctx.like, anchor, *targets)
        return None, None, None, *sources


def _moved(
    plan: TransferPlan,
    group: Group,
    tensors: Sequence[Tensor],
    like: Tensor,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    me = group.ranks[group.rank]
    mine = [i for i, block in enumerate(plan.sources) if block.rank == me]
    sources = dict(zip(mine, tensors, strict=True))
    to_here = [i for i, block in enumerate(plan.targets) if block.rank == me]

    staying, parts = plan.kept_on(me), list[BlockTransfer]()
    arrived = like.new_empty(0)
    if plan.moves:
        sent, received = dict(plan.sent_by(me)), dict(plan.received_by(me))
        single = len(mine) == 1 and tensors[0].is_contiguous()
        source = plan.sources[mine[0]].box if single else None
        target = plan.targets[to_here[0]].box if len(to_here) == 1 and into is None else None
        sends_memory = _is_memory_of(sent, staying, source, group)
        if sends_memory or _is_memory_of(received, staying, target, group):
            # what stays goes along: the carrier copies it to its place, and sends it nowhere
            sent[me] = received[me] = staying
            staying = []
        parts = _in_order(received, group)
        order = _in_order(sent, group)
        packed = tensors[0].view(-1) if sends_memory else _packed(plan, sources, order, like)
        splits = _sizes(received, group), _sizes(sent, group)
        arrived = all_to_all(packed, group, *splits)
    if into is None and not staying and len(to_here) == 1:
        whole = plan.targets[to_here[0]].box
        if are_rows_of([t.box for t in parts], whole):
            return [arrived.view(whole.sizes)]
    results = into or [arrived.new_empty(plan.targets[j].box.sizes) for j in to_here]
    _unpack(plan, dict(zip(to_here, results, strict=True)), sources, staying, parts, arrived)
    return list(results)


_ByRank = dict[int, list[BlockTransfer]]


def _is_memory_of(
    moved: _ByRank, staying: list[BlockTransfer], whole: Box | None, group: Group
) -> bool:
    """Is what is sent or received, with what stays in between, the memory of one shard? And does
    more move than stays: else a copy of what stays costs more than it saves."""
    volume = sum(t.box.volume for transfers in moved.values() for t in transfers)
    if whole is None or volume < sum(t.box.volume for t in staying):
        return False
    everything = {**moved, group.ranks[group.rank]: staying}
    return are_rows_of([t.box for t in _in_order(everything, group)], whole)


def _in_order(by_rank: _ByRank, group: Group) -> list[BlockTransfer]:
    """In the order of the group's ranks, which need not be that of the world's."""
    return [t for rank in group.ranks for t in by_rank.get(rank, ())]


def _sizes(by_rank: _ByRank, group: Group) -> list[int]:
    """The elements for or from each rank of the group."""
    return [sum(t.box.volume for t in by_rank.get(rank, ())) for rank in group.ranks]


def _packed(
    plan: TransferPlan, sources: dict[int, Tensor], parts: Sequence[BlockTransfer], like: Tensor
) -> Tensor:
    """The parts that are sent, one behind the other in a flat tensor."""
    pieces = [sources[t.source][t.box.within(plan.sources[t.source].box)] for t in parts]
    packed = like.new_empty(sum(piece.numel() for piece in pieces))
    for place, piece in zip(packed.split([p.numel() for p in pieces]), pieces, strict=True):
        place.view(piece.shape).copy_(piece)
    return packed


def _unpack(
    plan: TransferPlan,
    results: dict[int, Tensor],
    sources: dict[int, Tensor],
    staying: Sequence[BlockTransfer],
    parts: Sequence[BlockTransfer],
    arrived: Tensor,
) -> None:
    """Write the targets: of what stayed, and of what arrived."""
    for t in staying:
        block = sources[t.source][t.box.within(plan.sources[t.source].box)]
        results[t.target][t.box.within(plan.targets[t.target].box)].copy_(block)
    pieces = arrived.split([t.box.volume for t in parts])
    for t, piece in zip(parts, pieces, strict=True):
        inside = t.box.within(plan.targets[t.target].box)
        results[t.target][inside].copy_(piece.view(t.box.sizes))


# -- blocks in one flat tensor ---


def assemble(flat: Tensor, boxes: Sequence[Box], size: Sequence[int]) -> Tensor:
    """A tensor of this size of its blocks, which lie one behind the other in ``flat``."""
    if are_rows_of(boxes, Box.whole(size)):
        return flat.view(size)
    return Linear.apply(flat, _filled, _cut, boxes, size)  # type: ignore[no-any-return]


def _filled(flat: Tensor, boxes: Sequence[Box], size: Sequence[int]) -> Tensor:
    out, whole = flat.new_empty(size), Box.whole(size)
    for box, part in zip(boxes, flat.split([b.volume for b in boxes]), strict=True):
        out[box.within(whole)].copy_(part.view(box.sizes))
    return out


def _cut(x: Tensor, boxes: Sequence[Box], size: Sequence[int]) -> Tensor:
    """The blocks of a tensor, one behind the other."""
    return Linear.apply(x, _pieces, assemble, boxes, size)  # type: ignore[no-any-return]


def _pieces(x: Tensor, boxes: Sequence[Box], size: Sequence[int]) -> Tensor:
    whole = Box.whole(size)
    return torch.cat([x[box.within(whole)].reshape(-1) for box in boxes])
