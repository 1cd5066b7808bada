"""Models sharded by torch's own means, as people write them: DTensor TP, TP + SP, FSDP2, HSDP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)
        self.w3 = nn.Linear(dim, 2 * dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(dim, heads), FeedForward(dim)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, vocab: int = 96, dim: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def batch(size: int = 2, length: int = 16, vocab: int = 96):
    tokens = torch.randint(0, vocab, (size, length))
    return tokens, tokens.roll(-1, dims=1)


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# -- tensor parallel ---


def tensor_parallel(mesh):
    torch.manual_seed(0)
    model = Transformer()
    tp = mesh["tp"]
    for block in model.layers:
        parallelize_module(
            block,
            tp,
            {
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
            },
        )
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def train_step(tokens, labels):
        opt.zero_grad()
        loss = loss_of(model(tokens), labels)
        loss.backward()
        opt.step()
        return loss

    return train_step, batch()


# -- tensor and sequence parallel ---


def shard_tensors(model, tp):
    parallelize_module(
        model,
        tp,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, tp, plan)


def sequence_parallel(mesh):
    model = Transformer()
    shard_tensors(model, mesh["tp"])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def train_step(tokens, labels):
        loss = loss_of(model(tokens), labels)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        print(f"loss: {loss.item():.4f}")
        return loss.detach()

    return train_step, batch()


# -- FSDP2 ---


def fsdp2(mesh):
    with torch.device("meta"):
        model = Transformer()
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=bf16)
    fully_shard(model, mesh=mesh["dp"], mp_policy=bf16)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(tokens, labels):
        loss = loss_of(model(tokens).float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss

    return train_step, batch()


# -- HSDP: sharded within, replicated across ---


def hsdp(mesh):
    model = Transformer()
    both = mesh["replicate", "shard"]
    for layer in model.layers:
        fully_shard(layer, mesh=both, reshard_after_forward=True)
    fully_shard(model, mesh=both)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_step(tokens, labels):
        opt.zero_grad()
        loss = loss_of(model(tokens), labels)
        loss.backward()
        opt.step()
        return loss

    return train_step, batch()
