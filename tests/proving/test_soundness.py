"""Faults that exact arithmetic could hide: none is called proved. What leaves the tensors."""

from __future__ import annotations

import math
import types
import warnings
from math import isfinite

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from program_parts import batch, cut
from torch import nn

import fcoll


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Model(nn.Module):
    """A weight, whose loss and gradient are summed over dp, and a buffer."""

    def __init__(self, dp):
        super().__init__()
        torch.manual_seed(0)
        self.dp, self.weight = dp, nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        return fcoll.all_reduce((x @ self.weight).square().sum(), "sum", self.dp, grad="identity")

    def backward(self, loss):
        loss.backward()
        self.weight.grad = fcoll.all_reduce(self.weight.grad, "sum", self.dp)


def program(body, optimizer=None):
    """``body(model, x, right)`` after the backward pass gives the result."""

    def build(mesh, wrong):
        model = Model(mesh["dp"])
        taken = optimizer(model) if optimizer else None
        is_right = not wrong or mesh.size() == 1

        def step(x):
            loss = model(x)
            model.backward(loss)
            if taken is not None:
                taken.is_right = is_right
                taken.step()
            return body(model, x, loss, is_right)

        return step, (batch(mesh["dp"], 4, 4),)

    return build


class Late(torch.optim.Optimizer):
    """Takes the gradient of the step before, too: a wrong state shows in the next step."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            last = self.state[p].setdefault("last", torch.zeros_like(p))
            p.sub_(0.1 * (p.grad + last))
            last.add_(p.grad if self.is_right else p.grad / 2)


def _of_buffer(model, x, loss, right):
    mean = x.mean(0)
    mean = fcoll.all_reduce(mean, "avg", model.dp) if right else mean
    model.seen.lerp_(mean, 0.1)
    return loss


def _counted(model, x, loss, right):
    n = torch.tensor(len(x))
    return loss, n if right else fcoll.all_reduce(n, "sum", model.dp) + 1


HIDDEN = {  # name: (body, optimizer, what differs)
    "a buffer": (_of_buffer, None, "updated buffer of seen"),
    "a state": (lambda model, x, loss, right: loss, Late, "optimizer's last of weight"),
    "an integer": (_counted, None, "result[1]"),
    "a number": (lambda m, x, loss, right: {"n": 3 if right else 4}, None, "result['n']"),
    "an item": (
        lambda m, x, loss, right: (loss.item() + (0 if right else loss.item())) / 2,
        None,
        "loss",
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_faults_that_show_nowhere_else(name):
    body, optimizer, where = HIDDEN[name]
    build = program(body, optimizer)
    right = fcoll.prove(lambda mesh: build(mesh, False), {"dp": 2}, trials=1)
    assert right.equal, str(right)
    verdict = fcoll.prove(lambda mesh: build(mesh, True), {"dp": 2}, trials=1)
    # ahead of a wrong result may stand the line that it comes from
    first = next(d for d in verdict.differences if not d.name.startswith("result of "))
    assert verdict.equal is False and first.name == where, str(verdict)


def test_gradients_that_no_optimizer_takes():
    """Of two layers one is trained; the other's gradient is left, and not reduced."""

    def build(mesh, reduced):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)

        def step(x):
            loss = layers(x).square().sum()
            loss.backward()
            for p in layers.parameters() if reduced else layers[0].parameters():
                p.grad = fcoll.all_reduce(p.grad, "sum", mesh["dp"])
            optimizer.step()
            return loss.detach()

        return step, (batch(mesh["dp"], 4, 4),)

    assert fcoll.prove(lambda mesh: build(mesh, True), {"dp": 2}, trials=1).equal
    verdict = fcoll.prove(lambda mesh: build(mesh, False), {"dp": 2}, trials=1)
    assert verdict.equal is False and verdict.differences[0].name == "gradient of 1.bias"


def test_buffers_in_parts():
    """A cache that is cut over tp; one rank writes the wrong row."""

    def build(mesh, wrong):
        tp, module = mesh["tp"], nn.Module()
        torch.manual_seed(0)
        module.weight = nn.Parameter(cut(torch.randn(4, 4), tp))
        module.register_buffer("cache", cut(torch.zeros(4, 3), tp))

        def step(x):
            y = module.weight.detach() @ x
            module.cache[:, tp.get_local_rank() if wrong else 0] = y
            return fcoll.all_reduce((module.weight @ x).sum(), "sum", tp, grad="identity")

        return step, (torch.arange(4.0),)

    assert fcoll.prove(lambda mesh: build(mesh, False), {"tp": 2}, trials=1).equal
    verdict = fcoll.prove(lambda mesh: build(mesh, True), {"tp": 2}, trials=1)
    assert verdict.equal is False and verdict.differences[0].name == "updated buffer of cache"


