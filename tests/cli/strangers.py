"""Three programs as somebody writes them who has read only the README."""

from __future__ import annotations

import logging
import math
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import fcoll

log = logging.getLogger("train")


# -- a plain training loop with logging ---


class MLP(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim)
        )
        self.norm = nn.BatchNorm1d(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        return self.head(self.norm(self.net(x) + x))


def plain(mesh):
    model = MLP()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
    losses, state = [], {"step": 0, "best": math.inf}

    def step(x, y):
        model.train()
        start = time.perf_counter()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training")
            raise SystemExit(1)
        loss.backward()
        for p in model.parameters():
            p.grad = fcoll.all_reduce(p.grad, "avg", mesh["dp"])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        correct = (logits.argmax(-1) == y).sum().item()
        if state["step"] % 100 == 0:
            print(
                f"step {state['step']:5d} loss {loss.item():.4f} ppl {math.exp(loss.item()):.2f} "
                f"acc {correct / len(y):.1%} ({correct:d}/{len(y)}) norm {norm:.2f} "
                f"lr {sched.get_last_lr()[0]:.2e} {time.perf_counter() - start:.2f}s"
            )
            log.info("loss %.3f norm %s", loss.item(), norm.item())
        state["step"] += 1
        losses.append(loss.item())
        state["best"] = min(state["best"], loss.item())
        return loss

    return step, (torch.randn(32, 64), torch.randint(0, 10, (32,)))


# -- a mixture of experts, top-1 ---


class MoE(nn.Module):
    """One expert on each rank."""

    def __init__(self, dim, ep):
        super().__init__()
        self.ep, self.n = ep, ep.size()
        self.router = nn.Linear(dim, self.n, bias=False)
        self.expert = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        weight, choice = F.softmax(self.router(x), dim=-1).max(-1)
        order = torch.argsort(choice)
        counts = torch.bincount(choice, minlength=self.n)
        received = fcoll.all_to_all_single(counts, self.ep)  # how many rows to expect
        in_splits, out_splits = counts.tolist(), received.tolist()
        rows = fcoll.all_to_all_single(x[order], self.ep, out_splits, in_splits)
        back = fcoll.all_to_all_single(self.expert(rows), self.ep, in_splits, out_splits)
        out = torch.empty_like(x)
        out[order] = back
        return x + out * weight[:, None]


def moe(mesh):
    model = nn.Sequential(MoE(16, mesh["dp"]), nn.LayerNorm(16), MoE(16, mesh["dp"]))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        print("loss:", loss.item())
        return loss

    return step, (torch.randn(64, 16),)


# -- FSDP2 ---


def fsdp(mesh):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(64, 10))
    for module in model:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(x, y):
        loss = F.cross_entropy(model(x).mean(1), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 100:
            log.warning("gradient norm %.1f", norm.item())
        opt.step()
        opt.zero_grad()
        print(f"loss {loss.item():.3f} norm {norm.item():.3f}")
        return loss

    return train_step, (torch.randn(4, 8, 64), torch.randint(0, 10, (4,)))
