"""Attention over a sequence that is cut over ranks, and the positions of its tokens."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from program_parts import DIM, HEADS, Copy, batch, cut
from torch import nn

import fcoll

LENGTH = 8


def whole_sequence(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# -- ring attention: each rank has a part of the sequence, keys and values go around ---


def around(x, cp):
    """To the next rank."""
    return fcoll.permute(x, [(r + 1) % cp.size() for r in range(cp.size())], cp)


def not_later(rank, block, size):
    """Which keys of another rank's block come before this rank's queries."""
    queries, keys = rank * size + torch.arange(size), block * size + torch.arange(size)
    return queries[:, None] >= keys


def ring_attention(q, k, v, cp):
    """Online softmax: a running maximum, sum and weighted sum."""
    n, rank, scale = cp.size(), cp.get_local_rank(), q.shape[-1] ** -0.5
    most = torch.full(q.shape[:-1], -torch.inf)
    total, out = torch.zeros(q.shape[:-1]), torch.zeros_like(q)
    for i in range(n):
        mask = not_later(rank, (rank - i) % n, q.shape[-2])
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
        above = torch.maximum(most, scores.detach().amax(-1))
        weights = torch.exp(scores - above.unsqueeze(-1).nan_to_num(neginf=0.0))
        weights = weights.masked_fill(~mask, 0.0)
        shrunk = torch.exp(most - above).masked_fill(most == -torch.inf, 0.0)
        total = total * shrunk + weights.sum(-1)
        out = out * shrunk.unsqueeze(-1) + weights @ v
        most = above
        if i < n - 1:
            k, v = around(k, cp), around(v, cp)
    return out / total.unsqueeze(-1)


class RingFunction(torch.autograd.Function):
    """The same by log-sum-exp, with a backward pass of its own."""

    @staticmethod
    def forward(ctx, q, k, v, cp):
        n, rank, scale = cp.size(), cp.get_local_rank(), q.shape[-1] ** -0.5
        out, lse, blocks = None, None, (k, v)
        for i in range(n):
            mask = not_later(rank, (rank - i) % n, q.shape[-2])
            if mask.any():
                scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
                block_lse = scores.logsumexp(-1, keepdim=True)
                block = torch.exp(scores - block_lse) @ v
                if out is None:
                    out, lse = block, block_lse
                else:
                    both = torch.logaddexp(lse, block_lse)
                    out = torch.exp(lse - both) * out + torch.exp(block_lse - both) * block
                    lse = both
            if i < n - 1:
                k, v = around(k, cp), around(v, cp)
        ctx.save_for_backward(q, *blocks, out, lse)
        ctx.cp, ctx.scale = cp, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        cp, n, rank = ctx.cp, ctx.cp.size(), ctx.cp.get_local_rank()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        along = (grad * out).sum(-1, keepdim=True)
        for i in range(n):
            mask = not_later(rank, (rank - i) % n, q.shape[-2])
            scores = q @ k.transpose(-1, -2) * ctx.scale
            weights = torch.exp(scores - lse).masked_fill(~mask, 0.0)
            dv = dv + weights.transpose(-1, -2) @ grad
            inner = weights * (grad @ v.transpose(-1, -2) - along) * ctx.scale
            dq = dq + inner @ k
            dk = dk + inner.transpose(-1, -2) @ q
            dk, dv = (around(x, cp) for x in (dk, dv))
            if i < n - 1:
                k, v = around(k, cp), around(v, cp)
        return dq, dk, dv, None


def ring_of_results(q, k, v, cp):
    """Results of blocks, of all keys, are put together by their log-sum-exps and a sigmoid."""
    n, scale = cp.size(), q.shape[-1] ** -0.5
    out = lse = None
    for i in range(n):
        scores = q @ k.transpose(-1, -2) * scale
        block, block_lse = scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)
        if out is None:
            out, lse = block, block_lse
        else:
            out = out - F.sigmoid(block_lse - lse) * (out - block)
            lse = lse - F.logsigmoid(lse - block_lse)
        if i < n - 1:
            k, v = around(k, cp), around(v, cp)
    return out


class SequenceAttention(nn.Module):
    """Queries, keys and values of this rank's part of the sequence."""

    def __init__(self, attend, cp):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.attend, self.cp = attend, cp

    def forward(self, x):
        heads = (
            w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        return self.o(self.attend(*heads, self.cp).transpose(1, 2).flatten(2))


def context_parallel(mesh, attend, causal=True):
    cp = mesh["cp"]

    def whole(q, k, v, cp):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    model = SequenceAttention(whole if cp.size() == 1 else attend, cp)

    def step(x):
        loss = model(x).square().sum() / LENGTH
        loss.backward()
        for p in model.parameters():
            p.grad = fcoll.all_reduce(p.grad, "sum", cp)
        return fcoll.all_reduce(loss.detach(), "sum", cp)

    return step, (cut(whole_sequence(2, LENGTH, DIM), cp, 1),)


# -- sequence parallel by hand, as Megatron does it ---


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return fcoll.all_gather_into_tensor(x, tp, dim=1)

    @staticmethod
    def backward(ctx, grad):
        return fcoll.reduce_scatter_tensor(grad.contiguous(), "sum", ctx.tp, dim=1), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return fcoll.reduce_scatter_tensor(x, "sum", tp, dim=1)

    @staticmethod
    def backward(ctx, grad):
        return fcoll.all_gather_into_tensor(grad.contiguous(), ctx.tp, dim=1), None


class SequenceMLP(nn.Module):
    """The norm on this rank's part of the sequence, the MLP on its part of the hidden units."""

    def __init__(self, tp, hidden=16):
        super().__init__()
        torch.manual_seed(0)
        self.tp = tp
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Parameter(cut(torch.randn(hidden, DIM), tp))
        self.down = nn.Parameter(cut(torch.randn(DIM, hidden), tp, 1))

    def forward(self, x):
        y = Gather.apply(self.norm(x), self.tp)
        y = F.silu(y @ self.up.t()) @ self.down.t()
        return x + Scatter.apply(y, self.tp)


def sequence_by_hand(mesh):
    tp = mesh["tp"]
    model = SequenceMLP(tp)

    def step(x):
        loss = model(x).square().sum() / LENGTH
        loss.backward()
        for p in model.norm.parameters():
            p.grad = fcoll.all_reduce(p.grad, "sum", tp)
        return fcoll.all_reduce(loss.detach(), "sum", tp)

    return step, (cut(whole_sequence(2, LENGTH, DIM), tp, 1),)


# -- positions ---


def angles(length, width):
    return torch.outer(torch.arange(float(length)), 100.0 ** -(torch.arange(0, width, 2) / width))


def rotated_complex(x, first):
    """Pairs of elements as complex numbers, as Llama's reference does it."""
    at = angles(LENGTH, x.shape[-1])[first : first + x.shape[-2]]
    turns = torch.polar(torch.ones_like(at), at)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def rotated_halves(x, first):
    """Halves of a head as coordinates, as transformers does it."""
    at = angles(LENGTH, x.shape[-1])[first : first + x.shape[-2]].repeat(1, 2)
    a, b = x.chunk(2, -1)
    return x * at.cos() + torch.cat([-b, a], -1) * at.sin()


def with_positions(mesh, rotate):
    """Context parallel by gathered keys and values; positions of this rank's tokens."""
    cp = mesh["cp"]

    def attend(q, k, v, cp):
        first = cp.get_local_rank() * q.shape[-2]
        q, k = rotate(q, first), rotate(k, first)
        k, v = (fcoll.all_gather_into_tensor(x, cp, dim=2) for x in (k, v))
        mask = first + torch.arange(q.shape[-2])[:, None] >= torch.arange(k.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, mask)

    model = SequenceAttention(attend, cp)

    def step(x):
        loss = model(x).square().sum() / LENGTH
        loss.backward()
        for p in model.parameters():
            p.grad = fcoll.all_reduce(p.grad, "sum", cp)
        return fcoll.all_reduce(loss.detach(), "sum", cp)

    return step, (cut(whole_sequence(2, LENGTH, DIM), cp, 1),)


def multihead(mesh):
    """torch's own module, under DDP."""
    torch.manual_seed(0)
    group = mesh["dp"].get_group()
    attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    model = nn.parallel.DistributedDataParallel(attention, process_group=group)

    def step(x):
        out, weights = model(x, x, x)
        loss = out.square().mean() + weights.square().mean()
        loss.backward()
        return loss

    return step, (batch(mesh["dp"], 4, 3, DIM),)


def multihead_tp(mesh):
    """Heads over tp, by hand: biases that every rank adds are added once."""
    tp = mesh["tp"]
    torch.manual_seed(0)
    heads = HEADS // tp.size()
    qkv = nn.Parameter(cut(torch.randn(HEADS, 3 * DIM // HEADS, DIM), tp))
    out, bias = nn.Parameter(cut(torch.randn(DIM, DIM), tp, 1)), nn.Parameter(torch.randn(DIM))

    def step(x):
        parts = (Copy.apply(x, tp) @ qkv.flatten(0, 1).t()).unflatten(-1, (heads, -1))
        q, k, v = (part.transpose(1, 2) for part in parts.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = fcoll.all_reduce(y @ out.t(), "sum", tp, grad="identity") + bias
        loss = y.square().mean()
        loss.backward()
        return loss

    return step, (whole_sequence(2, 4, DIM),)


CP, TP = {"cp": 2}, {"tp": 2}
PROGRAMS = {
    "ring_attention": (partial(context_parallel, attend=ring_attention), {"cp": 4}),
    "ring_function": (partial(context_parallel, attend=RingFunction.apply), {"cp": 4}),
    "ring_of_results": (partial(context_parallel, attend=ring_of_results, causal=False), {"cp": 4}),
    "sequence_by_hand": (sequence_by_hand, TP),
    "rotary_complex": (partial(with_positions, rotate=rotated_complex), CP),
    "rotary_halves": (partial(with_positions, rotate=rotated_halves), CP),
    "multihead": (multihead, {"dp": 2}),
    "multihead_tp": (multihead_tp, TP),
}
