"""Deep programs, cut at the outputs of all modules at once: a fault in one layer of many alike."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from program_parts import DIM, HIDDEN, Copy, cut
from proved_programs import PROGRAMS
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import fcoll
from fcoll.proving import prove as prove_module

LAYERS, AT = 6, 4  # in the second of two stages
GRID = {"pp": 2, "tp": 2}


@pytest.fixture(autouse=True)
def _deep(monkeypatch):
    monkeypatch.setattr(prove_module, "WEAK", 0.0)  # a few layers are deep enough
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of pipelines
        yield


class Layer(nn.Module):
    def __init__(self, number, tp, fault):
        super().__init__()
        torch.manual_seed(number)
        self.tp, self.fault = tp, fault
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Parameter(cut(torch.randn(HIDDEN, DIM), tp))
        self.down = nn.Parameter(cut(torch.randn(DIM, HIDDEN), tp, 1))

    def forward(self, x):
        y = self.norm(x)
        if self.fault != "not copied":
            y = Copy.apply(y, self.tp)
        if self.fault == "asked" and y.sum().item() > 0:
            y = 2 * y
        y = F.gelu(y @ self.up.t()) @ self.down.t()
        if self.fault != "not summed":
            y = fcoll.all_reduce(y, "sum", self.tp, grad="identity")
        if self.fault == "scaled":
            y = y * 1.5
        return y if self.fault == "no residual" else x + y


class Stage(nn.Module):
    def __init__(self, pp, tp, fault):
        super().__init__()
        first, n = pp.get_local_rank() * LAYERS // pp.size(), LAYERS // pp.size()
        mine = range(first, first + n)
        self.layers = nn.ModuleDict({str(i): Layer(i, tp, fault if i == AT else "") for i in mine})
        self.order = list(mine)
        if AT in mine and fault == "swapped":
            self.order[-2:] = self.order[:-3:-1]
        if AT in mine and fault == "another's weight":
            self.layers[str(AT)].borrowed = (self.layers[str(AT - 1)].up,)
            self.layers[str(AT)].forward = self.borrowing

    def borrowing(self, x):
        layer = self.layers[str(AT)]
        y = F.gelu(Copy.apply(layer.norm(x), layer.tp) @ layer.borrowed[0].t()) @ layer.down.t()
        return x + fcoll.all_reduce(y, "sum", layer.tp, grad="identity")

    def forward(self, x):
        for i in self.order:
            x = self.layers[str(i)](x)
        return x


def layered(fault=""):
    """Pipeline and tensor parallel, SGD; ``fault`` in one layer, of ranks only."""

    def build(mesh):
        pp, tp = mesh["pp"], mesh["tp"]
        place, n = pp.get_local_rank(), pp.size()
        model = Stage(pp, tp, fault if mesh.size() > 1 else "")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        stage = PipelineStage(model, place, n, torch.device("cpu"), group=pp.get_group())
        schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
        g = torch.Generator().manual_seed(1)

        def step(x, wanted):
            losses, is_last = [], place == n - 1
            how = {"target": wanted, "losses": losses} if is_last else {}
            schedule.step(*((x,) if place == 0 else ()), **how)
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).mean() if is_last else None

        return step, (torch.randn(4, DIM, generator=g), torch.randn(4, DIM, generator=g))

    return build


FAULTS = {  # of layer 4: where it shows
    "not copied": "gradient of the output of layers.4.norm",
    "not summed": "output of layers.4",
    "scaled": "output of layers.4",
    "no residual": "output of layers.4",
    "another's weight": "output of layers.4",
    "swapped": "input of layers.4",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_layer(fault):
    verdict = fcoll.prove(layered(fault), GRID, trials=1, diagnose=False)
    assert verdict.equal is False and verdict.differences[0].name == FAULTS[fault], str(verdict)


def test_a_branch_in_one_layer():
    """It is taken in about half of the trials."""
    verdict = fcoll.prove(layered("asked"), GRID, diagnose=False)
    assert verdict.equal is False and verdict.differences[0].name == "output of layers.4"


# -- one run with cuts is enough ---


@pytest.fixture
def uncut_runs(monkeypatch):
    runs, original = [], prove_module._Proof._run_uncut

    def run(self, *args):
        runs.append(args)
        return original(self, *args)

    monkeypatch.setattr(prove_module._Proof, "_run_uncut", run)
    return runs


def test_layers_are_cut_without_a_trial_before(uncut_runs):
    verdict = fcoll.prove(layered(), GRID, trials=2)
    assert verdict.equal and verdict.trials == 2 and not uncut_runs, str(verdict)
    assert {"layers.0", "layers.5", "layers.3.norm", "optimizer steps"} <= set(verdict.cuts)
    assert verdict.compared == {"losses": 1, "gradients": 18, "updated parameters": 18}


def test_partial_sums_are_found_by_a_trial(uncut_runs):
    """Outputs that ranks add up later are no one's: where to cut is told by a trial without."""
    verdict = fcoll.prove(*PROGRAMS["by_hand"], trials=1)
    assert verdict.equal and not uncut_runs, str(verdict)

    def build(mesh):
        tp = mesh["tp"]
        torch.manual_seed(0)
        model, whole = nn.Module(), torch.randn(DIM, DIM)
        model.part = nn.Linear(DIM, DIM, bias=False)
        model.rows = nn.Linear(DIM // tp.size(), DIM, bias=False)
        with torch.no_grad():
            model.rows.weight.copy_(cut(whole, tp, 1))

        def step(x):
            y = Copy.apply(model.part(x), tp).chunk(tp.size(), -1)[tp.get_local_rank()]
            loss = fcoll.all_reduce(model.rows(y), "sum", tp, grad="identity").square().sum()
            loss.backward()
            return loss

        return step, (torch.linspace(-1, 1, DIM),)

    verdict = fcoll.prove(build, {"tp": 2}, trials=1)
    assert verdict.equal and len(uncut_runs) == 1 and verdict.cuts == ("part",), str(verdict)


# -- divisors that have no inverse, by chance ---

MANY = 2**18  # more than twice the largest p


@pytest.mark.parametrize(
    ("of_ranks", "equal"),
    [
        (lambda x, w: x / (2 * w), True),
        (lambda x, w: x / w / 2, None),  # the same, but where w has no inverse
        (lambda x, w: x / w / 3, False),
    ],
)
def test_many_quotients(of_ranks, equal, monkeypatch):
    monkeypatch.setattr(prove_module, "WEAK", 1.0)

    def build(mesh):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(MANY))
        quotient = of_ranks if mesh.size() > 1 else lambda x, w: x / (2 * w)
        return lambda x: quotient(x, w.detach()), (torch.ones(()),)

    verdict = fcoll.prove(build, {"dp": 2}, trials=1, diagnose=False)
    assert verdict.equal is equal, str(verdict)
    if equal is None:
        assert "no difference but by divisors that are multiples of p" in verdict.why
