"""Parameters whose gradients are averaged in the backward pass itself: what a compiled step uses.

Each bucket of parameters goes through one autograd function that hands them on unchanged; its
backward gets their gradients, sends them as one message and gives each its part. So the all-reduces
are functional collectives in the backward graph, one a bucket, where the compiler can move them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.functions import all_reduce, wait_tensor
from fcoll.groups import GroupLike

Reduce = Callable[[Tensor], Tensor]


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduce: Reduce, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce = reduce
        ctx.save_for_backward(*tensors[n:])
        return tuple(p.view_as(p) for p in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        carried = ctx.saved_tensors
        if carried:
            grads = tuple(g + c for g, c in zip(grads, carried, strict=True))
        return None, None, *in_one_message(grads, ctx.reduce), *(None for _ in carried)


def in_one_message(tensors: Sequence[Tensor], send: Reduce) -> list[Tensor]:
    """The results of a collective on the tensors, sent as one message; in their shapes."""
    if len(tensors) == 1:
        return [wait_tensor(send(tensors[0]))]
    flat = torch.cat([x.reshape(-1) for x in tensors])
    parts = wait_tensor(send(flat)).split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def averaged(
    params: Sequence[Tensor],
    group: GroupLike = None,
    *,
    hook: Reduce | None = None,
    carried: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """The parameters, whose gradients are the mean over the group: one message for all of them.

    ``hook`` is what is done with the flat gradients instead. ``carried`` are gradients of this rank
    from before, one for each parameter, that are added to the new ones and averaged with them. A
    parameter that the backward pass does not reach has the gradient zero, unless it is alone here.

    >>> w = torch.ones(3, requires_grad=True)
    >>> from fcoll.training.averaged import averaged
    >>> (v,) = averaged([w])
    >>> (v * (rank + 1)).sum().backward()
    >>> w.grad.tolist() == [(n + 1) / 2] * 3
    True
    """
    if hook is None:

        def hook(flat: Tensor) -> Tensor:
            return all_reduce(flat, "avg", group)

    return _Averaged.apply(hook, len(params), *params, *carried)
