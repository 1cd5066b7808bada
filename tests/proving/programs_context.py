"""Sequences that are cut over ranks: attention, positions, labels, masks, convolutions."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from program_parts import drawn, made
from torch import nn

import fcoll

DIM, HEADS, SEQ, VOCAB = 8, 2, 8, 12


def part(x, cp, dim=1):
    return x.chunk(cp.size(), dim)[cp.get_local_rank()].clone()


def reduce_gradients(model, cp):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=cp.get_group())


class GatheredAttention(nn.Module):
    """Keys and values are gathered."""

    def __init__(self, cp):
        super().__init__()
        torch.manual_seed(0)
        self.cp = cp
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        B, S, _ = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        k = fcoll.all_gather_into_tensor(k.contiguous(), self.cp, dim=2)
        v = fcoll.all_gather_into_tensor(v.contiguous(), self.cp, dim=2)
        offset = self.cp.get_local_rank() * S
        mask = torch.ones(S, k.shape[2], dtype=torch.bool).tril(diagonal=offset)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def gathered(mesh):
    cp = mesh["cp"]
    model = GatheredAttention(cp)

    def step(x):
        loss = model(x).square().sum() / SEQ
        loss.backward()
        reduce_gradients(model, cp)
        return fcoll.all_reduce(loss.detach(), "sum", cp)

    return step, (part(made((2, SEQ, DIM)), cp),)


# -- each rank has a chunk from the front and one from the back ---
def zigzag(x, cp, dim=1):
    n, r = cp.size(), cp.get_local_rank()
    chunks = x.chunk(2 * n, dim)
    return torch.cat([chunks[r], chunks[2 * n - 1 - r]], dim)


class ZigzagAttention(nn.Module):
    def __init__(self, cp):
        super().__init__()
        torch.manual_seed(0)
        self.cp = cp
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))

    def positions(self, s):
        n, r = self.cp.size(), self.cp.get_local_rank()
        half = s // 2
        front = r * half + torch.arange(half)
        back = (2 * n - 1 - r) * half + torch.arange(half)
        return torch.cat([front, back])

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        at = self.positions(x.shape[1])
        keys = torch.cat(
            list(fcoll.all_gather_into_tensor(at, self.cp, dim=0).chunk(self.cp.size()))
        )
        k = fcoll.all_gather_into_tensor(k, self.cp, dim=1)
        v = fcoll.all_gather_into_tensor(v, self.cp, dim=1)
        scores = q @ k.transpose(-1, -2) / DIM**0.5
        scores = scores.masked_fill(keys[None, :] > at[:, None], float("-inf"))
        return scores.softmax(-1) @ v


def zigzagged(mesh):
    cp = mesh["cp"]
    model = ZigzagAttention(cp)

    def step(x):
        loss = model(x).square().sum() / SEQ
        loss.backward()
        reduce_gradients(model, cp)
        return fcoll.all_reduce(loss.detach(), "sum", cp)

    return step, (zigzag(made((1, SEQ, DIM)), cp),)


# -- a language model whose tokens are cut: labels are the next tokens ---
class Positions(nn.Module):
    def __init__(self, cp):
        super().__init__()
        torch.manual_seed(0)
        self.cp = cp
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        s = tokens.shape[1]
        start = self.cp.get_local_rank() * s
        x = self.wte(tokens) + self.wpe.weight[start : start + s]
        return self.head(torch.tanh(x))


def next_tokens(mesh):
    cp = mesh["cp"]
    model = Positions(cp)

    def step(tokens):
        n, r, s = cp.size(), cp.get_local_rank(), tokens.shape[1]
        everything = fcoll.all_gather_into_tensor(tokens, cp, dim=1)
        after = torch.cat([everything[:, 1:], torch.full((len(tokens), 1), -100)], 1)
        labels = after[:, r * s : (r + 1) * s]
        logits = model(tokens)
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        loss = total / (len(tokens) * (n * s - 1))
        loss.backward()
        reduce_gradients(model, cp)
        return fcoll.all_reduce(loss.detach(), "sum", cp)

    return step, (part(drawn(VOCAB, (2, SEQ)), cp),)


# -- a causal convolution: each rank needs the end of the part before ---
class CausalConv(nn.Module):
    def __init__(self, cp, width=3):
        super().__init__()
        torch.manual_seed(0)
        self.cp, self.width = cp, width
        self.inner = nn.Linear(DIM, DIM)
        self.conv = nn.Conv1d(DIM, DIM, width, groups=DIM)

    def forward(self, x):
        x = self.inner(x).transpose(1, 2)
        n, r = self.cp.size(), self.cp.get_local_rank()
        halo = fcoll.permute(
            x[..., 1 - self.width :].contiguous(), [(i + 1) % n for i in range(n)], self.cp
        )
        if r == 0:
            halo = halo * 0
        x = torch.cat([halo, x], -1)
        return F.silu(self.conv(x)).transpose(1, 2)


def convolution(mesh):
    cp = mesh["cp"]
    model = CausalConv(cp)

    def step(x):
        loss = model(x).square().sum() / SEQ
        loss.backward()
        reduce_gradients(model, cp)
        return fcoll.all_reduce(loss.detach(), "sum", cp)

    return step, (part(made((1, SEQ, DIM)), cp),)


# -- a mask of the loss, made on each rank for the whole sequence ---
def masked_loss(mesh):
    cp = mesh["cp"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))

    def step(x, y, prompt_length):
        n, r, s = cp.size(), cp.get_local_rank(), x.shape[1]
        mask = (torch.arange(n * s)[None, :] >= prompt_length[:, None]).float()
        count = mask.sum()
        mask = mask[:, r * s : (r + 1) * s]
        error = (model(x).squeeze(-1) - y).square()
        loss = (error * mask).sum() / count
        loss.backward()
        reduce_gradients(model, cp)
        return fcoll.all_reduce(loss.detach(), "sum", cp)

    return step, (part(made((2, SEQ, DIM)), cp), part(made((2, SEQ), 3), cp), torch.tensor([2, 5]))


# -- data and context parallel ---
def two_axes(mesh):
    dp, cp = mesh["dp"], mesh["cp"]
    model = GatheredAttention(cp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            p.grad = fcoll.all_reduce(fcoll.all_reduce(p.grad, "avg", dp), "avg", cp)
        optimizer.step()
        optimizer.zero_grad()
        loss = fcoll.all_reduce(loss.detach(), "avg", dp)
        return fcoll.all_reduce(loss, "avg", cp)

    return step, (part(part(made((2, SEQ, DIM)), dp, 0), cp),)


CP = {"cp": 2}
PROGRAMS = {
    "gathered": (gathered, CP),
    "zigzagged": (zigzagged, CP),
    "next_tokens": (next_tokens, CP),
    "convolution": (convolution, CP),
    "masked_loss": (masked_loss, CP),
    "two_axes": (two_axes, {"dp": 2, "cp": 2}),
}
