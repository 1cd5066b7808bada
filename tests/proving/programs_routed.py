"""Tokens that go to experts, microbatches that go through stages, and a Llama that decodes."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from program_parts import DIM, HIDDEN, batch, cut
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import fcoll

EXPERTS, TOP, STAGES = 4, 2, 2


class Experts(nn.Module):
    """The best two experts of each token, which live on different ranks."""

    def __init__(self, ep):
        super().__init__()
        torch.manual_seed(0)
        self.ep = ep
        self.router = nn.Parameter(torch.randn(EXPERTS, DIM))
        self.up = nn.Parameter(cut(torch.randn(EXPERTS, DIM, HIDDEN), ep))
        self.down = nn.Parameter(cut(torch.randn(EXPERTS, HIDDEN, DIM), ep))

    def forward(self, x):
        weights, chosen = (x @ self.router.t()).softmax(-1).topk(TOP, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        sent = counts.view(self.ep.size(), -1).sum(1).tolist()
        theirs = fcoll.all_to_all_single(counts, self.ep)
        got = theirs.view(self.ep.size(), -1).sum(1).tolist()
        tokens = fcoll.all_to_all_single(x[order // TOP], self.ep, got, sent)
        mine = torch.arange(len(self.up)).repeat(self.ep.size()).repeat_interleave(theirs)
        done = torch.empty_like(tokens)
        for e in range(len(self.up)):
            at = (mine == e).nonzero().flatten()
            done = done.index_copy(0, at, F.silu(tokens[at] @ self.up[e]) @ self.down[e])
        back = fcoll.all_to_all_single(done, self.ep, sent, got)
        mixed = back * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // TOP, mixed)


def experts(mesh):
    """Expert parallel: experts have the gradients of all ranks' tokens, the router needs a sum."""
    ep = mesh["ep"]
    model = Experts(ep)
    tokens = 8

    def step(x):
        loss = model(x).square().sum() / tokens
        loss.backward()
        model.router.grad = fcoll.all_reduce(model.router.grad, "sum", ep)
        return fcoll.all_reduce(loss.detach(), "sum", ep)

    return step, (batch(ep, tokens, DIM),)


class Deep(nn.Module):
    """Layers by name, of which a stage keeps its own."""

    def __init__(self, layers=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): nn.Linear(DIM, DIM) for i in range(layers)})

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def pipeline(mesh, schedule, microbatches=4):
    pp = mesh["pp"]
    stage, stages = pp.get_local_rank(), pp.size()
    model = Deep()
    per = len(model.layers) // stages
    for name in list(model.layers):
        if int(name) // per != stage:
            del model.layers[name]
    part = PipelineStage(model, stage, stages, torch.device("cpu"), group=pp.get_group())
    run = schedule(part, microbatches, loss_fn=lambda y, t: (y - t).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, wanted):
        losses = []
        given = (x,) if stage == 0 else ()
        last = {"target": wanted, "losses": losses} if stage == stages - 1 else {}
        run.step(*given, **last)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        return fcoll.all_reduce(loss.detach(), "sum", pp)

    rows = torch.Generator().manual_seed(1)
    return step, tuple(torch.randn(8, DIM, generator=rows) for _ in range(2))


def example(name):
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LLAMA = argparse.Namespace(dim=8, heads=4, kv_heads=2, hidden=8, layers=1, context=3, vocab=12)


def llama(mesh):
    """The logits of two tokens, with the caches of the first: examples/tp_llama.py."""
    tp = mesh["tp"]
    sums, gather = (
        partial(fcoll.all_reduce, group=tp),
        partial(fcoll.all_gather_into_tensor, group=tp),
    )
    module = sys.modules.get("examples_tp_llama") or example("tp_llama")
    split = module.Split(tp.get_local_rank(), tp.size(), sums, gather)
    model = module.Llama(LLAMA, split)
    model.most_likely = partial(fcoll.all_gather_into_tensor, group=tp, dim=-1)

    def step(tokens):
        return [model(token.view(1, 1), torch.tensor([i])) for i, token in enumerate(tokens)]

    return step, (torch.tensor([3, 7]),)


PROGRAMS = {
    "llama": (llama, {"tp": 2}),
    "experts": (experts, {"ep": 2}),
    "pipeline_1f1b": (partial(pipeline, schedule=Schedule1F1B), {"pp": STAGES}),
    "pipeline_gpipe": (partial(pipeline, schedule=ScheduleGPipe), {"pp": STAGES}),
}
