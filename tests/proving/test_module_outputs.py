"""What modules give: deep programs are cut there, and differences are named by them."""

from __future__ import annotations

import warnings

import pytest
import torch
from proved_programs import DIM, HIDDEN, PROGRAMS, Copy, cut, trained
from torch import nn

import fcoll
from fcoll.errors import RankFailed
from fcoll.proving import prove as prove_module
from fcoll.proving.module_outputs import CUT


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of DTensor and DDP
        yield


class Layer(nn.Module):
    """Cut over tp by hand; of twice the degree of its input."""

    def __init__(self, tp, fault=""):
        super().__init__()
        self.tp, self.fault = tp, fault
        self.norm = nn.Linear(DIM, DIM, bias=False)
        self.up = nn.Linear(DIM, HIDDEN // tp.size(), bias=False)
        self.down = nn.Linear(HIDDEN // tp.size(), DIM, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(cut(torch.randn(HIDDEN, DIM), tp))
            self.down.weight.copy_(cut(torch.randn(DIM, HIDDEN), tp, 1))

    def forward(self, x):
        x = self.norm(x)
        if self.fault != "no copy":
            x = Copy.apply(x, self.tp)
        y = self.down(self.up(x).square())
        if self.fault == "not summed":
            return y
        op = "avg" if self.fault == "averaged" else "sum"
        return fcoll.all_reduce(y, op, self.tp, grad="identity")


def stack(layers, fault="", at=-1):
    def build(mesh):
        tp = mesh["tp"]
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(tp, fault if i == at else "") for i in range(layers)))
        model.append(nn.Linear(DIM, 3))
        return trained(model, torch.linspace(-1, 1, 4 * DIM).view(4, DIM))

    return build


# -- cuts ---


def test_a_deep_program_is_cut():
    """16 layers: a degree of 2^18 without cuts, of some hundreds with them."""
    verdict = fcoll.prove(stack(16), {"tp": 2})
    assert verdict.equal, str(verdict)
    assert verdict.error_bound < 1e-6 and "cut at 49 places" in str(verdict)
    assert {"0", "15", "7.norm", "15.up", "16"} <= set(verdict.cuts)
    assert not any("down" in name for name in verdict.cuts), "partial sums are no one's"
    assert not any(name.startswith(CUT) for name in verdict.uninterpreted)
    assert verdict.to_dict()["cuts"] == verdict.cuts


def test_without_cuts_it_could_not_be_told(monkeypatch):
    monkeypatch.setattr(prove_module, "cuttable", lambda *args: frozenset())
    verdict = fcoll.prove(stack(16), {"tp": 2})
    assert verdict.equal is None and "prove fewer layers" in verdict.why


def test_a_shallow_program_is_not_cut():
    assert fcoll.prove(stack(2), {"tp": 2}).cuts == ()


@pytest.mark.parametrize("name", ["sequence_parallel", "fsdp2", "torch_ddp", "dtensor_tp"])
def test_cuts_in_programs_of_torchs_wrappers(name, monkeypatch):
    monkeypatch.setattr(prove_module, "WEAK", 0.0)
    verdict = fcoll.prove(*PROGRAMS[name], trials=1)
    assert verdict.equal and verdict.cuts, str(verdict)


def test_what_holds_only_without_cuts_is_told_without_them(monkeypatch):
    """The output of a module less the same, computed again: zero, but not behind a cut."""
    monkeypatch.setattr(prove_module, "WEAK", 0.0)

    def build(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 3))

        def step(x):
            y = model[0](x)
            if mesh.size() > 1:
                y = y + (y - (x @ model[0].weight.t() + model[0].bias)).detach()
            loss = model[1](y).square().sum()
            loss.backward()
            return loss

        return step, (torch.linspace(-1, 1, DIM),)

    verdict = fcoll.prove(build, {"tp": 2}, trials=1)
    assert verdict.equal and verdict.cuts == (), str(verdict)


@pytest.mark.parametrize("at", [0, 8])
@pytest.mark.parametrize("fault", ["no copy", "not summed", "averaged"])
def test_a_fault_in_a_deep_program(fault, at):
    verdict = fcoll.prove(stack(10, fault, at), {"tp": 2}, trials=1)
    assert verdict.equal is False
    first = verdict.differences[0]
    name, what, remedy = {
        "no copy": (
            "gradient of the result of linear", "is missing", "all_reduce(the gradient",
        ),
        "not summed": ("result of linear", "an all-reduce over", "all_reduce(the result of linear"),
        "averaged": ("result of all_reduce", "2 times too small", '"sum" in place of "avg"'),
    }[fault]  # fmt: skip
    if fault == "no copy" and not at:  # one gradient of a parameter is wrong
        name, remedy = "gradient of 0.norm.weight", "all_reduce(p.grad, "
    assert first.name == name and what in first.what and remedy in first.remedy, str(verdict)
    assert "test_module_outputs.py:" in first.line


# -- inputs ---


