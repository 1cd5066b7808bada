"""Optimizers in lists and fused are torch's plain loops."""

from __future__ import annotations

import contextlib

import pytest
import torch
from program_parts import DIM, MLP, batch, trained
from torch import nn

import fcoll

DECAY = {"weight_decay": 0.1}
SGD = {"momentum": 0.9, "nesterov": True, **DECAY}
OPTIMIZERS = [
    (torch.optim.AdamW, DECAY, "foreach"),
    (torch.optim.AdamW, DECAY, "fused"),
    (torch.optim.AdamW, {"amsgrad": True}, "fused"),
    (torch.optim.Adam, DECAY, "fused"),
    (torch.optim.Adam, {"maximize": True}, "fused"),
    (torch.optim.SGD, SGD, "foreach"),
    (torch.optim.SGD, SGD, "fused"),
    (torch.optim.RMSprop, DECAY, "foreach"),
    (torch.optim.Adagrad, DECAY, "foreach"),
    (torch.optim.Adamax, DECAY, "foreach"),
]


def steps(optimizer, options):
    """Two, the second with another gradient."""

    def build(mesh):
        model = MLP()
        step, args = trained(model, torch.randn(4, DIM), optimizer(model.parameters(), **options))
        return (lambda x: [step(x), step(x)]), args

    return build


@pytest.mark.parametrize(("optimizer", "options", "form"), OPTIMIZERS)
def test_forms_are_one_function(optimizer, options, form):
    one, other = steps(optimizer, options), steps(optimizer, {**options, form: True})
    assert fcoll.prove(other, {"dp": 1}, single=one, trials=1).equal
    wrong = steps(optimizer, {**options, form: True, "weight_decay": 0.2})
    assert fcoll.prove(wrong, {"dp": 1}, single=one, trials=1).equal is False


# LBFGS takes floats, SparseAdam makes sparse tensors.
ALL = """
    Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD Muon NAdam RAdam RMSprop Rprop SGD
"""


def ddp(name, wrong=False):
    def build(mesh):
        model = MLP()
        trained_model = nn.parallel.DistributedDataParallel(
            model, process_group=mesh["dp"].get_group()
        )
        matrices = [p for p in model.parameters() if p.dim() == 2]
        kind = getattr(torch.optim, name)
        optimizer = kind(matrices if name == "Muon" else model.parameters(), lr=0.1)
        step, args = trained(trained_model, batch(mesh["dp"], 4, DIM), optimizer)
        if not wrong:
            return (lambda x: [step(x), step(x)]), args

        def local(x):
            with trained_model.no_sync():
                return [step(x), step(x)]

        return local, args

    return build


@pytest.mark.parametrize("name", ALL.split())
def test_all_of_torch(name):
    verdict = fcoll.prove(ddp(name), {"dp": 2}, trials=1)
    assert verdict.equal, str(verdict)
    assert fcoll.prove(ddp(name, wrong=True), {"dp": 2}, trials=1, diagnose=False).equal is False


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients(fused):
    def build(mesh, wrong=False):
        model = nn.parallel.DistributedDataParallel(MLP(), process_group=mesh["dp"].get_group())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)

        def step(x):
            for _ in range(2):
                optimizer.zero_grad()
                with model.no_sync() if wrong else contextlib.nullcontext():
                    loss = model(x).square().mean()
                    scaler.scale(loss).backward()
                if not fused:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            return loss, scaler.get_scale()

        return step, (batch(mesh["dp"], 4, DIM),)

    verdict = fcoll.prove(build, {"dp": 2}, trials=1)
    assert verdict.equal, str(verdict)
    wrong = fcoll.prove(lambda mesh: build(mesh, wrong=True), {"dp": 2}, trials=1, diagnose=False)
    assert wrong.equal is False
