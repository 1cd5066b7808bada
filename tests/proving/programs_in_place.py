"""Tensor parallel by torch.distributed in place, as libraries write it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from program_parts import drawn, made
from torch import nn

DIM, HEADS, KV, HIDDEN, VOCAB, SEQ = 8, 4, 2, 12, 12, 4


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def shard(w, tp, dim=0):
    return nn.Parameter(w.chunk(tp.size(), dim)[tp.get_local_rank()].clone())


class RowParallelLinear(nn.Module):
    def __init__(self, n_in, n_out, tp):
        super().__init__()
        self.weight = shard(torch.randn(n_out, n_in), tp, 1)
        self.bias = nn.Parameter(torch.zeros(n_out))
        self.group = tp.get_group()

    def forward(self, x):
        y = F.linear(x, self.weight)
        y = _ReduceFromTP.apply(y, self.group)
        return y + self.bias


class ColumnParallelLinear(nn.Module):
    def __init__(self, n_in, n_out, tp):
        super().__init__()
        self.weight = shard(torch.randn(n_out, n_in), tp)
        self.bias = shard(torch.zeros(n_out), tp)
        self.group = tp.get_group()

    def forward(self, x):
        return F.linear(_CopyToTP.apply(x, self.group), self.weight, self.bias)


class Net(nn.Module):
    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(DIM)
        self.fc1 = ColumnParallelLinear(DIM, HIDDEN, tp)
        self.fc2 = RowParallelLinear(HIDDEN, DIM, tp)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def mlp(mesh):
    model = Net(mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (made((3, DIM)), made((3, DIM), 5))


# -- grouped queries with as many ranks as heads, keys and values on several ---
class GQA(nn.Module):
    def __init__(self, tp, n_heads=4, n_kv=2):
        super().__init__()
        torch.manual_seed(0)
        self.tp, self.hd = tp, DIM // n_heads
        n, r = tp.size(), tp.get_local_rank()
        self.heads = n_heads // n
        self.wq = shard(torch.randn(DIM, DIM), tp)
        wk, wv = torch.randn(n_kv, self.hd, DIM), torch.randn(n_kv, self.hd, DIM)
        self.kv_per_rank = max(1, n_kv // n)
        first = r * n_kv // n
        self.wk = nn.Parameter(wk[first : first + self.kv_per_rank].clone())
        self.wv = nn.Parameter(wv[first : first + self.kv_per_rank].clone())
        self.wo = shard(torch.randn(DIM, DIM), tp, 1)
        self.copies = max(1, n // n_kv)

    def forward(self, x):
        B, S, _ = x.shape
        group = self.tp.get_group()
        x = _CopyToTP.apply(x, group)
        q = (x @ self.wq.t()).view(B, S, self.heads, self.hd).transpose(1, 2)
        k = (x @ self.wk.flatten(0, 1).t()).view(B, S, self.kv_per_rank, self.hd).transpose(1, 2)
        v = (x @ self.wv.flatten(0, 1).t()).view(B, S, self.kv_per_rank, self.hd).transpose(1, 2)
        rep = self.heads // self.kv_per_rank
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(B, S, -1)
        return _ReduceFromTP.apply(y @ self.wo.t(), group)


def gqa(mesh):
    tp = mesh["tp"]
    model = GQA(tp)
    n, r = tp.size(), tp.get_local_rank()
    copies = None
    for first in range(0, n, model.copies):
        ranks = list(range(first, first + model.copies))
        g = dist.new_group(ranks) if n > 1 else None
        if r in ranks:
            copies = g

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        if copies is not None:
            for p in (model.wk, model.wv):
                dist.all_reduce(p.grad, group=copies)
        return loss.detach()

    return step, (made((2, SEQ, DIM)),)


# -- alibi, norms of queries and keys, a gated MLP ---
class Falcon(nn.Module):
    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        self.tp, self.hd, self.n_local = tp, DIM // HEADS, HEADS // tp.size()
        self.qkv = shard(torch.randn(HEADS, 3 * DIM // HEADS, DIM), tp)
        self.q_norm, self.k_norm = nn.RMSNorm(self.hd), nn.RMSNorm(self.hd)
        self.proj = RowParallelLinear(DIM, DIM, tp)
        w = torch.randn(2 * HIDDEN, DIM)
        self.gate_up = shard(w.view(2, HIDDEN, DIM), tp, 1)
        self.down = shard(torch.randn(DIM, HIDDEN), tp, 1)

    def attention(self, x):
        B, S, _ = x.shape
        qkv = torch.einsum("bsd,hed->bhse", x, self.qkv)
        q, k, v = qkv.split(self.hd, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        head = self.tp.get_local_rank() * self.n_local + torch.arange(self.n_local)
        slopes = 2.0 ** (-8.0 * (head + 1) / HEADS)
        i = torch.arange(S)
        distance = (i[None, :] - i[:, None]).clamp(max=0)
        bias = slopes[:, None, None] * distance
        scores = q @ k.transpose(-1, -2) * self.hd**-0.5 + bias
        scores = scores.masked_fill(i[None, :] > i[:, None], float("-inf"))
        y = scores.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, S, -1))

    def mlp(self, x):
        gate, up = (x @ self.gate_up.reshape(-1, DIM).t()).chunk(2, -1)
        return _ReduceFromTP.apply((F.silu(gate) * up) @ self.down.t(), self.tp.get_group())

    def forward(self, x):
        group = self.tp.get_group()
        x = x + self.attention(_CopyToTP.apply(x, group))
        return x + self.mlp(_CopyToTP.apply(x, group))


def falcon(mesh):
    tp = mesh["tp"]
    model = Falcon(tp)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        for name, p in model.named_parameters():
            if name.startswith(("q_norm", "k_norm")):
                dist.all_reduce(p.grad, group=tp.get_group())
        return loss.detach()

    return step, (made((2, SEQ, DIM)),)


# -- low-rank adapters of a frozen layer that is cut ---
class LoRAColumn(nn.Module):
    def __init__(self, tp, rank=2):
        super().__init__()
        torch.manual_seed(0)
        self.group = tp.get_group()
        self.weight = shard(torch.randn(HIDDEN, DIM), tp).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, DIM))
        self.lora_b = shard(torch.zeros(HIDDEN, rank), tp)
        self.down = shard(torch.randn(DIM, HIDDEN), tp, 1)

    def forward(self, x):
        h = x @ self.weight.t()
        z = _CopyToTP.apply(x @ self.lora_a.t(), self.group)
        h = h + 2.0 * (z @ self.lora_b.t())
        return _ReduceFromTP.apply(F.relu(h) @ self.down.t(), self.group)


def lora(mesh):
    model = LoRAColumn(mesh["tp"])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (made((3, DIM)),)


# -- embedding over the vocabulary, its output cut along the sequence; loss over padded logits ---
class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.chunk(tp.size(), 1)[tp.get_local_rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(ctx.tp.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.tp.get_group())
        return torch.cat(parts, 1), None


class SequenceEmbedding(nn.Module):
    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        self.tp = tp
        self.table = shard(torch.randn(VOCAB, DIM), tp)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, tokens):
        n = len(self.table)
        start = self.tp.get_local_rank() * n
        outside = (tokens < start) | (tokens >= start + n)
        local = (tokens - start).masked_fill(outside, 0)
        x = F.embedding(local, self.table)
        x = x.masked_fill(outside.unsqueeze(-1), 0.0)
        x = _ReduceFromTP.apply(x, self.tp.get_group())
        x = _ScatterSequence.apply(x, self.tp)
        return self.norm(x)


def sequence_embedding(mesh):
    tp = mesh["tp"]
    model = SequenceEmbedding(tp)

    def step(tokens):
        loss = model(tokens).pow(3).sum() / SEQ
        loss.backward()
        for p in model.norm.parameters():
            dist.all_reduce(p.grad, group=tp.get_group())
        out = loss.detach().clone()
        dist.all_reduce(out, group=tp.get_group())
        return out

    return step, (drawn(VOCAB, (2, SEQ)),)


REAL = 10


class PaddedHead(nn.Module):
    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        self.tp = tp
        self.scale = nn.Parameter(torch.ones(DIM))
        self.head = shard(torch.randn(VOCAB, DIM), tp)

    def forward(self, x, labels):
        group = self.tp.get_group()
        logits = F.linear(_CopyToTP.apply(x * self.scale, group), self.head)
        start = self.tp.get_local_rank() * len(self.head)
        pad = torch.arange(len(self.head)) + start >= REAL
        logits = logits.masked_fill(pad, float("-inf"))
        high = logits.detach().max(dim=-1).values
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        logits = logits - high.unsqueeze(-1)
        denominator = _ReduceFromTP.apply(logits.exp().sum(-1), group)
        mine = (labels >= start) & (labels < start + len(self.head))
        index = (labels - start).clamp(0, len(self.head) - 1)
        target = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        target = _ReduceFromTP.apply(torch.where(mine, target, 0.0), group)
        return (denominator.log() - target).mean()


def padded_head(mesh):
    model = PaddedHead(mesh["tp"])

    def step(x, labels):
        loss = model(x, labels)
        loss.backward()
        return loss.detach()

    return step, (made((4, DIM)), torch.tensor([1, 5, 7, 9]))


PROGRAMS = {
    "mlp": (mlp, {"tp": 2}),
    "gqa": (gqa, {"tp": 4}),
    "falcon": (falcon, {"tp": 2}),
    "lora": (lora, {"tp": 2}),
    "sequence_embedding": (sequence_embedding, {"tp": 2}),
    "padded_head": (padded_head, {"tp": 2}),
}
