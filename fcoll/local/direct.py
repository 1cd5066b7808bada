"""dist.all_reduce, broadcast and reduce_scatter of LocalTensors in a mode, not through c10d.

Boxing the call for c10d's dispatcher and unboxing it again takes as long as the collective itself
on 64 ranks. Whatever is not the plain case takes that way: another mode that wants to see the op,
work to be returned, a coalescing manager, gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcoll.local import _torch, collectives, reduce
from fcoll.local.tensor import LocalTensor


def _group(tensor: Any, group: Any) -> Any:
    """The process group if the call is plain, else None."""
    if not isinstance(tensor, LocalTensor) or type(tensor._stack) is not Tensor:
        return None
    if tensor.requires_grad or tensor.is_complex() or not _torch.one_mode():
        return None
    group = _torch.default_group() if group is None else group
    member = isinstance(group, dist.ProcessGroup) and group.rank() >= 0
    return group if member and not _torch.is_coalescing(group) else None


def _run(name: str, tensor: LocalTensor, out: LocalTensor, group: Any, **args: Any) -> None:
    with _torch.below_the_mode():
        collectives.write(collectives.run(name, tensor, group, **args), out)


def all_reduce(
    old: Callable[..., Any],
    tensor: Any,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """dist.all_reduce."""
    known = reduce.plain_name(op)
    found = None if async_op or known is None else _group(tensor, group)
    if found is None:
        return reduce.noting_factor(old, tensor, op, group, async_op)
    return _run("all_reduce", tensor, tensor, found, reduce_op=known)


def broadcast(
    old: Callable[..., Any],
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """dist.broadcast."""
    one_root = (src is None) != (group_src is None)
    found = _group(tensor, group) if one_root and not async_op else None
    if found is None:
        return old(tensor, src, group, async_op, group_src)
    root = group_src if src is None else dist.get_group_rank(found, src)
    if not isinstance(root, int) or not 0 <= root < found.size():
        return old(tensor, src, group, async_op, group_src)
    return _run("broadcast", tensor, tensor, found, src=root)


def reduce_scatter(
    old: Callable[..., Any],
    output: Any,
    input: Any,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """dist.reduce_scatter_single, and under its former name."""
    known = reduce.plain_name(op)
    found = None if async_op or known is None else _group(input, group)
    if found is None or _group(output, group) is None:
        return reduce.noting_factor(old, output, input, op, group, async_op)
    if message := getattr(old, "__deprecated__", None):
        warnings.warn(message, FutureWarning, stacklevel=3)
    return _run("reduce_scatter_tensor", input, output, found, reduce_op=known)