def test_inputs_of_other_numbers_are_no_difference():
    """Modules of other sizes take other random numbers, and so does the batch after them."""

    def build(mesh):
        torch.manual_seed(0)
        layer = Layer(mesh["tp"])
        return trained(layer, torch.randn(4, DIM))

    verdict = fcoll.prove(build, {"tp": 2}, trials=1)
    assert verdict.equal is None
    assert verdict.why.startswith("args[0] of the step has numbers that one device's has not")


# -- names and data that differ ---


def net(names, mesh):
    torch.manual_seed(0)
    model = nn.Module()
    for name in names:
        model.add_module(name, nn.Linear(DIM, DIM))

    def step(x, y):
        loss = (getattr(model, names[1])(getattr(model, names[0])(x).relu()) - y).square().mean()
        loss.backward()
        for p in model.parameters():
            p.grad = fcoll.all_reduce(p.grad, "avg", mesh["dp"])
        return loss

    x = torch.linspace(-1, 1, 4 * DIM).view(4, DIM)
    return step, (x, x.flip(0) * 2)


def test_rename_and_data():
    def build(mesh):
        return net(("first", "last"), mesh)

    def single(mesh):
        return net(("up", "down"), mesh)

    rename, data = {"first": "up", "last.weight": "down.weight", "last": "down"}, {"x": "dp"}
    both = {**data, "y": ("dp", 0)}
    verdict = fcoll.prove(build, {"dp": 2}, single=single, rename=rename, data=both, trials=1)
    assert verdict.equal and verdict.compared["gradients"] == 4, str(verdict)
    alike = fcoll.prove(build, {"dp": 2}, single=single, rename=rename, trials=1)
    assert alike.equal, "every rank has the whole batch"
    missing = fcoll.prove(build, {"dp": 2}, single=single, trials=1)
    assert missing.equal is None and "no parameter 'first.weight'" in missing.why
    with pytest.raises(RankFailed, match=r"Use one of arguments \['x', 'y'\] and axes"):
        fcoll.prove(build, {"dp": 2}, data={"z": "dp"}, trials=1)
    with pytest.raises(RankFailed, match=r"the dims that 3 divides: x is \(4, 8\)"):
        fcoll.prove(build, {"dp": 3}, data=data, trials=1)


# -- gradients that are not the step's last word ---


def by_hand_sgd(mesh, change=""):
    """Reduces a copy of the gradients, and updates the parameters itself."""
    dp = mesh["dp"]
    torch.manual_seed(0)
    model = nn.Linear(DIM, DIM)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                grad = p.grad if change == "local" else fcoll.all_reduce(p.grad, "avg", dp)
                p -= 0.1 * grad
        return loss

    return step, (cut(torch.linspace(-1, 1, 4 * DIM).view(4, DIM), dp),)


def test_gradients_that_the_step_leaves_behind():
    verdict = fcoll.prove(by_hand_sgd, {"dp": 2}, trials=1)
    assert verdict.equal and verdict.compared["gradients"] == 0, str(verdict)
    assert verdict.compared["updated parameters"] == 2
    wrong = fcoll.prove(lambda mesh: by_hand_sgd(mesh, "local"), {"dp": 2}, trials=1)
    assert wrong.equal is False and len(wrong.differences) == 4
    assert 'an average over "dp" is missing' in wrong.differences[0].what


def test_a_step_that_takes_its_gradients_by_torch_func():
    def build(mesh):
        dp = mesh["dp"]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1))

        def step(x):
            parameters = dict(model.named_parameters())
            loss_of = lambda p: torch.func.functional_call(model, p, (x,)).square().mean()  # noqa: E731
            grads, loss = torch.func.grad_and_value(loss_of)(parameters)
            with torch.no_grad():
                for name, p in parameters.items():
                    p -= 0.1 * fcoll.all_reduce(grads[name], "avg", dp)
            return loss

        return step, (cut(torch.linspace(-1, 1, 4 * DIM).view(4, DIM), dp),)

    verdict = fcoll.prove(build, {"dp": 2}, trials=1)
    assert verdict.equal and verdict.compared["updated parameters"] == 4, str(verdict)


@pytest.mark.parametrize("op, equal", [("sum", True), ("avg", False), (None, True)])
def test_a_result_that_is_reduced_is_no_part_of_one(op, equal):
    """Of a sum over the batch: the same 1/n on all ranks is wrong; parts of it are not."""

    def build(mesh):
        dp = mesh["dp"]
        w = nn.Parameter(torch.ones(DIM))

        def step(x):
            loss = (x * w).sum()
            loss.backward()
            w.grad = fcoll.all_reduce(w.grad, "sum", dp)
            return loss if op is None else fcoll.all_reduce(loss.detach(), op, dp)

        return step, (cut(torch.linspace(-1, 2, 4 * DIM).view(4, DIM), dp),)

    assert fcoll.prove(build, {"dp": 2}, trials=1).equal is equal
