"""Programs as they are usually written: loops with .item(), ZeRO by hand, a cache, a last stage."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from program_parts import DIM, MLP, VOCABULARY, batch, cut, targets
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fcoll

ROWS = 4


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        yield


def wrapped(model, mesh):
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def accumulating(mesh):
    """Rates by hand, microbatches, autocast, a scaler that is off, clipping, a running mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), MLP(), nn.Linear(DIM, VOCABULARY))
    trained, scaler = wrapped(model, mesh), torch.amp.GradScaler("cuda", enabled=False)
    groups = [[p for p in model.parameters() if (p.dim() > 1) is big] for big in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
    )

    def step(tokens):
        mean = 0.0
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * (1 + math.cos(math.pi / 10)) * 6e-4
        for i, rows in enumerate(tokens.chunk(2)):
            trained.require_backward_grad_sync = i == 1
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(trained(rows).flatten(0, 1), rows.flatten()) / 2
            scaler.scale(loss).backward()
            mean += loss.item()
        if not math.isfinite(mean):
            raise SystemExit(1)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": mean, "text": f"{mean:.3f}", "tokens": tokens.numel()}

    return step, (targets(mesh["dp"], ROWS, 3),)


def averaged(mesh):
    """NAdam with a schedule; two averages of the weights; frozen weights."""
    model = MLP()
    model.up.weight.requires_grad_(False)
    mean = copy.deepcopy(model)
    swa = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    trained = wrapped(model, mesh)
    optimizer = torch.optim.NAdam([p for p in model.parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step(x):
        for _ in range(2):
            optimizer.zero_grad()
            loss = trained(x).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for a, p in zip(mean.parameters(), model.parameters(), strict=True):
                    a.mul_(0.999).add_(p, alpha=1 - 0.999)
            swa.update_parameters(model)
        return loss

    return step, (batch(mesh["dp"], ROWS, DIM),)


def zero_redundancy(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at the import
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = MLP()
    trained, group = wrapped(model, mesh), mesh["dp"].get_group()
    kind = torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, process_group=group, lr=1e-3)

    def step(x):
        loss = trained(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (batch(mesh["dp"], ROWS, DIM),)


def zero_by_hand(mesh):
    """Each rank has Adam's state of its part of all parameters, flattened."""
    model, dp = MLP(), mesh["dp"]
    n, group = dp.size(), dp.get_group()
    size = sum(p.numel() for p in model.parameters())
    part = -(-size // 4) * 4 // n
    mean, square = torch.zeros(part), torch.zeros(part)

    def flat(tensors):
        whole = torch.cat([x.detach().flatten() for x in tensors])
        return F.pad(whole, (0, n * part - size))

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        grad = torch.empty(part)
        dist.reduce_scatter_tensor(grad, flat(p.grad for p in model.parameters()) / n, group=group)
        mine = flat(model.parameters()).chunk(n)[dp.get_local_rank()].clone()
        mean.lerp_(grad, 0.1)
        square.mul_(0.999).addcmul_(grad, grad, value=0.001)
        mine.addcdiv_(mean / 0.1, (square / 0.001).sqrt() + 1e-8, value=-1e-3)
        whole = torch.empty(n * part)
        dist.all_gather_into_tensor(whole, mine, group=group)
        with torch.no_grad():
            nn.utils.vector_to_parameters(whole[:size], model.parameters())
        model.zero_grad()
        return loss

    return step, (batch(dp, ROWS, DIM),)


def experts_top1(mesh):
    """Tokens go to the ranks of their experts, as many as the router says, maybe none."""
    torch.manual_seed(0)
    dp, count = mesh["dp"], 4
    n, group = dp.size(), dp.get_group()
    gate = nn.Linear(DIM, count, bias=False)
    weights = nn.Parameter(cut(torch.randn(count, DIM, DIM), dp))

    def step(x):
        top, index = gate(x).softmax(-1).max(-1)
        order, sent = index.argsort(stable=True), torch.bincount(index, minlength=count)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        ins, outs = (c.view(n, -1).sum(1).tolist() for c in (sent, received))
        rows = all_to_all_single(torch.empty(sum(outs), DIM), x[order], outs, ins, group=group)
        local = torch.arange(count // n)
        which = torch.cat([local.repeat_interleave(c) for c in received.view(n, -1)])
        done = (rows.unsqueeze(1) @ weights[which]).squeeze(1)
        back = all_to_all_single(torch.empty(len(x), DIM), done, ins, outs, group=group)
        y = torch.zeros_like(x).index_copy(0, order, back) * top.unsqueeze(-1)
        loss = y.square().sum() / (n * len(x))
        loss.backward()
        dist.all_reduce(gate.weight.grad, group=group)
        return loss

    return step, (batch(dp, 8, DIM),)


def decoding(mesh):
    """Greedy, with a cache of the rank's heads; the tokens are compared, too."""
    tp, heads = mesh["tp"], 4
    torch.manual_seed(0)
    q, k, v = (nn.Parameter(cut(torch.randn(16, DIM), tp)) for _ in range(3))
    out, embed = nn.Parameter(cut(torch.randn(DIM, 16), tp, 1)), torch.randn(VOCABULARY, DIM)
    cache = torch.zeros(2, heads // tp.size(), 3, 4)

    @torch.no_grad()
    def step(token):
        tokens = []
        for t in range(3):
            x = embed[token]
            query, cache[0, :, t], cache[1, :, t] = ((w @ x).view(-1, 4) for w in (q, k, v))
            weights = torch.einsum("hd,htd->ht", query, cache[0, :, : t + 1]).softmax(-1)
            y = out @ torch.einsum("ht,htd->hd", weights, cache[1, :, : t + 1]).flatten()
            token = (embed @ fcoll.all_reduce(y, "sum", tp)).argmax()
            tokens.append(token)
        return torch.stack(tokens)

    return step, (torch.tensor(3),)


class Stage(nn.Module):
    def __init__(self, first, end):
        super().__init__()
        self.layers = nn.ModuleDict()
        for i in range(first, end):
            torch.manual_seed(i)
            self.layers[str(i)] = nn.Linear(DIM, DIM)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).relu()
        return x


def last_stage(mesh):
    """Stages of torch's pipelines; the last one alone returns the loss."""
    pp = mesh["pp"]
    rank, n = pp.get_local_rank(), pp.size()
    model = Stage(rank * 4 // n, (rank + 1) * 4 // n)
    optimizer = torch.optim.Adam(model.parameters())
    stage = PipelineStage(model, rank, n, torch.device("cpu"), group=pp.get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
    g = torch.Generator().manual_seed(1)

    def step(x, wanted):
        losses = []
        is_last = rank == n - 1
        args = (x,) if rank == 0 else ()
        schedule.step(*args, **({"target": wanted, "losses": losses} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if is_last else None

    return step, (torch.randn(4, DIM, generator=g), torch.randn(4, DIM, generator=g))


def pictures(mesh):
    """Pools, padding and enlarging, and a penalty on the gradient of the input."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip
    trained = wrapped(model, mesh)

    def step(x):
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(trained(x), torch.arange(len(x)) % 3, label_smoothing=0.1)
        loss.backward()
        return loss

    return step, (batch(mesh["dp"], 6, 1, 4, 4),)


DP = {"dp": 2}
PROGRAMS = {
    "accumulating": (accumulating, DP),
    "averaged": (averaged, DP),
    "zero_redundancy": (zero_redundancy, DP),
    "zero_by_hand": (zero_by_hand, DP),
    "experts_top1": (experts_top1, DP),
    "decoding": (decoding, {"tp": 2}),
    "last_stage": (last_stage, {"pp": 2}),
    "pictures": (pictures, DP),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_proved(name):
    build, mesh = PROGRAMS[name]
    verdict = fcoll.prove(build, mesh, trials=1)
    assert verdict.equal, str(verdict)