# -- what simulated ranks share, and real ones do not ---

SHARED = nn.Parameter(torch.randn(4, dtype=torch.float64))
TOTAL = torch.zeros(1, dtype=torch.float64)


def of_shared_parameter(mesh):
    """Its gradient adds up both ranks', and nobody reduces it."""

    def step(x):
        loss = (x @ SHARED).square().sum()
        loss.backward()
        return loss.detach()

    return step, (batch(mesh["dp"], 4, 4),)


def of_shared_total(mesh):
    model = Model(mesh["dp"])

    def step(x):
        TOTAL.add_((x @ model.weight).sum().detach())
        fcoll.barrier(mesh["dp"])
        return TOTAL.clone()

    return step, (batch(mesh["dp"], 4, 4),)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (of_shared_parameter, "simulated ranks share the parameter SHARED"),
        (of_shared_total, "simulated ranks share TOTAL, which the step writes"),
    ],
)
def test_shared_tensors(build, why):
    verdict = fcoll.prove(build, {"dp": 2}, trials=1)
    assert verdict.equal is None and why in verdict.why and "build()" in verdict.why


def test_parts_of_one_tensor_are_no_shared_tensors():
    whole = torch.randn(4, 4, dtype=torch.float64)

    def build(mesh):
        n, tp = mesh.size(), mesh["tp"]
        weight = nn.Parameter(whole.chunk(n)[tp.get_local_rank()])
        return lambda x: fcoll.all_reduce((weight @ x).sum(), "sum", tp, grad="identity"), (
            torch.arange(4.0),
        )

    assert fcoll.prove(build, {"tp": 2}, trials=1).equal


class Hidden:
    """What no search finds, so that it is not lifted."""

    __slots__ = ("values",)


def test_comparisons_of_what_was_not_lifted():
    """Each rank looks at thresholds of its own; as integers they would all be 0."""
    hidden = Hidden()
    hidden.values = torch.tensor([0.1, 0.9, 0.3, 0.8], dtype=torch.float64)

    def build(mesh):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4))

        def step():
            above = hidden.values.roll(mesh.get_rank()) > 0.5
            return torch.where(above, weight, 2 * weight).sum()

        return step, ()

    verdict = fcoll.prove(build, {"dp": 2}, trials=1)
    assert verdict.equal is None and "not made by the step's own ops" in verdict.why


def test_a_step_that_does_nothing():
    def build(mesh):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4))

        def step(x):
            (x @ weight).sum().backward()
            weight.grad = None

        return step, (batch(mesh["dp"], 4, 4),)

    verdict = fcoll.prove(build, {"dp": 2}, trials=1)
    assert verdict.equal is None and "there is nothing to compare" in verdict.why


def test_a_power_of_one_is_a_tensor_of_its_own():
    def build(mesh, power):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4))

        def step():
            x = weight.detach()
            y = x**1 if power else x.clone()
            y.add_(1)
            return (weight * y).sum()

        return step, ()

    single = lambda mesh: build(mesh, False)  # noqa: E731
    assert fcoll.prove(lambda mesh: build(mesh, True), {"dp": 1}, single=single, trials=1).equal


# -- values as numbers of Python's ---


def of_item(use):
    def build(mesh):
        model = Model(mesh["dp"])

        def step(x):
            loss = model(x)
            model.backward(loss)
            return use(loss)

        return step, (batch(mesh["dp"], 4, 4),)

    return fcoll.prove(build, {"dp": 2}, trials=1)


def _guarded(loss):
    if not math.isfinite(loss.item()):
        raise SystemExit(1)
    return loss


SHOWN = {
    "running mean": lambda loss: 0.9 * loss.item() + 0.1 * loss.item(),
    "mean of steps": lambda loss: sum([loss.item(), loss.item()]) / 2,
    "perplexity": lambda loss: {"ppl": math.exp(loss.item()), "loss": f"{loss.item():.3f}"},
    "guard": _guarded,
}


@pytest.mark.parametrize("name", SHOWN)
def test_numbers_that_are_shown(name):
    verdict = of_item(SHOWN[name])
    assert verdict.equal, str(verdict)


ASKED = {
    "floor": lambda loss: math.floor(loss.item()),
    "an integer": lambda loss: torch.ones(2, dtype=torch.int64).fill_(loss.item()),
    "a setting": lambda loss: F.threshold(torch.ones(2) * loss, loss.item(), 0.0),
    "a float": lambda loss: float(loss.item()),
    "a truth": lambda loss: 1 if loss.item() else 2,
    "a function's": lambda loss: isfinite(loss.item()),
    "numpy's": lambda loss: bool(np.isnan(loss.item())),
}


