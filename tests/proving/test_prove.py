"""Whole programs: what is proved, what is refuted and how it is named, what cannot be told."""

from __future__ import annotations

import json
import warnings

import proved_programs
import pytest
import torch
import torch.nn.functional as F
from proved_programs import PROGRAMS, SINGLE, batch, cut
from torch import nn
from torch.utils.checkpoint import checkpoint

import fcoll
from fcoll.cli.commands import FAILED, FINE, FOUND
from fcoll.cli.parser import parser
from fcoll.errors import BadMesh, BadOption, CollectiveMismatch, NotEqual, RankFailed

# gradients of each; those of an optimizer's step count for each step
COUNTS = {
    "by_hand": 3,
    "dtensor_tp": 4,
    "torch_ddp": 4,
    "fcoll_ddp": 4,
    "fsdp2": 4,
    "sequence_parallel": 12,
    "fsdp_and_sequence": 12,
    "vocabulary_parallel": 2,
    "hsdp": 4,
    "fsdp_and_sequence_adamw": 14,
    "fsdp_bf16": 4,
    "ddp_autocast": 4,
    "fsdp_accumulating": 4,
    "ddp_accumulating": 4,
    "ddp_compiled": 4,
    "checkpointed": 8,
    "checkpointed_reentrant": 8,
    "fsdp_checkpointed": 12,
    "tied": 5,
    "ring_attention": 4,
    "ring_function": 4,
    "ring_of_results": 4,
    "sequence_by_hand": 4,
    "rotary_complex": 4,
    "rotary_halves": 4,
    "multihead": 4,
    "multihead_tp": 3,
    "pictures": 10,
    "batch_norm_by_hand": 10,
    "dropout_mask": 4,
    "smoothed": 2,
    "torch_loss_parallel": 5,
    "vocabulary_embedding": 5,
    "llama": 0,
    "experts": 3,
    "pipeline_1f1b": 8,
    "pipeline_gpipe": 8,
}
STEPS = {"fsdp_and_sequence_adamw": 2}
RESULTS = {"fsdp_and_sequence_adamw": 2, "llama": 2}
PARAMETERS = {"llama": 9}  # no gradients
TRIALS = {"fsdp_and_sequence_adamw": 1, "fsdp_checkpointed": 1}  # DTensor's dispatch takes long


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of DTensor and DDP
        yield


