"""Optimizers in lists and fused are torch's plain loops."""

from __future__ import annotations

import pytest
import torch
from program_parts import DIM, MLP, trained

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
