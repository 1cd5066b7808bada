"""Programs whose communication is written out: Megatron, experts, a ring, AMP, a titan's step."""

from __future__ import annotations

import logging
import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded import Transformer, batch, shard_tensors  # the file beside it
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import fcoll

logger = logging.getLogger(__name__)


# -- Megatron's MLP on fcoll ---


class ColumnLinear(nn.Module):
    def __init__(self, dim, out, tp):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.randn(out // tp.size(), dim) / math.sqrt(dim))

    def forward(self, x):
        x = fcoll.identity(x, self.tp)  # its gradient is an all-reduce
        return F.linear(x, self.weight)


class RowLinear(nn.Module):
    def __init__(self, dim, out, tp):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.randn(out, dim // tp.size()) / math.sqrt(dim))

    def forward(self, x):
        return fcoll.all_reduce(F.linear(x, self.weight), "sum", self.tp, grad="identity")


class MLP(nn.Module):
    def __init__(self, dim, tp):
        super().__init__()
        self.up, self.down = ColumnLinear(dim, 4 * dim, tp), RowLinear(4 * dim, dim, tp)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def megatron(mesh):
    model = nn.Sequential(*(MLP(32, mesh["tp"]) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad = fcoll.all_reduce(p.grad, "avg", mesh["dp"])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (torch.randn(8, 32), torch.randn(8, 32))


# -- a mixture of experts, top-2, with torch.distributed's own exchange ---


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out_splits, in_splits, group):
        ctx.splits, ctx.group = (in_splits, out_splits), group
        out = x.new_empty(sum(out_splits), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), out_splits, in_splits, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.splits, ctx.group), None, None, None


class Experts(nn.Module):
    def __init__(self, dim, local, ep):
        super().__init__()
        self.group, self.n, self.local = ep.get_group(), ep.size(), local
        self.gate = nn.Linear(dim, self.n * local, bias=False)
        self.w1 = nn.Parameter(torch.randn(local, dim, 2 * dim) / math.sqrt(dim))
        self.w2 = nn.Parameter(torch.randn(local, 2 * dim, dim) / math.sqrt(dim))

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        expert, token = chosen.flatten().sort()
        per_expert = torch.bincount(expert, minlength=self.n * self.local)
        to_send = per_expert.view(self.n, self.local).sum(1)
        to_receive = torch.empty_like(to_send)
        dist.all_to_all_single(to_receive, to_send, group=self.group)
        sends, receives = to_send.tolist(), to_receive.tolist()
        rows = Exchange.apply(x[token // 2], receives, sends, self.group)
        hidden = F.silu(rows @ self.w1[0]) @ self.w2[0]
        back = Exchange.apply(hidden, sends, receives, self.group)
        weights = scores.flatten()[token]
        return x.index_add(0, token // 2, back * weights[:, None])


def experts(mesh):
    model = nn.Sequential(Experts(16, 1, mesh["ep"]), nn.LayerNorm(16), Experts(16, 1, mesh["ep"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        for name, p in model.named_parameters():
            if "gate" in name:
                dist.all_reduce(p.grad, group=mesh.get_group("ep"))
                p.grad /= mesh["ep"].size()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (torch.randn(64, 16),)


# -- ring attention ---


def ring_attention(q, k, v, group):
    """Each rank has a part of the sequence; keys and values go around."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    following = dist.get_global_rank(group, (rank + 1) % n)
    previous = dist.get_global_rank(group, (rank - 1) % n)
    out = torch.zeros_like(q)
    total = torch.full(q.shape[:-1], -math.inf)
    for i in range(n):
        if i < n - 1:
            next_k, next_v = torch.empty_like(k), torch.empty_like(v)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, k, following, group),
                    dist.P2POp(dist.isend, v, following, group),
                    dist.P2POp(dist.irecv, next_k, previous, group),
                    dist.P2POp(dist.irecv, next_v, previous, group),
                ]
            )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        block = scores.logsumexp(-1)
        merged = torch.logaddexp(total, block)
        out = out * (total - merged).exp()[..., None] + ((scores - merged[..., None]).exp() @ v)
        total = merged
        if i < n - 1:
            for work in works:
                work.wait()
            k, v = next_k, next_v
    return out


def context_parallel(mesh):
    qkv, proj = nn.Linear(32, 96), nn.Linear(32, 32)

    @torch.no_grad()
    def forward(x):
        b, s, _ = x.shape
        q, k, v = (t.reshape(b, s, 4, 8).transpose(1, 2) for t in qkv(x).chunk(3, -1))
        out = ring_attention(q, k.contiguous(), v.contiguous(), mesh.get_group("cp"))
        return proj(out.transpose(1, 2).reshape(b, s, 32))

    return forward, (torch.randn(2, 16, 32),)


# -- AMP, clipping and activation checkpointing ---


class Checkpointed(nn.Module):
    def __init__(self, dim=32, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)
        )
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def amp(mesh):
    model = DDP(Checkpointed(), process_group=mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")

    def train_step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        if norm.isnan():
            logger.warning("gradient norm is NaN")
        return loss.item()

    return train_step, (torch.randn(8, 32), torch.randint(0, 10, (8,)))


# -- a step as torchtitan writes it ---


class Metrics:
    def __init__(self, log_freq):
        self.log_freq, self.tokens, self.begin = log_freq, 0, time.perf_counter()

    def log(self, step, loss, norm):
        seconds = time.perf_counter() - self.begin
        tps = self.tokens / seconds
        logger.info(f"step: {step:2}  loss: {loss:7.4f}  grad_norm: {norm:7.4f}  tps: {round(tps)}")
        self.tokens, self.begin = 0, time.perf_counter()


class Trainer:
    def __init__(self, mesh):
        self.mesh, self.step, self.metrics = mesh, 0, Metrics(1)
        with torch.device("meta"):
            self.model = Transformer()
        shard_tensors(self.model, mesh["tp"])
        for block in self.model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 100)
        )

    def train_step(self, x, labels):
        self.optimizer.zero_grad()
        self.metrics.tokens += labels.numel()
        predicted = self.model(x)
        loss = F.cross_entropy(predicted.flatten(0, 1).float(), labels.flatten())
        del predicted
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        if self.step == 1 or self.step % self.metrics.log_freq == 0:
            group = self.mesh.get_group("dp")
            mean, worst = loss.detach().clone(), loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
            self.metrics.log(self.step, mean.item(), norm.item())
            if math.isnan(worst.item()):
                raise RuntimeError("loss is NaN")


def titan(mesh):
    trainer = Trainer(mesh)
    return trainer.train_step, batch()
