"""What each collective takes and what it gives: checks and shapes, in terms of its schema.

Both are used by the eager kernel, the fake kernel and, while Dynamo traces, the user function;
so the same mistake is the same error everywhere, and a fake result has the shape of a real one.
Sizes may be symbolic: what cannot be known while tracing is not a mistake yet.
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
    BadPermutation,
    BadSizes,
    BadSplits,
    MismatchedLists,
    RankOutOfGroup,
    UnevenShard,
    fail,
)
from fcoll.groups import check_device, group_label, group_rank, group_size
from fcoll.reductions import check_reduction

Shape = list[int]
Sizes = Sequence[int] | None
GRADS = ("sum", "identity")


# -- parts of checks ---


def _group_size(op: str, n: int, group_name: str) -> None:
    if n != group_size(group_name):
        fail(BadOption, op=op, arg="group_size", value=n, known=f"{group_size(group_name)}")


def _dim(op: str, x: Tensor, dim: int) -> None:
    if not 0 <= dim < x.dim():
        hint = f"Use 0 to {x.dim() - 1}." if x.dim() else "Reshape the 0-dim tensor to (1,)."
        fail(BadDim, op=op, dim=dim, ndim=x.dim(), hint=hint)


def _rank(op: str, arg: str, rank: int, group_name: str) -> None:
    n = group_size(group_name)
    if not 0 <= rank < n:
        fail(RankOutOfGroup, op=op, arg=arg, rank=rank, n=n, last=n - 1)


def _divisible(op: str, x: Tensor, dim: int, group_name: str, remedy: str = "sizes=") -> None:
    n = group_size(group_name)
    size = x.shape[dim]
    if guard_or_false(size % n != 0):
        padded = _shown((size + n - 1) // n * n)
        label = group_label(group_name)
        facts = dict(op=op, group=label, dim=dim, size=_shown(size), n=n, padded=padded)
        fail(UnevenShard, remedy=remedy, **facts)


def _shown(size: int) -> str:
    """A size in a message: of a symbolic one the value that it has in this trace."""
    if torch.compiler.is_dynamo_compiling():
        return f"{size}"  # it puts the value there
    return f"{size_hint(size)}"


def _listed(sizes: Sequence[int]) -> str:
    return "[" + ", ".join([_shown(s) for s in sizes]) + "]"


def _complaint(sizes: Sequence[int], n: int, total: int | None) -> str:
    """What is wrong with n sizes that should add up to total; empty if nothing is."""
    if len(sizes) != n:
        return f"there are {len(sizes)} of them"
    for s in sizes:
        if guard_or_false(s < 0):
            return "one is negative"
    if total is not None and guard_or_false(sum(sizes) != total):
        return f"they add up to {_shown(sum(sizes))}, the tensor has {_shown(total)}"
    return ""


def _sizes(op: str, sizes: Sequence[int], n: int, total: int | None = None) -> None:
    why = _complaint(sizes, n, total)
    if why:
        fail(BadSizes, op=op, sizes=_listed(sizes), why=why, n=n)


def _my_size(op: str, x: Tensor, dim: int, sizes: Sequence[int], group_name: str) -> None:
    """Rank r's part has size sizes[r] along dim."""
    r = group_rank(group_name)
    have = x.shape[dim] if x.dim() else 1
    if guard_or_false(have != sizes[r]):
        why = f"the tensor has {_shown(have)} along dim {dim}, sizes[{r}] is this rank's"
        fail(BadSizes, op=op, sizes=_listed(sizes), why=why, n=len(sizes))


def _grad(op: str, grad: str) -> None:
    if grad not in GRADS:
        fail(BadOption, op=op, arg="grad", value=grad, known=", ".join(GRADS))


def _list(op: str, inputs: Sequence[Tensor], dims: Sequence[int] | None = None) -> None:
    if len(inputs) == 0:
        fail(MismatchedLists, op=op, why="the list of tensors is empty", hint="Skip the call.")
    if len({x.device for x in inputs}) != 1:
        devices = ", ".join(sorted({str(x.device) for x in inputs}))
        hint = "Move them to one, or make a call for each device."
        fail(MismatchedLists, op=op, why=f"the tensors are on {devices}", hint=hint)
    if dims is not None and len(dims) != len(inputs):
        why = f"there are {len(inputs)} tensors and {len(dims)} dims"
        fail(MismatchedLists, op=op, why=why, hint="Give one dim, or one for each tensor.")