@pytest.mark.parametrize("name", PROGRAMS)
def test_proved(name):
    build, mesh = PROGRAMS[name]
    trials = TRIALS.get(name, 3)
    verdict = fcoll.prove(build, mesh, single=SINGLE.get(name), trials=trials)
    gradients, results = COUNTS[name], RESULTS.get(name, 1)
    n = PARAMETERS.get(name, gradients // STEPS.get(name, 1))
    assert verdict.equal, str(verdict)
    assert verdict.compared == {"losses": results, "gradients": gradients, "updated parameters": n}
    assert verdict.trials == trials and 0 < verdict.error_bound < 0.03**trials
    assert verdict.require() is verdict


def test_what_is_proved_is_said():
    verdict = fcoll.prove(*PROGRAMS["torch_ddp"])
    assert str(verdict).startswith("proved equal to one device: loss, 4 gradients, 4 updated para")


# -- faults in source: found, and named ---


def fault(change):
    """by_hand's step with one thing wrong."""

    def build(mesh):
        model, dp, tp = proved_programs.ByHand(mesh["tp"]), mesh["dp"], mesh["tp"]
        if change == "norm not reduced":
            model.forward = lambda x: fcoll.all_reduce(
                F.gelu((x * model.norm) @ model.up.t()) @ model.down.t(),
                "sum", tp, grad="identity",
            )  # fmt: skip
        if change == "summed backward":
            model.forward = lambda x: fcoll.all_reduce(
                F.gelu(proved_programs.Copy.apply(x * model.norm, tp) @ model.up.t())
                @ model.down.t(), "sum", tp,
            )  # fmt: skip

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            for p in model.parameters():
                if change != "not averaged":
                    p.grad = fcoll.all_reduce(p.grad, "sum" if change == "no 1/n" else "avg", dp)
                if change == "averaged twice":
                    p.grad = p.grad / dp.size()
            return loss

        return step, (batch(dp, 4, proved_programs.DIM),)

    return build


FAULTS = {
    "norm not reduced": ("gradient of norm", 'all-reduce over "tp" is missing', "then all 3 grad"),
    "not averaged": ("gradient of down", 'an average over "dp" is missing', "then all 3 gradients"),
    "no 1/n": ("gradient of down", "2 times too large", "dividing p.grad by 2: then all 3"),
    "averaged twice": ("gradient of down", "2 times too small", "multiplying p.grad by 2"),
    "summed backward": ("gradient of down", "2 times too large", "dividing p.grad by 2"),
}  # fmt: skip


@pytest.mark.parametrize("change", FAULTS)
def test_faults_are_named(change):
    verdict = fcoll.prove(fault(change), {"dp": 2, "tp": 2})
    name, what, remedy = FAULTS[change]
    assert verdict.equal is False and not verdict
    first = verdict.differences[0]
    assert first.name == name and what in first.what and remedy in first.remedy
    assert first.line.rpartition("/")[2].startswith(("test_prove.py:", "proved_programs.py:"))
    assert f"differs first: {name}, at " in str(verdict)
    with pytest.raises(NotEqual, match="differs first"):
        verdict.require()


def test_the_vocabulary_offset(monkeypatch):
    """Each rank picks the targets of the next one."""
    original = proved_programs.VocabularyLoss.forward

    def wrong(self, x, wanted):
        n, size = self.tp.size(), proved_programs.VOCABULARY
        return original(self, x, (wanted + size // n) % size if n > 1 else wanted)

    monkeypatch.setattr(proved_programs.VocabularyLoss, "forward", wrong)
    verdict = fcoll.prove(*PROGRAMS["vocabulary_parallel"], trials=1)
    names = [d.name for d in verdict.differences]
    assert verdict.equal is False and {"output of VocabularyLoss", "loss"} <= set(names)
    assert names[0].startswith("result of"), "the line in it, before what it gives"


def test_a_norm_of_this_rank_alone():
    """Clipping by a local norm is found in every trial, though the norm may be below the limit."""

    def build(mesh):
        dp = mesh["dp"]
        torch.manual_seed(0)
        w = nn.Parameter(cut(torch.randn(4, 4), dp))
        whole = torch.optim.SGD([w], lr=0.1)

        def step(x):
            full = fcoll.all_gather_into_tensor(w, dp)
            loss = (x @ full.t()).square().sum() / 4
            loss.backward()
            nn.utils.clip_grad_norm_([w], 1.0)
            whole.step()
            return fcoll.all_reduce(loss.detach(), "sum", dp)

        return step, (batch(dp, 4, 4),)

    for seed in range(4):
        assert fcoll.prove(build, {"dp": 2}, trials=1, seed=seed).equal is False


# -- what cannot be told ---


def plain(body, **kwargs):
    """A program of one parameter, on all ranks alike."""

    def build(mesh):
        w = nn.Parameter(torch.ones(4))

        def step(x):
            loss = body(x, w)
            loss.backward()
            return loss

        return step, (torch.arange(4.0) + 1,)

    return fcoll.prove(build, {"dp": 2}, trials=1, **kwargs)


REFUSED = {
    "tolist": lambda x, w: (x * w).sum() + sum((x * w).tolist()),
    "numpy": lambda x, w: (x * w).sum() * float((x * w).detach().numpy()[0]),
    "item": lambda x, w: (x * w).sum() * int((x * w).sum().item()),
    "_local_scalar_dense": lambda x, w: (x * w).sum() * float((x * w).sum()),
    "bits": lambda x, w: (x * w).sum() + (x * w).detach().view(torch.int64).sum(),
    "random": lambda x, w: F.dropout(x * w, 0.5).sum(),
    "complex": lambda x, w: torch.view_as_complex((x * w).view(2, 2)).angle().sum(),
    "int": lambda x, w: (x * w).sum() * (x * w).detach().long().sum(),
    "fft": lambda x, w: torch.fft.rfft(x * w).abs().sum(),
    "division by zero": lambda x, w: (w / (x - x)).sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line(name):
    verdict = plain(REFUSED[name])
    assert verdict.equal is None and not verdict
    assert "test_prove.py:" in verdict.why, verdict.why
    assert str(verdict).startswith("could not tell: ")
    with pytest.raises(NotEqual, match="could not tell"):
        verdict.require()


TAKEN = {
    "complex": lambda x, w: torch.view_as_complex((x * w).view(2, 2)).real.sum(),
    "printed": lambda x, w: (x * w).sum() + 0 * len(f"{(x * w).sum().item():.3f}"),
    "a constant": lambda x, w: (x * w).sum() / torch.tensor(4.0).item(),
    "item": lambda x, w: (x * w).sum() * (x * w).sum().item(),
    "rounded": lambda x, w: (x * w).round().sum() + (x * w).sum(),
    "logcumsumexp": lambda x, w: (x * w).logcumsumexp(0).sum() + torch.logcumsumexp(w, 0).sum(),
    "no dropout": lambda x, w: F.dropout(x * w, 0.0).sum(),
    "evaluated": lambda x, w: F.dropout(x * w, 0.5, training=False).sum(),
    "checkpoint": lambda x, w: checkpoint(lambda x: (x * w).tanh().sum(), x, use_reentrant=False),
    "autocast": lambda x, w: _cast(x, w),
}  # fmt: skip


def _cast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x.view(1, 4) @ w.view(4, 1)).to(torch.bfloat16).float().sum()


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    assert plain(TAKEN[name]).equal, str(plain(TAKEN[name]))


def test_random_numbers_are_taken_where_they_are_allowed():
    assert plain(REFUSED["random"], allow={"rng"}).equal


def test_a_loss_that_is_returned_as_a_number_is_compared():
    def build(mesh, wrong):
        w = nn.Parameter(torch.ones(4))
        factor = 1 + wrong * mesh.get_local_rank()
        return lambda x: ((w * x).sum() * factor).item(), (torch.arange(4.0),)

    assert fcoll.prove(lambda mesh: build(mesh, 0), {"dp": 2}, trials=1).equal
    verdict = fcoll.prove(lambda mesh: build(mesh, 1), {"dp": 2}, trials=1)
    assert verdict.equal is False and verdict.differences[0].name == "loss"


def test_elements_that_no_rank_has():
    """Both ranks take the first half."""

    def build(mesh):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(4).chunk(mesh.size())[0].clone())
        return lambda: (w * w).sum(), ()

    verdict = fcoll.prove(build, {"tp": 2}, trials=1)
    assert verdict.equal is None and "2 of 4 elements of w are on no rank" in verdict.why


def test_calls_that_do_not_match_raise():
    def build(mesh):
        w = nn.Parameter(torch.ones(4))
        op = "sum" if mesh.get_local_rank() == 0 else "max"
        return lambda: fcoll.all_reduce(w, op, mesh).sum(), ()

    with pytest.raises((CollectiveMismatch, RankFailed), match="max"):
        fcoll.prove(build, {"dp": 2})


def test_options():
    build = PROGRAMS["torch_ddp"][0]
    for kwargs in ({"mesh": {}}, {"mesh": {"dp": 128}}):
        with pytest.raises(BadMesh):
            fcoll.prove(build, **kwargs)
    for kwargs in ({"trials": 0}, {"allow": {"everything"}}):
        with pytest.raises(BadOption):
            fcoll.prove(build, {"dp": 2}, **kwargs)


def test_another_program_of_one_device():
    def single(mesh):
        torch.manual_seed(0)
        return proved_programs.trained(
            proved_programs.MLP(), batch(mesh["dp"], 4, proved_programs.DIM)
        )

    build, mesh = PROGRAMS["torch_ddp"]

    def unoptimized(mesh):
        _, args = build(mesh)
        model = nn.parallel.DistributedDataParallel(
            proved_programs.MLP(), process_group=mesh["dp"].get_group()
        )
        return proved_programs.trained(model, args[0])

    assert fcoll.prove(unoptimized, mesh, single=single, trials=1).equal
    assert fcoll.prove(build, mesh, single=single, trials=1).equal is False  # SGD moves them


def test_data_of_the_program_is_left_as_it_was():
    x = torch.arange(4, dtype=torch.float64) / 3
    before, dtype = x.clone(), torch.get_default_dtype()

    def build(mesh):
        w = nn.Parameter(torch.ones(4))
        return lambda: (w * x).sum(), ()

    assert fcoll.prove(build, {"dp": 2}).equal
    assert torch.equal(x, before) and torch.get_default_dtype() == dtype


# -- the command ---

SOURCE = """
import torch, fcoll
from torch import nn

def program(mesh, right):
    w = nn.Parameter(torch.ones(4))
    def step(x):
        loss = (w * x).sum()
        loss.backward()
        if right:
            w.grad = fcoll.all_reduce(w.grad, "avg", mesh["dp"])
        return loss
    return step, (torch.arange(8.0).view(2, 4)[mesh.get_rank() % mesh.size()] + 1,)

def build(mesh):
    return whole(mesh) if mesh.size() == 1 else program(mesh, True)

def whole(mesh):
    w = nn.Parameter(torch.ones(4))
    def step(x):
        loss = (w * x).sum() / 2
        loss.backward()
        return loss
    return step, (torch.arange(8.0).view(2, 4) + 1,)

def wrong(mesh):
    return whole(mesh) if mesh.size() == 1 else program(mesh, False)

def unknown(mesh):
    return lambda x: torch.fft.rfft(x).abs().sum(), (torch.ones(4, requires_grad=True),)
"""


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        ("build", FINE, "proved equal to one device: loss, 1 gradient, 1 updated parameter"),
        ("wrong", FOUND, 'an average over "dp" is missing'),
        ("unknown", FAILED, "could not tell"),
    ],
)
def test_command(target, code, text, tmp_path, capsys):
    from fcoll.cli.commands import run

    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    args = ["prove", f"{path}:{target}", "--mesh", "dp=2", "-q"]
    assert run(parser().parse_args(args)) == code
    assert text in capsys.readouterr().out
    assert run(parser().parse_args([*args, "--json"])) == code
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is {FINE: True, FOUND: False, FAILED: None}[code]


def test_an_answer_without_a_search(tmp_path, capsys, monkeypatch):
    from fcoll.cli.commands import run
    from fcoll.proving import what_if

    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    monkeypatch.delattr(what_if.Investigation, "first_difference")
    args = ["prove", f"{path}:wrong", "--mesh", "dp=2", "-q", "--no-diagnose"]
    assert run(parser().parse_args(args)) == FOUND
    assert 'an average over "dp" is missing' in capsys.readouterr().out