@pytest.mark.parametrize("name", ASKED)
def test_numbers_that_are_used(name):
    verdict = of_item(ASKED[name])
    assert verdict.equal is None and ", at " in verdict.why
    words = ("used as a number of Python's", "out of it", "become integers")
    assert any(word in verdict.why for word in words), verdict.why


# A value that one device has: of the sum of all ranks' losses.
USED = {
    "a product": lambda w, loss: w * loss.item(),
    "of a list": lambda w, loss: torch.tensor([1.0, loss.item()]).sum() * w[0],
    "a tensor": lambda w, loss: torch.as_tensor(loss.item()) * w[0],
    "a factor": lambda w, loss: torch.add(w, w, alpha=loss.item()),
    "negated": lambda w, loss: torch.sub(w, w, alpha=2 * loss.item()),
    "filled": lambda w, loss: w * torch.full((4,), loss.item() ** 2),
    "masked": lambda w, loss: w.masked_fill(torch.arange(4) > 1, loss.item()),
    "an element": lambda w, loss: _set(w, loss.item()),
    "the larger": lambda w, loss: w * max(0.1, loss.item(), -loss.item()),
    "compared": lambda w, loss: w * (2 if loss.item() > 1 else loss.item()),
    "a root": lambda w, loss: w * math.sqrt(loss.item()) * abs(loss.item()),
}


def _set(w, value):
    w = w.clone()
    w[1] = value
    return w


@pytest.mark.parametrize("name", USED)
def test_numbers_go_back_into_tensors(name):
    def build(mesh, right):
        w = torch.nn.Parameter(torch.ones(4))

        def step(x):
            local = (x * w).sum()
            whole = fcoll.all_reduce(local.detach(), "sum", mesh["dp"])
            loss = USED[name](w, whole if right else 2 * whole / mesh["dp"].size()).sum()
            loss.backward()
            return loss

        return step, (batch(mesh["dp"], 4, 4),)

    whole = lambda mesh: build(mesh, True)  # noqa: E731
    trials = 4 if name in ("compared", "the larger") else 1  # they take one way in a trial
    how = {"single": whole, "trials": trials, "diagnose": False}
    verdict = fcoll.prove(whole, {"dp": 2}, **how)
    assert verdict.equal, str(verdict)
    wrong = fcoll.prove(lambda mesh: build(mesh, mesh["dp"].size() == 1), {"dp": 4}, **how)
    assert wrong.equal is False, str(wrong)


def test_a_number_that_was_computed_with_unseen_is_refused():
    verdict = of_item(lambda loss: float("nan"))
    assert verdict.equal is None and "NaN" in verdict.why


# -- numbers of the program ---


def test_a_number_of_a_tensor_is_known():
    """As an optimizer asks for: a learning rate that is a tensor, a product of decays."""
    rate = types.SimpleNamespace()

    def build(mesh):
        model = Model(mesh["dp"])
        rate.value = torch.tensor(1e-3)

        def step(x):
            decay = torch.ones(())
            for k in range(1, 3):
                decay.mul_(0.9 * (1 - 0.5 * 0.96**k))
            loss = model(x)
            loss = loss * decay.item() + loss * rate.value.item()
            model.backward(loss)
            return loss

        return step, (batch(mesh["dp"], 4, 4),)

    assert fcoll.prove(build, {"dp": 2}, trials=1).equal


def test_integers_beside_floats():
    """-1 among floats is the residue of -1; ones of a mask are no floats."""

    def build(mesh, wrong):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4))

        def step():
            joined = torch.cat([weight, torch.tensor([-1, 2])])
            kept = torch.ones_like(joined, dtype=torch.bool)
            kept[0] = False
            return joined.square().masked_fill(~kept, 0.0).sum() * (1 + wrong * mesh.get_rank())

        return step, ()

    assert fcoll.prove(lambda mesh: build(mesh, 0), {"dp": 2}, trials=1).equal
    assert fcoll.prove(lambda mesh: build(mesh, 1), {"dp": 2}, trials=1).equal is False


def test_only_the_last_stage_has_the_loss():
    def build(mesh, wrong):
        pp = mesh["pp"]
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4))

        def step(x):
            loss = (x @ weight).sum()
            loss.backward()
            is_last = pp.get_local_rank() == pp.size() - 1
            return loss * (1 + wrong * pp.get_local_rank()) if is_last else None

        return step, (torch.arange(4.0),)

    assert fcoll.prove(lambda mesh: build(mesh, 0), {"pp": 2}, trials=1).equal
    assert fcoll.prove(lambda mesh: build(mesh, 1), {"pp": 2}, trials=1).equal is False
