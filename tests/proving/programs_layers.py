"""Norms, convolutions, masks and losses that are cut over ranks."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from program_parts import DIM, MLP, VOCABULARY, Copy, batch, cut, trained
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import fcoll


class Pictures(nn.Module):
    """Convolutions, the norm of the whole batch, and another of groups of channels."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 2, stride=2)
        self.norm, self.groups, self.head = norm, nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.head(self.groups(self.second(x)).mean((2, 3)))


def pictures(mesh):
    """SyncBatchNorm on each rank's part of the batch; one device has BatchNorm of all."""
    dp = mesh["dp"]
    model = Pictures(nn.BatchNorm2d(4))
    if dp.size() > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, dp.get_group())
    model = nn.parallel.DistributedDataParallel(model, process_group=dp.get_group())
    return trained(model, batch(dp, 4, 2, 4, 4), torch.optim.SGD(model.parameters(), lr=0.1))


def batch_norm_by_hand(mesh):
    """Sums of x and x^2 of all ranks, differentiated by autograd."""
    dp = mesh["dp"]

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x):
            sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
            mean, square = fcoll.all_reduce(sums, "sum", dp) / (x[:, 0].numel() * dp.size())
            scale = torch.rsqrt(square - mean.square() + 1e-5) * self.weight
            return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]

    model = fcoll.DataParallel(Pictures(Norm()), dp.get_group())
    return trained(model, batch(dp, 4, 2, 4, 4))


def batch_norm_whole(mesh):
    """The same in one device's words."""
    return trained(Pictures(nn.BatchNorm2d(4)), batch(mesh["dp"], 4, 2, 4, 4))


def dropout_mask(mesh):
    """A mask that is given: what is kept is scaled."""
    dp, keep = mesh["dp"], 0.75
    model = fcoll.DataParallel(MLP(), dp.get_group())
    mask = cut(torch.rand(4, DIM, generator=torch.Generator().manual_seed(3)) < keep, dp)

    def step(x, mask):
        loss = (model(x) * mask / keep).square().mean()
        loss.backward()
        return loss

    return step, (batch(dp, 4, DIM), mask)


class SmoothedLoss(nn.Module):
    """Cross entropy with label smoothing, of logits that are cut over the vocabulary."""

    def __init__(self, tp, smoothing):
        super().__init__()
        torch.manual_seed(0)
        self.tp, self.smoothing = tp, smoothing
        self.head = nn.Parameter(cut(torch.randn(VOCABULARY, DIM), tp))

    def forward(self, x, wanted):
        logits = Copy.apply(x, self.tp) @ self.head.t()
        most = fcoll.all_reduce(logits.detach().amax(-1), "max", self.tp)
        logits = logits - most.unsqueeze(-1)
        first = self.tp.get_local_rank() * len(self.head)
        here = (wanted >= first) & (wanted < first + len(self.head))
        index = torch.where(here, wanted - first, 0)
        picked = torch.where(here, logits.gather(-1, index.unsqueeze(-1)).squeeze(-1), 0.0)
        sums = torch.stack([logits.exp().sum(-1), picked, logits.sum(-1)])
        total, picked, all_logits = fcoll.all_reduce(sums, "sum", self.tp, grad="identity")
        even = all_logits / VOCABULARY
        return (total.log() - (1 - self.smoothing) * picked - self.smoothing * even).mean()


def smoothed(mesh):
    loss, scale = SmoothedLoss(mesh["tp"], 0.1), nn.Parameter(torch.ones(DIM))

    def step(x, wanted):
        out = loss(x * scale, wanted)
        out.backward()
        return out

    return step, (torch.randn(4, DIM), torch.tensor([1, 5, 7, 11]))


def smoothed_whole(mesh):
    """F.cross_entropy says what it should be."""
    loss, scale = SmoothedLoss(mesh["tp"], 0.1), nn.Parameter(torch.ones(DIM))

    def step(x, wanted):
        out = F.cross_entropy((x * scale) @ loss.head.t(), wanted, label_smoothing=0.1)
        out.backward()
        return out

    return step, (torch.randn(4, DIM), torch.tensor([1, 5, 7, 11]))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(VOCABULARY, DIM), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def torch_loss_parallel(mesh):
    """torch's own cross entropy on logits that are a DTensor cut over the vocabulary."""
    plan = {"head": ColwiseParallel(use_local_output=False)}
    model = parallelize_module(Head(), mesh["tp"], plan) if mesh.size() > 1 else Head()

    def step(tokens, wanted):
        with loss_parallel() if mesh.size() > 1 else contextlib.nullcontext():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
            loss.backward()
        return loss

    return step, (torch.tensor([[1, 5], [7, 2]]), torch.arange(4).view(2, 2))


def vocabulary_embedding(mesh):
    """Rows of the table over tp: tokens of other ranks are masked, the results summed."""
    tp = mesh["tp"]
    torch.manual_seed(0)
    table = nn.Parameter(cut(torch.randn(VOCABULARY, DIM), tp))
    model = MLP()

    def step(tokens):
        first = tp.get_local_rank() * len(table)
        away = (tokens < first) | (tokens >= first + len(table))
        x = F.embedding((tokens - first).masked_fill(away, 0), table)
        x = fcoll.all_reduce(x.masked_fill(away.unsqueeze(-1), 0.0), "sum", tp, grad="identity")
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return step, (torch.tensor([[1, 5, 7, 11], [0, 3, 6, 10]]),)


TP, DP = {"tp": 2}, {"dp": 2}
PROGRAMS = {
    "pictures": (pictures, DP),
    "batch_norm_by_hand": (batch_norm_by_hand, DP),
    "dropout_mask": (dropout_mask, DP),
    "smoothed": (smoothed, TP),
    "torch_loss_parallel": (torch_loss_parallel, TP),
    "vocabulary_embedding": (vocabulary_embedding, TP),
}
SINGLE = {"batch_norm_by_hand": batch_norm_whole, "smoothed": smoothed_whole}
