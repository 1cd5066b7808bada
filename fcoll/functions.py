"""The user functions: a tensor in, a new tensor out.

In eager the result is an AsyncCollectiveTensor, waited for at its first use; under torch.compile
and other tracers a wait node follows the collective. With a group of one there is nothing to wait
for and the result is a plain tensor. The examples run on every rank: ``rank`` is the caller's,
``n`` the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fcoll import _torch
from fcoll.eager import arguments, dispatch
from fcoll.eager import ops as _ops  # noqa: F401  it defines torch.ops.fcoll
from fcoll.eager.arguments import ReduceOpLike, integer, maybe_integers
from fcoll.eager.async_tensor import AsyncCollectiveTensor
from fcoll.eager.dispatch import collective, returned, start
from fcoll.errors import BadOption, fail
from fcoll.groups import GroupLike, group_name, group_size
from fcoll.table.exchange import check_even_splits
from fcoll.transport.native import build

__all__ = [
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "barrier",
    "batch_p2p",
    "broadcast",
    "gather",
    "identity",
    "irecv",
    "isend",
    "permute",
    "reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "shard_dim_alltoall",
    "wait_tensor",
]


def _positive(dim: int, x: Tensor) -> int:
    return dim + x.dim() if -x.dim() <= dim < 0 else dim  # the check names the user's own number


def _each(name: str, dim: int | Sequence[int], xs: Sequence[Tensor]) -> list[int]:
    dims = arguments.dims(name, dim, xs)
    if len(dims) != len(xs):
        return dims  # the check says so
    return [_positive(d, x) for d, x in zip(dims, xs)]  # noqa: B905


def wait_tensor(x: Tensor) -> Tensor:
    """x, complete and plain. On a tensor that nothing is under way for, just x.

    >>> y = fcoll.all_reduce(torch.ones(2))
    >>> type(fcoll.wait_tensor(y)) is torch.Tensor
    True
    """
    if not is_dynamo_compiling() and build.fast and build.fast.wait_tensor(x) is x:
        return x
    if isinstance(x, AsyncCollectiveTensor):
        return x.wait()
    return dispatch.wait(arguments.tensor("wait_tensor", x))


def all_reduce(
    x: Tensor,
    op: ReduceOpLike = "sum",
    group: GroupLike = None,
    *,
    factor: float | None = None,
    grad: Literal["sum", "identity"] = "sum",
) -> Tensor:
    """Reduce x over the group; every rank gets the same result.

    ``all_reduce(x) == all_gather_into_tensor(reduce_scatter_tensor(x))``

    ``op`` is sum, avg, product, min, max, band, bor, bxor or premul_sum (with its ``factor``), in
    any case, or a ``dist.ReduceOp``. The gradient is that of the sum of all ranks' losses, so it is
    summed over the ranks; with ``grad="identity"`` the gradient that arrives is taken to be the
    whole one already, as in Megatron's row-parallel layers, where every rank computes the same
    loss. :func:`identity` is its partner.

    >>> x = torch.arange(4.0) + rank
    >>> torch.equal(fcoll.all_reduce(x), fcoll.all_gather_into_tensor(x[None]).sum(0))
    True
    """
    if factor is None and not is_dynamo_compiling() and build.fast:
        out = build.fast.all_reduce(x, op, group, grad)
        if out is not NotImplemented:
            return out
    x, op = arguments.scaled("all_reduce", arguments.tensor("all_reduce", x), op, factor)
    arguments.text("all_reduce", "grad", grad)
    return collective("all_reduce", group, x, op, grad)


def all_gather_into_tensor(
    x: Tensor, group: GroupLike = None, dim: int = 0, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """The ranks' tensors concatenated along dim, in rank order; the same on every rank.

    Parts may differ in size along dim if ``sizes`` gives each rank's. A 0-dim tensor is gathered
    along a new dim. Its gradient is :func:`reduce_scatter_tensor`.

    >>> x = torch.full((2, 3), float(rank))
    >>> fcoll.all_gather_into_tensor(x, dim=1).shape == (2, 3 * n)
    True
    """
    if sizes is None and not is_dynamo_compiling() and build.fast:
        out = build.fast.all_gather_into_tensor(x, group, dim)
        if out is not NotImplemented:
            return out
    op = "all_gather_into_tensor"
    x, dim = arguments.tensor(op, x), integer(op, "dim", dim)
    return collective(op, group, x, _positive(dim, x), maybe_integers(op, "sizes", sizes))


def reduce_scatter_tensor(
    x: Tensor,
    op: ReduceOpLike = "sum",
    group: GroupLike = None,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    factor: float | None = None,
) -> Tensor:
    """Reduce x over the group and keep this rank's part along dim.

    ``reduce_scatter_tensor(x) == all_reduce(x).chunk(n)[rank]``

    dim must divide by the group's size, or ``sizes`` gives each rank's part of it. Its gradient is
    :func:`all_gather_into_tensor`.

    >>> x = torch.arange(2.0 * n) * (rank + 1)
    >>> torch.equal(fcoll.reduce_scatter_tensor(x), fcoll.all_reduce(x).chunk(n)[rank])
    True
    """
    if sizes is None and factor is None and not is_dynamo_compiling() and build.fast:
        out = build.fast.reduce_scatter_tensor(x, op, group, dim)
        if out is not NotImplemented:
            return out
    me = "reduce_scatter_tensor"
    x, op = arguments.scaled(me, arguments.tensor(me, x), op, factor)
    dim = _positive(integer(me, "dim", dim), x)
    return collective(me, group, x, op, dim, maybe_integers(me, "sizes", sizes))


def all_to_all_single(
    x: Tensor,
    group: GroupLike = None,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> Tensor:
    """Send the r-th part of x's rows to rank r; the parts received, in rank order.

    Without splits the parts are equal. Its gradient is the same with the splits swapped.

    >>> x = torch.arange(n) + 10 * rank  # the rank sends x[r] to r
    >>> torch.equal(fcoll.all_to_all_single(x), torch.arange(n) * 10 + rank)
    True
    """
    if not is_dynamo_compiling() and build.fast:
        out = build.fast.all_to_all_single(x, group, output_splits, input_splits)
        if out is not NotImplemented:
            return out
    op = "all_to_all_single"
    x = arguments.tensor(op, x)
    outs = maybe_integers(op, "output_splits", output_splits)
    ins = maybe_integers(op, "input_splits", input_splits)
    name = group_name(group)
    n = group_size(name)
    if outs is None or ins is None:
        check_even_splits(x, outs, ins, name)
        outs = ins = [x.shape[0] // n] * n
    return collective(op, name, x, outs, ins)


def broadcast(x: Tensor, src: int, group: GroupLike = None) -> Tensor:
    """Rank src's x, on every rank. The others' x gives only shape and dtype.

    Its gradient is :func:`reduce` to src.

    >>> fcoll.broadcast(torch.tensor(float(rank)), src=0).item()
    0.0
    """
    if not is_dynamo_compiling() and build.fast:
        out = build.fast.broadcast(x, src, group)
        if out is not NotImplemented:
            return out
    x, src = arguments.tensor("broadcast", x), integer("broadcast", "src", src)
    return collective("broadcast", group, x, src)


def reduce(
    x: Tensor,
    dst: int,
    op: ReduceOpLike = "sum",
    group: GroupLike = None,
    *,
    factor: float | None = None,
) -> Tensor:
    """``all_reduce(x)`` on rank dst, zeros elsewhere. Its gradient is :func:`broadcast`.

    >>> fcoll.reduce(torch.tensor(1.0), dst=0).item() == (n if rank == 0 else 0)
    True
    """
    x, op = arguments.scaled("reduce", arguments.tensor("reduce", x), op, factor)
    return collective("reduce", group, x, op, integer("reduce", "dst", dst))


def gather(
    x: Tensor,
    dst: int,
    group: GroupLike = None,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """``all_gather_into_tensor(x)`` on rank dst, zeros elsewhere. Its gradient is :func:`scatter`.

    >>> fcoll.gather(torch.tensor([float(rank)]), dst=0).sum().item() == (
    ...     sum(range(n)) if rank == 0 else 0
    ... )
    True
    """
    op = "gather"
    x, dst, dim = arguments.tensor(op, x), integer(op, "dst", dst), integer(op, "dim", dim)
    return collective(op, group, x, dst, _positive(dim, x), maybe_integers(op, "sizes", sizes))


def scatter(
    x: Tensor,
    src: int,
    group: GroupLike = None,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """``broadcast(x, src).chunk(n)[rank]``: only src's values are sent.

    x has the same shape on every rank. Its gradient is :func:`gather`.

    >>> x = torch.arange(float(n)) * (rank == 0)
    >>> fcoll.scatter(x, src=0).item() == rank
    True
    """
    op = "scatter"
    x, src, dim = arguments.tensor(op, x), integer(op, "src", src), integer(op, "dim", dim)
    return collective(op, group, x, src, _positive(dim, x), maybe_integers(op, "sizes", sizes))


def permute(x: Tensor, dst: Sequence[int], group: GroupLike = None) -> Tensor:
    """Rank r's x goes to rank ``dst[r]``. Who receives nothing gets zeros; -1 sends to nobody.

    Its gradient is the inverse permutation.

    >>> ring = [(r + 1) % n for r in range(n)]
    >>> fcoll.permute(torch.tensor(rank), ring).item() == (rank - 1) % n
    True
    """
    x, targets = arguments.tensor("permute", x), arguments.integers("permute", "dst", dst)
    return collective("permute", group, x, targets)


def shard_dim_alltoall(
    x: Tensor, gather_dim: int, shard_dim: int, group: GroupLike = None
) -> Tensor:
    """From sharded along gather_dim to sharded along shard_dim.

    ``shard_dim_alltoall(x, g, s) == all_gather_into_tensor(x, dim=g).chunk(n, s)[rank]``

    >>> x = torch.arange(2.0 * n).reshape(2, n) + rank
    >>> whole = fcoll.all_gather_into_tensor(x, dim=0)
    >>> torch.equal(fcoll.shard_dim_alltoall(x, 0, 1), whole.chunk(n, 1)[rank])
    True
    """
    op = "shard_dim_alltoall"
    x = arguments.tensor(op, x)
    gather, shard = integer(op, "gather_dim", gather_dim), integer(op, "shard_dim", shard_dim)
    return collective(op, group, x, _positive(gather, x), _positive(shard, x))


def _tag(name: str, tag: Any) -> int:
    tag = integer(name, "tag", tag)
    if tag < 0:
        fail(BadOption, op=name, arg="tag", value=tag, known="0 and up")
    return tag


def isend(x: Tensor, dst: int, group: GroupLike = None, tag: int = 0) -> Tensor:
    """Start sending x to rank dst of the group; wait_tensor on the empty tensor it returns.

    An irecv of another length or dtype is a CollectiveMismatch at both waits.
    """
    x, dst, tag = arguments.tensor("isend", x), integer("isend", "dst", dst), _tag("isend", tag)
    name = group_name(group)
    token = start("isend", x, dst, tag, name)
    # a trace must not wait here: two ranks that send to each other would both wait for ever
    return token if _torch.tracing() else returned(token, "isend")


def irecv(like: Tensor, src: int, group: GroupLike = None, tag: int = 0) -> Tensor:
    """A new tensor of like's shape and dtype, received from rank src of the group.

    It takes what isend and batch_p2p send, not what a plain dist.send does.
    """
    like = arguments.tensor("irecv", like, "like")
    src, tag = integer("irecv", "src", src), _tag("irecv", tag)
    name = group_name(group)
    return returned(start("irecv", like, src, tag, name), "irecv")


def batch_p2p(
    transfers: Sequence[tuple[str, Tensor, int]], group: GroupLike = None, tag: int = 0
) -> list[Tensor]:
    """Many ("isend", x, dst) and ("irecv", like, src) at once, in any order without deadlock.

    Returns the received tensors in the places of the irecvs, an empty tensor for each isend.

    >>> peer = (rank + 1) % n
    >>> x = torch.tensor([rank])
    >>> _, y = fcoll.batch_p2p([("isend", x, peer), ("irecv", x, (rank - 1) % n)])
    >>> y.item() == (rank - 1) % n
    True
    """
    given, tag = arguments.transfers("batch_p2p", transfers), _tag("batch_p2p", tag)
    name = group_name(group)
    ops = [t[0] for t in given]
    tensors = [t[1] for t in given]
    peers = [t[2] for t in given]
    args = (ops, peers, [tag] * len(ops), tensors, name)
    outs = start("batch_p2p_ops", *args)
    return [returned(x, "batch_p2p") for x in outs]


def barrier(group: GroupLike = None) -> None:
    """Return when all ranks of the group have called it."""
    if not is_dynamo_compiling() and build.fast and build.fast.barrier(group) is None:
        return
    torch.ops.fcoll.wait_tensor(start("barrier", group_name(group)))


def all_reduce_coalesced(
    xs: Sequence[Tensor],
    op: ReduceOpLike = "sum",
    group: GroupLike = None,
    *,
    factor: float | None = None,
    grad: Literal["sum", "identity"] = "sum",
) -> list[Tensor]:
    """``[all_reduce(x) for x in xs]``, in one message for each dtype.

    >>> a, b = fcoll.all_reduce_coalesced([torch.ones(2), torch.ones(3, 4)])
    >>> a.shape, b.mean().item() == n
    (torch.Size([2]), True)
    """
    if factor is None and not is_dynamo_compiling() and build.fast:
        out = build.fast.all_reduce_coalesced(xs, op, group, grad)
        if out is not NotImplemented:
            return out
    me = "all_reduce_coalesced"
    xs, op = arguments.scaled(me, arguments.tensors(me, xs), op, factor)
    arguments.text(me, "grad", grad)
    return collective(me, group, xs, op, grad)


def all_gather_into_tensor_coalesced(
    xs: Sequence[Tensor], group: GroupLike = None, dim: int | Sequence[int] = 0
) -> list[Tensor]:
    """``[all_gather_into_tensor(x, dim=d) for x, d in zip(xs, dim)]``, in one message a dtype."""
    if not is_dynamo_compiling() and build.fast:
        out = build.fast.all_gather_into_tensor_coalesced(xs, group, dim)
        if out is not NotImplemented:
            return out
    op = "all_gather_into_tensor_coalesced"
    xs = arguments.tensors(op, xs)
    return collective(op, group, xs, _each(op, dim, xs))


def reduce_scatter_tensor_coalesced(
    xs: Sequence[Tensor],
    op: ReduceOpLike = "sum",
    group: GroupLike = None,
    dim: int | Sequence[int] = 0,
    *,
    factor: float | None = None,
) -> list[Tensor]:
    """``[reduce_scatter_tensor(x, dim=d) for x, d in zip(xs, dim)]``, in one message a dtype."""
    if factor is None and not is_dynamo_compiling() and build.fast:
        out = build.fast.reduce_scatter_tensor_coalesced(xs, op, group, dim)
        if out is not NotImplemented:
            return out
    me = "reduce_scatter_tensor_coalesced"
    xs, op = arguments.scaled(me, arguments.tensors(me, xs), op, factor)
    return collective(me, group, xs, op, _each(me, dim, xs))


def identity(x: Tensor, group: GroupLike = None) -> Tensor:
    """x itself; its gradient is summed over the group.

    Megatron's partner of ``all_reduce(grad="identity")``: it goes where a value that is the same
    on all ranks enters a part of the model that is split over them.

    >>> x = torch.ones(2, requires_grad=True)
    >>> fcoll.identity(x).sum().backward()
    >>> x.grad.tolist() == [n, n]
    True
    """
    x, name = arguments.tensor("identity", x), group_name(group)
    group_size(name)  # there is such a group
    return dispatch.identity(x, name)
