"""Whole programs in data parallel, against torch's DDP on its own reducer: the same bits."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fcoll

WRAPS = {"fcoll": fcoll.DataParallel, "torch": DistributedDataParallel}


@pytest.fixture(params=["ranks2", "shared2"])
def pool(request):
    return request.getfixturevalue(request.param)


def batch(rank: int, number: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(100 * number + rank))


def gan(rank: int, wrap: str) -> list[Tensor]:
    """Two models in turn; the critic is frozen while the generator learns, and has a penalty."""
    torch.manual_seed(0)
    generator = WRAPS[wrap](nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    critic = WRAPS[wrap](nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1)))
    adams = [torch.optim.Adam(m.parameters(), 1e-2) for m in (generator, critic)]
    for step in range(5):
        z, real = batch(rank, step, 4, 4), batch(rank, 50 + step, 4, 8).requires_grad_()
        critic.requires_grad_(True)
        adams[1].zero_grad()
        (slope,) = torch.autograd.grad(critic(real).sum(), [real], create_graph=True)
        both = critic(torch.cat([real, generator(z).detach()]))
        loss = F.softplus(-both[:4]).mean() + F.softplus(both[4:]).mean()
        (loss + slope.square().sum()).backward()
        adams[1].step()
        critic.requires_grad_(False)
        adams[0].zero_grad()
        F.softplus(-critic(generator(z))).mean().backward()
        adams[0].step()
    return [p.detach() for p in itertools.chain(generator.parameters(), critic.parameters())]


def accumulating(rank: int, wrap: str) -> list[Tensor]:
    """Gradient accumulation with clipping and an average of the weights, by deepcopy."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    model = WRAPS[wrap](net)
    average = copy.deepcopy(model).requires_grad_(False)
    adam, norms = torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(4):
        for micro in range(3):
            with contextlib.nullcontext() if micro == 2 else model.no_sync():
                model(batch(rank, 10 * step + micro, 4, 8)).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        adam.step()
        adam.zero_grad(set_to_none=step % 2 == 0)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
    if rank == 0:
        copy.deepcopy(model)  # a checkpoint, on one rank alone
    tuned = copy.deepcopy(model)
    tuned.zero_grad()
    tuned(batch(rank, 99, 4, 8)).sum().backward()
    grads = [p.grad for p in tuned.parameters()]
    return [*norms, *(p.detach() for p in average.parameters()), *grads]


@pytest.mark.parametrize("program", [gan, accumulating])
def test_as_torchs_module(pool, program):
    wanted = pool.run(program, "torch")
    torch.testing.assert_close(pool.run(program, "fcoll"), wanted, rtol=0, atol=0)
