"""DTensors beside plain tensors, experts, two stages, a norm that is cut."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn.functional as F
from program_parts import drawn, made
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

DIM, HIDDEN, EXPERTS, VOCAB = 8, 12, 4, 12


# -- DTensor, and plain tensors between ---
class HalfDTensor(nn.Module):
    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        self.tp = tp
        self.scale = nn.Parameter(torch.ones(DIM))
        self.up = nn.Parameter(distribute_tensor(torch.randn(HIDDEN, DIM), tp, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(DIM, HIDDEN), tp, [Shard(1)]))

    def forward(self, x):
        x = DTensor.from_local(x * self.scale, self.tp, [Replicate()])
        x = x.to_local(grad_placements=[Partial()])
        h = F.silu(x @ self.up.to_local().t())
        y = h @ self.down.to_local().t()
        y = DTensor.from_local(y, self.tp, [Partial()])
        return y.redistribute(placements=[Replicate()]).to_local()


def half_dtensor(mesh):
    model = HalfDTensor(mesh["tp"])

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return step, (made((3, DIM)),)


# -- experts over ep, tokens go by all-to-all, gradients of experts need no sum ---
class MoE(nn.Module):
    def __init__(self, ep):
        super().__init__()
        torch.manual_seed(0)
        self.ep, self.n_local = ep, EXPERTS // ep.size()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        first = ep.get_local_rank() * self.n_local
        self.w1 = nn.Parameter(
            torch.randn(EXPERTS, HIDDEN, DIM)[first : first + self.n_local].clone()
        )
        self.w2 = nn.Parameter(
            torch.randn(EXPERTS, DIM, HIDDEN)[first : first + self.n_local].clone()
        )

    def forward(self, x):
        n, group = self.ep.size(), self.ep.get_group()
        logits = self.router(x)
        probs = logits.softmax(-1)
        weight, chosen = probs.topk(2, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        everyone = torch.cat(dnn.all_gather(x.contiguous(), group=group))
        w = torch.cat(
            dnn.all_gather(torch.zeros_like(probs).scatter(-1, chosen, weight), group=group)
        )
        out = torch.zeros_like(everyone)
        for e in range(self.n_local):
            expert = self.ep.get_local_rank() * self.n_local + e
            h = F.silu(everyone @ self.w1[e].t()) @ self.w2[e].t()
            out = out + h * w[:, expert].unsqueeze(-1)
        out = dnn.reduce_scatter(torch.empty_like(x), list(out.chunk(n)), group=group)
        # load balance: the share of tokens and the mean probability, over all tokens
        share = F.one_hot(chosen, EXPERTS).sum(1).double().mean(0)
        dist.all_reduce(share, group=group)
        share = share / n
        mean = dnn.all_reduce(probs.mean(0), group=group) / n
        balance = EXPERTS * (share * mean).sum()
        z = logits.logsumexp(-1).square().mean()
        return out, balance, z


def moe(mesh):
    ep = mesh["ep"]
    model = MoE(ep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        n, group = ep.size(), ep.get_group()
        out, balance, z = model(x)
        loss = (x + out).square().mean() + 0.01 * balance + 0.001 * z
        loss.backward()
        for name, p in model.named_parameters():
            if name.startswith("router"):
                dist.all_reduce(p.grad, group=group)
            p.grad.div_(n)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        return loss / n

    x = made((4, DIM))
    return step, (x.chunk(ep.size())[ep.get_local_rank()].clone(),)


# -- experts over tp: tokens are on all ranks, weights of the router too ---
class LocalExperts(nn.Module):
    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        self.tp, self.n_local = tp, EXPERTS // tp.size()
        self.first = tp.get_local_rank() * self.n_local
        self.gate = nn.Parameter(torch.randn(EXPERTS, DIM))
        self.w = nn.Parameter(
            torch.randn(EXPERTS, DIM, DIM)[self.first : self.first + self.n_local].clone()
        )

    def forward(self, x):
        logits = x @ self.gate.t()
        weight, chosen = logits.topk(2, dim=-1)
        weight = weight.softmax(-1)
        y = torch.zeros_like(x)
        for e in range(self.n_local):
            share = torch.where(chosen == self.first + e, weight, 0.0).sum(-1, keepdim=True)
            y = y + share * torch.tanh(x @ self.w[e])
        z = logits.logsumexp(-1).square().mean()
        return dnn.all_reduce(y, group=self.tp.get_group()), z


def local_experts(mesh):
    tp = mesh["tp"]
    model = LocalExperts(tp)

    def step(x):
        y, z = model(x)
        n = tp.size()
        loss = y.square().mean() / n + 0.01 * z / n
        loss.backward()
        dist.all_reduce(model.gate.grad, group=tp.get_group())
        loss = loss.detach()
        dist.all_reduce(loss, group=tp.get_group())
        return loss

    return step, (made((4, DIM)),)


# -- two stages; the head is the embedding ---
def tied_stages(mesh):
    pp = mesh["pp"]
    group, n, stage = pp.get_group(), pp.size(), pp.get_local_rank()
    torch.manual_seed(0)
    embedding = nn.Parameter(torch.randn(VOCAB, DIM))
    layers = [nn.Parameter(torch.randn(DIM, DIM)) for _ in range(2)]
    mine = range(2) if n == 1 else [stage]
    weights = nn.ParameterDict({str(i): layers[i] for i in mine})

    def step(tokens, labels):
        total = torch.zeros(())
        micro = list(zip(tokens.chunk(2), labels.chunk(2), strict=True))
        kept = []
        for t, y in micro:
            if stage == 0:
                x = F.embedding(t, embedding)
            else:
                x = torch.empty(*t.shape, DIM)
                dist.recv(x, group=group, group_src=stage - 1)
                x.requires_grad_()
            h = x
            for i in mine:
                h = torch.tanh(h @ weights[str(i)])
            if stage < n - 1:
                dist.send(h.detach(), group=group, group_dst=stage + 1)
                kept.append((x, h))
            else:
                loss = F.cross_entropy((h @ embedding.t()).flatten(0, 1), y.flatten()) / len(micro)
                total = total + loss.detach()
                kept.append((x, loss))
        for x, h in kept:
            if stage < n - 1:
                grad = torch.empty_like(h)
                dist.recv(grad, group=group, group_src=stage + 1)
                h.backward(grad)
            else:
                h.backward()
            if stage > 0:
                dist.send(x.grad, group=group, group_dst=stage - 1)
        if n > 1:
            dist.all_reduce(embedding.grad, group=group)
        return total if stage == n - 1 else None

    return step, (drawn(VOCAB, (4, 3)), drawn(VOCAB, (4, 3), 4))


# -- a norm over queries of all heads ---
class WideNorm(nn.Module):
    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        self.tp = tp
        n, r = tp.size(), tp.get_local_rank()
        self.wq = nn.Parameter(torch.randn(DIM, DIM).chunk(n)[r].clone())
        self.norm = nn.Parameter(torch.ones(DIM).chunk(n)[r].clone())
        self.wo = nn.Parameter(torch.randn(DIM, DIM).chunk(n, 1)[r].clone())

    def forward(self, x):
        q = x @ self.wq.t()
        square = dnn.all_reduce(q.square().sum(-1, keepdim=True), group=self.tp.get_group())
        q = q * torch.rsqrt(square / DIM + 1e-6) * self.norm
        y = torch.relu(q) @ self.wo.t()
        return dnn.all_reduce(y, group=self.tp.get_group())


def wide_norm(mesh):
    tp = mesh["tp"]
    model = WideNorm(tp)

    def step(x):
        loss = model(x).square().mean()
        (loss / tp.size()).backward()
        return loss.detach()

    return step, (made((3, DIM)),)


PROGRAMS = {
    "half_dtensor": (half_dtensor, {"tp": 2}),
    "moe": (moe, {"ep": 2}),
    "local_experts": (local_experts, {"tp": 2}),
    "tied_stages": (tied_stages, {"pp": 2}),
    "wide_norm": (wide_norm, {"tp": 2}),
}
