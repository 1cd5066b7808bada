"""The whole tensor on one rank or on all."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll import functions
from fcoll.sharded import _torch
from fcoll.sharded.agreement import agree
from fcoll.sharded.boxes import Box, are_rows_of
from fcoll.sharded.errors import BadGather
from fcoll.sharded.exchange import exchanged
from fcoll.sharded.layout import anchor_of, held, like, local_tensors
from fcoll.sharded.plan import Held, Plan


@_torch.uncompiled
def gather_into(
    st: Any, dst: int, out: Tensor | None, enforce_dtype: bool, dtype: torch.dtype | None
) -> None:
    """See ShardedTensor.gather."""
    if enforce_dtype:
        message = "`enforce_dtype` is deprecated. Please use `dtype` instead."
        warnings.warn(message, FutureWarning, stacklevel=3)
    g, size = st.group, st._metadata.size
    if not isinstance(dst, int) or not 0 <= dst < g.n:
        hint = f"Ranks are counted within the group: 0 to {g.n - 1}."
        raise BadGather(rank=g.rank, why=f"dst={dst!r} is none of its {g.n} ranks", hint=hint)
    _check_out(g.rank, dst, size, out)
    agree("gather", st)
    blocks = held(st)
    plan = Plan(blocks, (Held(g.ranks[dst], Box.whole(size)),))
    with torch.no_grad():
        sent = like(st) if dtype is None else like(st).to(dtype)
        tensors = [tensor.to(sent.dtype) for tensor in local_tensors(st, blocks)]
        exchanged(plan, g, tensors, sent, into=[] if out is None else [out])


def _check_out(rank: int, dst: int, size: torch.Size, out: Tensor | None) -> None:
    if rank != dst:
        if out is not None:
            why = "Argument ``dst_tensor`` must NOT be specified on non-destination ranks."
            raise BadGather(rank=rank, why=why, hint=f"Pass out= on rank {dst} only.")
        return
    if out is None:
        why = f"Argument ``dst_tensor`` must be specified on destination rank {dst}"
        raise BadGather(rank=rank, why=why, hint=f"Pass out=torch.empty({tuple(size)}).")
    if out.size() != size:
        why = f"Argument ``dst_tensor`` have size {tuple(out.size())},but should be {tuple(size)}"
        raise BadGather(rank=rank, why=why, hint="Allocate it so.")


@_torch.uncompiled
def all_gather(st: Any) -> Tensor:
    """See ShardedTensor.all_gather."""
    agree("all_gather", st)
    g, size, blocks = st.group, st._metadata.size, held(st)
    ordered = [block.box for rank in g.ranks for block in blocks if block.rank == rank]
    sizes = [sum(b.box.volume for b in blocks if b.rank == rank) for rank in g.ranks]
    tensors = local_tensors(st, blocks)
    anchor = anchor_of(st)
    flat = [tensor.reshape(-1) for tensor in tensors]
    if anchor is not None:
        flat.append(anchor)
    mine = torch.cat(flat) if len(flat) > 1 else flat[0] if flat else like(st)
    gathered = functions.wait_tensor(functions.all_gather_into_tensor(mine, g.name, sizes=sizes))
    return placed(gathered, ordered, size)


def placed(flat: Tensor, boxes: Sequence[Box], size: Sequence[int]) -> Tensor:
    """A tensor of this size of its blocks, which lie one behind the other in ``flat``."""
    if are_rows_of(boxes, Box.whole(size)):
        return flat.view(size)
    return _Placed.apply(flat, boxes, size)  # type: ignore[no-any-return]


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, boxes: Sequence[Box], size: Sequence[int]) -> Tensor:
        ctx.boxes, ctx.size = boxes, size
        whole = flat.new_empty(size)
        all_of_it = Box.whole(size)
        for box, part in zip(boxes, flat.split([b.volume for b in boxes]), strict=True):
            whole[box.within(all_of_it)].copy_(part.view(box.sizes))
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Cut.apply(grads[0], ctx.boxes, ctx.size), None, None


class _Cut(torch.autograd.Function):
    """The blocks of a tensor, one behind the other."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, boxes: Sequence[Box], size: Sequence[int]) -> Tensor:
        ctx.boxes, ctx.size = boxes, size
        all_of_it = Box.whole(size)
        return torch.cat([whole[box.within(all_of_it)].reshape(-1) for box in boxes])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Placed.apply(grads[0], ctx.boxes, ctx.size), None, None
