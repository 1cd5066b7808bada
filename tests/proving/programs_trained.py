"""Batches that are cut: losses, optimizers by hand, clipping, statistics of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn.functional as F
from program_parts import drawn, made
from programs_in_place import Net
from torch import nn
from torch.distributed.fsdp import fully_shard

DIM, HIDDEN, VOCAB = 8, 12, 10


def rows(x, dp):
    return x.chunk(dp.size())[dp.get_local_rank()].clone()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


# -- DDP with unequal numbers of tokens ---
def token_mean(mesh):
    dp = mesh["dp"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB))
    model = nn.parallel.DistributedDataParallel(model, process_group=dp.get_group())

    def step(tokens, labels):
        logits = model(tokens)
        count = (labels != -100).sum().double()
        dist.all_reduce(count, group=dp.get_group())
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        (loss * dp.size()).backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=dp.get_group())
        return total

    labels = drawn(VOCAB, (4, 3), 3)
    labels[0, 1:] = -100
    labels[3, 2] = -100
    return step, (rows(drawn(VOCAB, (4, 3)), dp), rows(labels, dp))


# -- FSDP2, with a loss that is a sum over ranks ---
def fsdp_divide(mesh):
    dp = mesh["dp"]
    model = MLP()
    fully_shard(model, mesh=dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, total_rows):
        loss = model(x).square().sum() / total_rows
        model.set_gradient_divide_factor(1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, group=dp.get_group())
        return loss

    return step, (rows(made((4, DIM)), dp), torch.tensor(4.0))


# -- SGD with momentum by hand ---
class Momentum:
    def __init__(self, params, dp, lr=0.1, beta=0.9):
        self.params, self.dp, self.lr, self.beta = list(params), dp, lr, beta
        self.momentum = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        for p, m in zip(self.params, self.momentum, strict=True):
            dist.all_reduce(p.grad, group=self.dp.get_group())
            p.grad /= self.dp.size()
            m.mul_(self.beta).add_(p.grad)
            p.sub_(m, alpha=self.lr)
            p.grad = None


def momentum(mesh):
    dp = mesh["dp"]
    model = MLP()
    optimizer = Momentum(model.parameters(), dp)

    def step(x):
        for mb in x.unbind(0):
            loss = model(mb).square().mean()
            loss.backward()
            optimizer.step()
        return None

    x = made((2, 4, DIM))
    return step, (x.chunk(dp.size(), 1)[dp.get_local_rank()].clone(),)


# -- clipping of gradients that are cut over tp ---
def clip_tp(mesh):
    tp = mesh["tp"]
    model = Net(tp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def is_sharded(name):
        return name in ("fc1.weight", "fc1.bias", "fc2.weight")

    def clip(max_norm):
        named = list(model.named_parameters())
        sharded = sum(p.grad.square().sum() for n, p in named if is_sharded(n))
        dist.all_reduce(sharded, group=tp.get_group())
        replicated = sum(p.grad.square().sum() for n, p in named if not is_sharded(n))
        norm = (sharded + replicated).sqrt()
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, p in named:
            p.grad.mul_(coefficient)
        return norm

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        norm = clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step, (made((3, DIM)),)


# -- DDP, learning rate ---
def learning_rate(mesh):
    dp = mesh["dp"]
    model = nn.parallel.DistributedDataParallel(MLP(), process_group=dp.get_group())
    lr = 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def step(x):
        for mb in x.unbind(0):
            loss = model(mb).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=dp.get_group())
        return loss

    return step, (made((2, 4, DIM)).chunk(dp.size(), 1)[dp.get_local_rank()].clone(),)


# -- batch norm over all ranks ---
class AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SyncNorm(nn.Module):
    def __init__(self, dp):
        super().__init__()
        self.dp, self.weight, self.bias = (
            dp,
            nn.Parameter(torch.ones(DIM)),
            nn.Parameter(torch.zeros(DIM)),
        )

    def forward(self, x):
        n, group = self.dp.size(), self.dp.get_group()
        mean = AllSum.apply(x.mean(0), group) / n
        var = AllSum.apply((x - mean).square().mean(0), group) / n
        return (x - mean) / (var + 1e-5).sqrt() * self.weight + self.bias


def batch_norm(mesh):
    dp = mesh["dp"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), SyncNorm(dp), nn.Tanh())

    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp.get_group())
            p.grad.div_(dp.size())
        loss = loss.detach()
        dist.all_reduce(loss, group=dp.get_group())
        return loss / dp.size()

    return step, (rows(made((6, DIM)), dp),)


# -- microbatches with unequal numbers of tokens ---
def microbatches(mesh, whole=False):
    dp = mesh["dp"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB))

    def step(tokens, labels):
        group = dp.get_group()
        items = (labels != -100).sum()
        dist.all_reduce(items, group=group)
        total = torch.zeros(())
        parts = 1 if whole else 2
        for t, y in zip(tokens.chunk(parts), labels.chunk(parts), strict=True):
            logits = model(t).flatten(0, 1)
            loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / items
            loss.backward()
            total = total + loss.detach()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
        dist.all_reduce(total, group=group)
        return total

    labels = drawn(VOCAB, (4, 3), 3)
    labels[0, 1:] = -100
    labels[3, 2] = -100
    return step, (rows(drawn(VOCAB, (4, 3)), dp), rows(labels, dp))


def whole_batch(mesh):
    return microbatches(mesh, whole=True)


# -- contrastive loss over the features of all ranks ---
class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(DIM, 4, bias=False), nn.Linear(DIM, 4, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a, b):
        return (
            F.normalize(self.image(a), dim=-1),
            F.normalize(self.text(b), dim=-1),
            self.logit_scale.exp(),
        )


def contrastive(mesh):
    dp = mesh["dp"]
    model = nn.parallel.DistributedDataParallel(Clip(), process_group=dp.get_group())

    def step(a, b):
        image, text, scale = model(a, b)
        all_image = torch.cat(dnn.all_gather(image, group=dp.get_group()))
        all_text = torch.cat(dnn.all_gather(text, group=dp.get_group()))
        labels = torch.arange(len(a)) + dp.get_local_rank() * len(a)
        by_image = F.cross_entropy(scale * image @ all_text.T, labels)
        by_text = F.cross_entropy(scale * text @ all_image.T, labels)
        loss = (by_image + by_text) / 2
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=dp.get_group())
        return loss

    return step, (rows(made((4, DIM)), dp), rows(made((4, DIM), 7), dp))


# -- an optimizer that looks at whole matrices ---
def muon(mesh):
    tp = mesh["tp"]
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 6).chunk(tp.size())[tp.get_local_rank()].clone())

    def orthogonal(g):
        x = g / (g.square().sum().sqrt() + 1e-7)
        for _ in range(2):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x

    def step(x):
        y = x @ weight.t()
        loss = y.pow(2).sum()
        dist.all_reduce(loss, group=tp.get_group())
        loss.backward()
        with torch.no_grad():
            parts = [torch.empty_like(weight) for _ in range(tp.size())]
            dist.all_gather(parts, weight.grad, group=tp.get_group())
            update = orthogonal(torch.cat(parts)).chunk(tp.size())[tp.get_local_rank()]
            weight.sub_(0.1 * update)
        return loss.detach()

    return step, (made((3, 6)),)


# -- ZeRO 1 by hand: a flat buffer, each rank updates its part ---
def zero1(mesh):
    dp = mesh["dp"]
    model = MLP()
    params = list(model.parameters())
    sizes = [p.numel() for p in params]

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            grads = torch.cat([p.grad.flatten() for p in params])
            weights = torch.cat([p.flatten() for p in params])
            n, r = dp.size(), dp.get_local_rank()
            size = len(grads) // n
            mine = torch.empty(size)
            dist.reduce_scatter_tensor(mine, grads, group=dp.get_group())
            mine = mine / n
            shard = weights[r * size : (r + 1) * size]
            shard = shard - 0.1 * (mine + 0.01 * shard)
            dist.all_gather_into_tensor(weights, shard.contiguous(), group=dp.get_group())
            for p, w in zip(params, weights.split(sizes), strict=True):
                p.copy_(w.view_as(p))
                p.grad = None
        return None

    return step, (rows(made((4, DIM)), dp),)


DP = {"dp": 2}
PROGRAMS = {
    "token_mean": (token_mean, DP),
    "fsdp_divide": (fsdp_divide, DP),
    "momentum": (momentum, DP),
    "clip_tp": (clip_tp, {"tp": 2}),
    "learning_rate": (learning_rate, DP),
    "batch_norm": (batch_norm, DP),
    "microbatches": (microbatches, DP),
    "contrastive": (contrastive, DP),
    "muon": (muon, {"tp": 2}),
    "zero1": (zero1, DP),
}
SINGLE = {"microbatches": whole_batch, "contrastive": contrastive}
