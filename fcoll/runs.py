"""How each collective runs on a process group: its schema's arguments in, new tensors out.

The tensors come back before the bytes have arrived; ``wait_tensor`` waits for them. Inputs are
never written to, and results are always contiguous. What is filled in at the wait is written
through ``.data``: a result that autograd has saved must not look modified since.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import transport
from fcoll.groups import Group, by_name
from fcoll.reductions import REDUCTIONS
from fcoll.rules import Sizes, gathered, scattered
from fcoll.transport import Then, issued


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _flat(x: Tensor) -> Tensor:
    return x.contiguous().view(-1)  # reshape would keep the strides of an expanded tensor


def _trivial(g: Group, *tensors: Tensor) -> bool:
    """Is there nothing to send? Every rank must agree, so the tensors' shapes are the same."""
    return g.n == 1 or all(x.numel() == 0 for x in tensors)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    out = x.new_zeros(_resized(x.shape, dim, size))  # not pad: it has no float8_e8m0fnu
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def _contiguous_parts(shape: Sequence[int], dim: int) -> bool:
    """Are parts along dim laid out one after the other in a tensor of this shape?"""
    return math.prod(shape[:dim]) == 1


# -- one tensor ---


def all_reduce(input: Tensor, reduce_op: str, group_name: str, grad: str = "sum") -> Tensor:
    return all_reduce_(_copy(input), reduce_op, group_name)


def all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    g = by_name(group_name)
    if _trivial(g, input):
        return input
    if input.is_contiguous():
        return issued(input, *transport.all_reduce_(input, REDUCTIONS[reduce_op], g))
    buf = _copy(input)
    work, finish = transport.all_reduce_(buf, REDUCTIONS[reduce_op], g)
    finishes = [finish] if finish else []
    return issued(input, work, lambda: [*[f() for f in finishes], input.data.copy_(buf)])