def _gathers(op: str, x: Tensor, n: int, group_name: str, dim: int, sizes: Sizes) -> None:
    check_device(op, x.device.type, group_name)
    _group_size(op, n, group_name)
    if x.dim():
        _dim(op, x, dim)
    elif dim:
        fail(BadDim, op=op, dim=dim, ndim=0, hint="A 0-dim tensor is gathered along a new dim 0.")
    if sizes is not None:
        _sizes(op, sizes, n)
        _my_size(op, x, dim, sizes, group_name)


def _scatters(op: str, x: Tensor, n: int, group_name: str, dim: int, sizes: Sizes) -> None:
    check_device(op, x.device.type, group_name)
    _group_size(op, n, group_name)
    _dim(op, x, dim)
    if sizes is None:
        _divisible(op, x, dim, group_name)
    else:
        _sizes(op, sizes, n, x.shape[dim])


# -- checks, one a collective, with its schema's arguments ---


def check_all_reduce(
    input: Tensor, reduce_op: str, group_name: str, grad: str = "sum", op: str = "all_reduce"
) -> None:
    check_device(op, input.device.type, group_name)
    check_reduction(op, reduce_op, input.dtype)
    _grad(op, grad)


def check_all_gather(
    input: Tensor, group_size: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> None:
    _gathers("all_gather_into_tensor", input, group_size, group_name, dim, sizes)


def check_reduce_scatter(
    input: Tensor,
    reduce_op: str,
    group_size: int,
    group_name: str,
    dim: int = 0,
    sizes: Sizes = None,
) -> None:
    check_reduction("reduce_scatter_tensor", reduce_op, input.dtype)
    _scatters("reduce_scatter_tensor", input, group_size, group_name, dim, sizes)


def check_all_to_all(
    input: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    group_name: str,
) -> None:
    op = "all_to_all_single"
    check_device(op, input.device.type, group_name)
    _dim(op, input, 0)
    n = group_size(group_name)
    for arg, splits, total in (
        ("input_splits", input_split_sizes, input.shape[0]),
        ("output_splits", output_split_sizes, None),
    ):
        why = _complaint(splits, n, total)
        if why:
            fail(BadSplits, op=op, arg=arg, splits=_listed(splits), why=why, n=n)


def check_even_splits(
    x: Tensor, output_splits: Sizes, input_splits: Sizes, group_name: str
) -> None:
    """Without splits, dim 0 must divide; one of the two alone is a mistake."""
    op = "all_to_all_single"
    n = group_size(group_name)
    for given, missing in (("input_splits", output_splits), ("output_splits", input_splits)):
        other = input_splits if given == "input_splits" else output_splits
        if missing is None and other is not None:
            why = "the other one is missing"
            fail(BadSplits, op=op, arg=given, splits=_listed(other), why=why, n=n)
    _dim(op, x, 0)
    _divisible(op, x, 0, group_name, "output_splits= and input_splits=")


def check_broadcast(input: Tensor, src: int, group_name: str) -> None:
    check_device("broadcast", input.device.type, group_name)
    _rank("broadcast", "src", src, group_name)


def check_reduce(input: Tensor, reduce_op: str, dst: int, group_name: str) -> None:
    check_device("reduce", input.device.type, group_name)
    check_reduction("reduce", reduce_op, input.dtype)
    _rank("reduce", "dst", dst, group_name)


def check_gather(
    input: Tensor, dst: int, group_size: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> None:
    _rank("gather", "dst", dst, group_name)
    _gathers("gather", input, group_size, group_name, dim, sizes)


def check_scatter(
    input: Tensor, src: int, group_size: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> None:
    _rank("scatter", "src", src, group_name)
    _scatters("scatter", input, group_size, group_name, dim, sizes)


def check_permute(input: Tensor, dst: Sequence[int], group_name: str) -> None:
    check_device("permute", input.device.type, group_name)
    n = group_size(group_name)
    targets = [d for d in dst if d != -1]
    in_range = all([0 <= d < n for d in targets])
    if len(dst) != n or not in_range or len(set(targets)) != len(targets):
        fail(BadPermutation, op="permute", dst=_listed(dst), n=n)


def check_isend(tensor: Tensor, dst: int, tag: int, group_name: str) -> None:
    check_device("isend", tensor.device.type, group_name)
    _rank("isend", "dst", dst, group_name)


def check_irecv(tensor: Tensor, src: int, tag: int, group_name: str) -> None:
    check_device("irecv", tensor.device.type, group_name)
    _rank("irecv", "src", src, group_name)


def check_batch_p2p(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Tensor],
    group_name: str,
) -> None:
    op = "batch_p2p_ops"
    lengths = [len(op_list), len(peer_list), len(tag_list), len(tensors)]
    if len(set(lengths)) != 1:
        why = f"{lengths[0]} ops, {lengths[1]} peers, {lengths[2]} tags, {lengths[3]} tensors"
        fail(MismatchedLists, op=op, why=why, hint="Give one of each for every transfer.")
    _list(op, tensors)
    check_device(op, tensors[0].device.type, group_name)
    for name, peer in zip(op_list, peer_list, strict=True):
        if name not in ("isend", "irecv"):
            fail(BadOption, op=op, arg="op", value=name, known="isend, irecv")
        _rank(op, "peer", peer, group_name)


def check_barrier(group_name: str) -> None:
    group_size(group_name)


def check_all_reduce_coalesced(
    inputs: Sequence[Tensor], reduce_op: str, group_name: str, grad: str = "sum"
) -> None:
    op = "all_reduce_coalesced"
    _list(op, inputs)
    for x in inputs:
        check_all_reduce(x, reduce_op, group_name, grad, op)


def check_all_gather_coalesced(
    inputs: Sequence[Tensor], group_size: int, group_name: str, dims: Sizes = None
) -> None:
    op = "all_gather_into_tensor_coalesced"
    _list(op, inputs, dims)
    for i, x in enumerate(inputs):
        _gathers(op, x, group_size, group_name, dims[i] if dims is not None else 0, None)


def check_reduce_scatter_coalesced(
    inputs: Sequence[Tensor], reduce_op: str, group_size: int, group_name: str, dims: Sizes = None
) -> None:
    op = "reduce_scatter_tensor_coalesced"
    _list(op, inputs, dims)
    for i, x in enumerate(inputs):
        check_reduction(op, reduce_op, x.dtype)
        _scatters(op, x, group_size, group_name, dims[i] if dims is not None else 0, None)


def check_shard_dim_alltoall(
    input: Tensor, gather_dim: int, shard_dim: int, group_name: str
) -> None:
    op = "shard_dim_alltoall"
    check_device(op, input.device.type, group_name)
    _dim(op, input, gather_dim)
    _dim(op, input, shard_dim)
    _divisible(op, input, shard_dim, group_name, "a dim that divides")


def check_all_gather_out(input: Tensor, group_size: int, group_name: str, *, out: Tensor) -> None:
    op = "all_gather_into_tensor_out"
    _gathers(op, input, group_size, group_name, 0, None)
    _out(op, out, gathered(input, group_size), input)


def check_reduce_scatter_out(
    input: Tensor, reduce_op: str, group_size: int, group_name: str, *, out: Tensor
) -> None:
    op = "reduce_scatter_tensor_out"
    check_reduction(op, reduce_op, input.dtype)
    _scatters(op, input, group_size, group_name, 0, None)
    _out(op, out, scattered(input, group_size, group_name), input)


def _out(op: str, out: Tensor, shape: Shape, like: Tensor) -> None:
    """The caller's out tensor must be just what the collective would have made."""
    got = (list(out.shape), out.dtype, out.device, out.is_contiguous())
    want = (list(shape), like.dtype, like.device, True)
    if got != want:
        fail(BadOutput, op=op, got=_layout(*got), want=_layout(*want))


def _layout(shape: Shape, dtype: torch.dtype, device: torch.device, contiguous: bool) -> str:
    return f"shape {_listed(shape)}, {dtype}, {device}" + ("" if contiguous else ", strided")


# -- shapes: the sizes of the result, from the checked arguments ---


def same(input: Tensor, *_: object) -> Shape:
    return list(input.shape)


def same_each(inputs: Sequence[Tensor], *_: object) -> list[Shape]:
    return [list(x.shape) for x in inputs]


def nothing(*_: object) -> Shape:
    return [0]


def gathered(input: Tensor, n: int, dim: int = 0, sizes: Sizes = None) -> Shape:
    shape = list(input.shape) or [1]
    shape[dim] = shape[dim] * n if sizes is None else sum(sizes)
    return shape


def scattered(input: Tensor, n: int, group_name: str, dim: int = 0, sizes: Sizes = None) -> Shape:
    shape = list(input.shape)
    shape[dim] = shape[dim] // n if sizes is None else sizes[group_rank(group_name)]
    return shape
