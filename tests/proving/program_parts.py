"""What the programs are made of: data cut by rank, small models, and steps that train them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import fcoll

DIM, HIDDEN, HEADS, VOCABULARY = 8, 16, 2, 12


class Copy(torch.autograd.Function):
    """The identity, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return fcoll.all_reduce(grad, "sum", ctx.group), None


def cut(x, mesh, dim=0):
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()


def made(shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(high, shape, seed=2):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def batch(mesh, *shape):
    """This rank's rows of one batch."""
    return cut(torch.randn(shape, generator=torch.Generator().manual_seed(1)), mesh)


def targets(mesh, *shape):
    g = torch.Generator().manual_seed(2)
    return cut(torch.randint(VOCABULARY, shape, generator=g), mesh)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


def trained(model, x, optimizer=None, clip=None):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step, (x,)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        heads = (
            w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer, with embedding and head."""

    def __init__(self, attends=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        if attends:
            self.attention_norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(DIM), MLP()
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        if hasattr(self, "attention"):
            x = x + self.attention(self.attention_norm(x))
        return self.head(x + self.mlp(self.mlp_norm(x)))


SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def language_step(model, optimizer=None):
    def step(tokens, wanted):
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step