def all_gather_into_tensor(
    input: Tensor, group_size: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> Tensor:
    out = input.new_empty(gathered(input, group_size, dim, sizes))
    return _all_gather(out, input, by_name(group_name), dim, sizes)


def all_gather_into_tensor_out(
    input: Tensor, group_size: int, group_name: str, *, out: Tensor
) -> Tensor:
    return _all_gather(out, input, by_name(group_name), 0, None)


def _all_gather(out: Tensor, input: Tensor, g: Group, dim: int, sizes: Sizes) -> Tensor:
    x = input.reshape(1) if input.dim() == 0 else input
    if g.n == 1:
        out.copy_(x)
        return out
    if _trivial(g, out):
        return out
    if sizes is None and _contiguous_parts(x.shape, dim):
        return issued(out, transport.all_gather(out, x.contiguous(), g))
    sizes = sizes or [x.shape[dim]] * g.n
    x = _padded(x, dim, max(sizes))  # c10d gathers equal parts only
    parts = x.new_empty((g.n, *x.shape))
    work = transport.all_gather(parts, x, g)
    return issued(out, work, lambda: _concat(out, parts, dim, sizes))


def _concat(out: Tensor, parts: Sequence[Tensor] | Tensor, dim: int, sizes: Sequence[int]) -> None:
    for place, part in zip(out.data.split(list(sizes), dim), parts, strict=True):
        place.copy_(part.narrow(dim, 0, place.shape[dim]))


def _chunks(x: Tensor, dim: int, n: int, sizes: Sizes) -> Tensor:
    """x cut along dim for n ranks, as one contiguous tensor [n, ...]; uneven parts padded."""
    if sizes is not None:
        size = max(sizes)
        return torch.stack([_padded(part, dim, size) for part in x.split(list(sizes), dim)])
    if _contiguous_parts(x.shape, dim):
        shape = list(x.shape)
        shape[dim] //= n
        return x.contiguous().view(n, *shape)
    return torch.stack(x.chunk(n, dim))


def reduce_scatter_tensor(
    input: Tensor,
    reduce_op: str,
    group_size: int,
    group_name: str,
    dim: int = 0,
    sizes: Sizes = None,
) -> Tensor:
    out = input.new_empty(scattered(input, group_size, group_name, dim, sizes))
    return _reduce_scatter(out, input, reduce_op, by_name(group_name), dim, sizes)


def reduce_scatter_tensor_out(
    input: Tensor, reduce_op: str, group_size: int, group_name: str, *, out: Tensor
) -> Tensor:
    return _reduce_scatter(out, input, reduce_op, by_name(group_name), 0, None)


def _reduce_scatter(
    out: Tensor, input: Tensor, reduce_op: str, g: Group, dim: int, sizes: Sizes
) -> Tensor:
    if g.n == 1:
        out.copy_(input)
        return out
    if _trivial(g, input):
        return out
    row = REDUCTIONS[reduce_op]
    chunks = _chunks(input, dim, g.n, sizes)
    if sizes is None:
        return issued(out, *transport.reduce_scatter(out, chunks, row, g))
    mine = torch.empty_like(chunks[0])
    work, finish = transport.reduce_scatter(mine, chunks, row, g)
    finishes = [finish] if finish else []
    size = out.shape[dim]
    return issued(
        out, work, lambda: [*[f() for f in finishes], out.data.copy_(mine.narrow(dim, 0, size))]
    )


def all_to_all_single(
    input: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    group_name: str,
) -> Tensor:
    g = by_name(group_name)
    out = input.new_empty((sum(output_split_sizes), *input.shape[1:]))
    if g.n == 1:
        out.copy_(input)
        return out
    if math.prod(input.shape[1:]) == 0:
        return out
    x = input.contiguous()
    return issued(out, transport.exchange(out, x, g, output_split_sizes, input_split_sizes))


def shard_dim_alltoall(input: Tensor, gather_dim: int, shard_dim: int, group_name: str) -> Tensor:
    g = by_name(group_name)
    if g.n == 1 or gather_dim == shard_dim:  # it is sharded so already
        return _copy(input)
    chunks = _chunks(input, shard_dim, g.n, None)
    shape = list(chunks.shape[1:])
    shape[gather_dim] *= g.n
    out = input.new_empty(shape)
    if _trivial(g, out):
        return out
    parts = torch.empty_like(chunks)
    work = transport.exchange(parts, chunks, g)
    sizes = [parts.shape[1 + gather_dim]] * g.n
    return issued(out, work, lambda: _concat(out, parts, gather_dim, sizes))


# -- from or to one rank ---


def broadcast(input: Tensor, src: int, group_name: str) -> Tensor:
    g = by_name(group_name)
    mine = g.rank == src
    out = _copy(input) if mine else input.new_empty(input.shape)
    return broadcast_(out, src, group_name)


def broadcast_(input: Tensor, src: int, group_name: str) -> Tensor:
    g = by_name(group_name)
    if _trivial(g, input):
        return input
    if input.is_contiguous():
        return issued(input, transport.broadcast_(input, src, g))
    buf = _copy(input)
    return issued(input, transport.broadcast_(buf, src, g), lambda: input.data.copy_(buf))


def reduce(input: Tensor, reduce_op: str, dst: int, group_name: str) -> Tensor:
    g = by_name(group_name)
    buf = _copy(input)
    if _trivial(g, input):
        return buf
    work, finish = transport.reduce_(buf, dst, REDUCTIONS[reduce_op], g)
    return issued(buf, work, finish if g.rank == dst else lambda: buf.data.zero_())


def gather(
    input: Tensor, dst: int, group_size: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> Tensor:
    g = by_name(group_name)
    x = input.reshape(1) if input.dim() == 0 else input
    out = input.new_zeros(gathered(input, group_size, dim, sizes))
    if g.n == 1:
        out.copy_(x)
        return out
    if _trivial(g, out):
        return out
    lengths = sizes or [x.shape[dim]] * g.n
    shapes = [_resized(x.shape, dim, s) for s in lengths]
    receive = [math.prod(s) if g.rank == dst else 0 for s in shapes]
    send = [x.numel() if r == dst else 0 for r in range(g.n)]
    flat = x.new_empty(sum(receive))
    work = transport.exchange(flat, _flat(x), g, receive, send)
    if g.rank != dst:
        return issued(out, work)
    parts = [p.view(s) for p, s in zip(flat.split(receive), shapes, strict=True)]
    return issued(out, work, lambda: _concat(out, parts, dim, lengths))


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def scatter(
    input: Tensor, src: int, group_size: int, group_name: str, dim: int = 0, sizes: Sizes = None
) -> Tensor:
    g = by_name(group_name)
    out = input.new_empty(scattered(input, group_size, group_name, dim, sizes))
    if g.n == 1:
        out.copy_(input)
        return out
    if _trivial(g, input):
        return out
    parts = input.split(list(sizes), dim) if sizes else input.chunk(g.n, dim)
    send = [p.numel() if g.rank == src else 0 for p in parts]
    flat = torch.cat([p.reshape(-1) for p in parts]) if g.rank == src else input.new_empty(0)
    receive = [out.numel() if r == src else 0 for r in range(g.n)]
    return issued(out, transport.exchange(out.view(-1), flat, g, receive, send))


def permute(input: Tensor, dst: Sequence[int], group_name: str) -> Tensor:
    g = by_name(group_name)
    receives = g.rank in dst
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    if not receives:
        out.zero_()
    if _trivial(g, input):
        return out.copy_(input) if receives else out
    size = input.numel()
    sends = dst[g.rank] >= 0
    flat = _flat(input)
    send = [size if r == dst[g.rank] else 0 for r in range(g.n)]
    receive = [size if dst[r] == g.rank else 0 for r in range(g.n)]
    into = out.view(-1) if receives else flat[:0]
    return issued(out, transport.exchange(into, flat if sends else flat[:0], g, receive, send))


# -- between two ranks ---


def isend(tensor: Tensor, dst: int, tag: int, group_name: str) -> Tensor:
    return batch_p2p_ops(["isend"], [dst], [tag], [tensor], group_name)[0]


def irecv(tensor: Tensor, src: int, tag: int, group_name: str) -> Tensor:
    return batch_p2p_ops(["irecv"], [src], [tag], [tensor], group_name)[0]


def batch_p2p_ops(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Tensor],
    group_name: str,
) -> list[Tensor]:
    """A received tensor is new, of the shape of the one given; a send gives an empty token."""
    g = by_name(group_name)
    outs, ops = [], []
    for name, peer, tag, x in zip(op_list, peer_list, tag_list, tensors, strict=True):
        sends = name == "isend"
        buf = x.contiguous() if sends else x.new_empty(x.shape)
        outs.append(x.new_empty(0) if sends else buf)
        call = dist.isend if sends else dist.irecv
        wire = transport.in_bytes(buf)
        ops.append(dist.P2POp(call, wire, group=g.pg, tag=tag, group_peer=peer))
    works = dist.batch_isend_irecv(ops)
    done = works[0] if len(works) == len(outs) == 1 else Then(works)
    return [issued(out, done) for out in outs]


def barrier(group_name: str) -> Tensor:
    g = by_name(group_name)
    token = torch.empty(0)
    return token if g.n == 1 else issued(token, transport.barrier(g))


# -- lists: one message for all tensors of a dtype ---


def all_reduce_coalesced(
    inputs: Sequence[Tensor], reduce_op: str, group_name: str, grad: str = "sum"
) -> list[Tensor]:
    outs = [x.new_empty(x.shape) for x in inputs]
    return _all_reduce_list(outs, inputs, reduce_op, by_name(group_name))


def all_reduce_coalesced_(
    inputs: Sequence[Tensor], reduce_op: str, group_name: str
) -> Sequence[Tensor]:
    return _all_reduce_list(inputs, inputs, reduce_op, by_name(group_name))


def _all_reduce_list(outs, inputs: Sequence[Tensor], reduce_op: str, g: Group):  # type: ignore
    for same in _by_dtype(inputs):
        flat = torch.cat([inputs[i].reshape(-1) for i in same])
        work, finish = (None, None)
        if not _trivial(g, flat):
            work, finish = transport.all_reduce_(flat, REDUCTIONS[reduce_op], g)
        parts = flat.split([inputs[i].numel() for i in same])
        _issue_list([outs[i] for i in same], parts, work, finish)
    return outs


def all_gather_into_tensor_coalesced(
    inputs: Sequence[Tensor], group_size: int, group_name: str, dims: Sizes = None
) -> list[Tensor]:
    g = by_name(group_name)
    dims = dims if dims is not None else [0] * len(inputs)
    outs = [x.new_empty(gathered(x, g.n, d)) for x, d in zip(inputs, dims, strict=True)]
    for same in _by_dtype(inputs):
        flat = torch.cat([inputs[i].reshape(-1) for i in same])
        parts = flat.new_empty((g.n, *flat.shape))
        work = None
        if g.n == 1:
            parts.copy_(flat)
        elif flat.numel():
            work = transport.all_gather(parts, flat, g)
        columns = parts.split([inputs[i].numel() for i in same], 1)
        sources = []
        for i, column in zip(same, columns, strict=True):
            shape = list(inputs[i].shape) or [1]
            # [n, *shape] with the ranks moved in front of the gathered dim, as out is laid out
            sources.append(column.reshape(g.n, *shape).movedim(0, dims[i]))
        _issue_list([outs[i] for i in same], sources, work, None)
    return outs


def reduce_scatter_tensor_coalesced(
    inputs: Sequence[Tensor], reduce_op: str, group_size: int, group_name: str, dims: Sizes = None
) -> list[Tensor]:
    g = by_name(group_name)
    dims = dims if dims is not None else [0] * len(inputs)
    outs = [
        x.new_empty(scattered(x, g.n, group_name, d)) for x, d in zip(inputs, dims, strict=True)
    ]
    for same in _by_dtype(inputs):
        chunks = torch.cat([_chunks(inputs[i], dims[i], g.n, None).flatten(1) for i in same], dim=1)
        mine = chunks.new_empty(chunks.shape[1:])
        work, finish = (None, None)
        if _trivial(g, chunks):
            mine.copy_(chunks[0])
        else:
            work, finish = transport.reduce_scatter(mine, chunks, REDUCTIONS[reduce_op], g)
        parts = mine.split([outs[i].numel() for i in same])
        _issue_list([outs[i] for i in same], parts, work, finish)
    return outs


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The positions of the tensors of each dtype, in the order of first appearance."""
    same: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        same.setdefault(x.dtype, []).append(i)
    return list(same.values())


def _issue_list(
    outs: Sequence[Tensor],
    parts: Sequence[Tensor],
    work: dist.Work | None,
    finish: transport.Finish | None,
) -> None:
    """One work for many results: the first that is waited for fills them all."""

    def fill() -> None:
        if finish:
            finish()
        for out, part in zip(outs, parts, strict=True):
            out.data.copy_(part.reshape(out.shape))

    if work is None:
        fill()
        return
    done = Then([work], fill)
    for out in outs:
        issued(out, done)
