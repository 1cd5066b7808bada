"""The parts that the families' checks are made of.

A check runs in the eager kernel, in the fake kernel and, while Dynamo traces, in the user function;
so the same mistake is the same error everywhere. Sizes may be symbolic: what cannot be known while
tracing is not a mistake yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fcoll._torch import guard_or_false, size_hint
from fcoll.errors import (
    BadDim,
    BadOption,
    BadOutput,
    BadSizes,
    MismatchedLists,
    RankOutOfGroup,
    UnevenShard,
    fail,
)
from fcoll.groups import check_device, group_label, group_rank, group_size
from fcoll.table.row import Shape, Sizes


def check_group_size(op: str, n: int, group_name: str) -> None:
    if n != group_size(group_name):
        fail(BadOption, op=op, arg="group_size", value=n, known=f"{group_size(group_name)}")


def check_dim(op: str, x: Tensor, dim: int) -> None:
    if not 0 <= dim < x.dim():
        hint = f"Use 0 to {x.dim() - 1}." if x.dim() else "Reshape the 0-dim tensor to (1,)."
        fail(BadDim, op=op, dim=dim, ndim=x.dim(), hint=hint)


def check_rank(op: str, arg: str, rank: int, group_name: str) -> None:
    check_member(op, arg, rank, group_size(group_name))


def check_member(op: str, arg: str, rank: int, n: int) -> int:
    if not 0 <= rank < n:
        fail(RankOutOfGroup, op=op, arg=arg, rank=rank, n=n, last=n - 1)
    return rank


def check_divisible(op: str, x: Tensor, dim: int, group_name: str, remedy: str = "sizes=") -> None:
    n = group_size(group_name)
    size = x.shape[dim]
    if guard_or_false(size % n != 0):
        padded = shown((size + n - 1) // n * n)
        label = group_label(group_name)
        facts = dict(op=op, group=label, dim=dim, size=shown(size), n=n, padded=padded)
        fail(UnevenShard, remedy=remedy, **facts)


def shown(size: int) -> str:
    """A size in a message: of a symbolic one the value that it has in this trace."""
    if torch.compiler.is_dynamo_compiling():
        return f"{size}"  # it puts the value there
    return f"{size_hint(size)}"


def listed(sizes: Sequence[int]) -> str:
    return "[" + ", ".join([shown(s) for s in sizes]) + "]"


def complaint(sizes: Sequence[int], n: int, total: int | None) -> str:
    """The error in n sizes that should add up to total; empty if there is none."""
    if len(sizes) != n:
        return f"there are {len(sizes)} of them"
    for s in sizes:
        if guard_or_false(s < 0):
            return "one is negative"
    if total is not None and guard_or_false(sum(sizes) != total):
        return f"they add up to {shown(sum(sizes))}, the tensor has {shown(total)}"
    return ""


def check_sizes(op: str, sizes: Sequence[int], n: int, total: int | None = None) -> None:
    why = complaint(sizes, n, total)
    if why:
        fail(BadSizes, op=op, sizes=listed(sizes), why=why, n=n)


def check_my_size(op: str, x: Tensor, dim: int, sizes: Sequence[int], group_name: str) -> None:
    """Rank r's part has size sizes[r] along dim."""
    r = group_rank(group_name)
    have = x.shape[dim] if x.dim() else 1
    if guard_or_false(have != sizes[r]):
        why = f"the tensor has {shown(have)} along dim {dim}, sizes[{r}] is this rank's"
        fail(BadSizes, op=op, sizes=listed(sizes), why=why, n=len(sizes))


def check_list(op: str, inputs: Sequence[Tensor], dims: Sequence[int] | None = None) -> None:
    if len(inputs) == 0:
        fail(MismatchedLists, op=op, why="the list of tensors is empty", hint="Skip the call.")
    if len({x.device for x in inputs}) != 1:
        devices = ", ".join(sorted({str(x.device) for x in inputs}))
        hint = "Move them to one, or make a call for each device."
        fail(MismatchedLists, op=op, why=f"the tensors are on {devices}", hint=hint)
    if dims is not None and len(dims) != len(inputs):
        why = f"there are {len(inputs)} tensors and {len(dims)} dims"
        fail(MismatchedLists, op=op, why=why, hint="Give one dim, or one for each tensor.")


def check_gathers(
    op: str, input: Tensor, group_size: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> None:
    """The check of collectives that put the ranks' parts together along dim."""
    check_device(op, input.device.type, group_name)
    check_group_size(op, group_size, group_name)
    if input.dim():
        check_dim(op, input, dim)
    elif dim:
        fail(BadDim, op=op, dim=dim, ndim=0, hint="A 0-dim tensor is gathered along a new dim 0.")
    if sizes is not None:
        check_sizes(op, sizes, group_size)
        check_my_size(op, input, dim, sizes, group_name)


def check_scatters(
    op: str, input: Tensor, group_size: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> None:
    """The check of collectives that cut a tensor into the ranks' parts along dim."""
    check_device(op, input.device.type, group_name)
    check_group_size(op, group_size, group_name)
    check_dim(op, input, dim)
    if sizes is None:
        check_divisible(op, input, dim, group_name)
    else:
        check_sizes(op, sizes, group_size, input.shape[dim])


def check_out(op: str, out: Tensor, shape: Shape, like: Tensor) -> None:
    """The caller's out tensor must be just what the collective would have made."""
    got = (list(out.shape), out.dtype, out.device, out.is_contiguous())
    want = (list(shape), like.dtype, like.device, True)
    if got != want:
        fail(BadOutput, op=op, got=_layout(*got), want=_layout(*want))


def _layout(shape: Shape, dtype: torch.dtype, device: torch.device, contiguous: bool) -> str:
    return f"shape {listed(shape)}, {dtype}, {device}" + ("" if contiguous else ", strided")
