"""fcoll.check(values=True): after the proofs the program runs on simulated ranks, with values."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll.checking.simulated_run import run_on_ranks
from fcoll.cli import main
from fcoll.cli.commands import FAILED, FINE, FOUND
from fcoll.errors import BadMesh, CollectiveMismatch, Deadlock, NotOnSimulatedRanks, NoValues


def line(mark: str) -> str:
    """This file's line with the mark, as errors show it."""
    lines = inspect.getsource(inspect.getmodule(line)).splitlines()
    (number,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}")]
    return f"{Path(__file__).name}:{number}"


def training(mesh):
    """Data x tensor parallel; the backward pass is the step's own."""
    torch.manual_seed(mesh.get_rank())
    w = torch.nn.Linear(4, 4)

    def step(x):
        w.zero_grad()
        loss = fcoll.all_reduce(w(x), "sum", mesh["tp"]).square().mean()
        loss.backward()
        for p in w.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        return loss.detach()

    return step, (torch.randn(3, 4),)


def test_a_right_program():
    found = fcoll.check(training, mesh={"dp": 2, "tp": 2}, values=True)
    assert found.ok and found.values == 4
    assert "values: ran on 4 simulated ranks, all results are finite" in str(found)
    without = fcoll.check(training, mesh={"dp": 2, "tp": 2})
    assert without.values == 0 and "values" not in str(without)


def test_every_rank_has_its_place_and_values():
    seen = {}

    def build(mesh):
        def step(x):
            y = fcoll.all_reduce(x, "sum", mesh["tp"])
            seen[dist.get_rank()] = (mesh.get_coordinate(), mesh.mesh_dim_names, y.tolist())
            return y

        return step, (torch.tensor([float(mesh.get_rank())]),)

    assert run_on_ranks(build, {"dp": 2, "tp": 2}).ranks == 4
    axes = ("dp", "tp")
    assert {r: (tuple(at), names, y) for r, (at, names, y) in seen.items()} == {
        0: ((0, 0), axes, [1.0]),
        1: ((0, 1), axes, [1.0]),
        2: ((1, 0), axes, [5.0]),
        3: ((1, 1), axes, [5.0]),
    }


@pytest.mark.parametrize("own", [False, True])
def test_the_backward_pass_runs_once(own):
    """As in the trace: that of the step, or, if it has none, that of its results."""
    gradients = []

    def build(mesh):
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda g: gradients.append(g.tolist()))

        def step():
            out = fcoll.all_reduce(3 * x, "sum", mesh).sum()
            if own:
                out.backward()
            return out

        return step, ()

    run_on_ranks(build, {"dp": 2})
    assert gradients == [[6.0, 6.0]] * 2
    gradients.clear()
    run_on_ranks(build, {"dp": 2}, mode="forward")
    assert gradients == ([[6.0, 6.0]] * 2 if own else [])


def deadlock(mesh):
    def step(x):
        if fcoll.assume(bool(x.sum() > 0), False):
            dist.barrier()  # waits
        return x * 2

    return step, (torch.full((2,), float(mesh.get_rank())),)


def differs(mesh):
    def step(x):
        op = "max" if fcoll.assume(bool(x.sum() > 0), False) else "sum"
        return fcoll.all_reduce(x, op, mesh) * 2  # differs

    return step, (torch.full((2,), float(mesh.get_rank())),)


def raises(mesh):
    def step(x):
        y = fcoll.all_reduce(x, "sum", mesh)
        if fcoll.assume(bool(x.sum() > 0), False):
            raise KeyError("no such expert")  # raises
        return y

    return step, (torch.full((2,), float(mesh.get_rank())),)


@pytest.mark.parametrize(
    "build, error, says",
    [
        (deadlock, Deadlock, "rank 1 waits in barrier"),
        (differs, CollectiveMismatch, "max"),
        (raises, KeyError, "rank 1: KeyError: 'no such expert'"),
    ],
)
def test_what_only_a_run_shows(build, error, says):
    assert fcoll.check(build, mesh={"dp": 2}).ok, "the proofs cannot see it"
    with pytest.raises(error) as raised:
        fcoll.check(build, mesh={"dp": 2}, values=True)
    assert says in str(raised.value)
    marks = {deadlock: "waits", differs: "differs", raises: "raises"}
    assert line(marks[build]) in str(raised.value)
    assert fcoll.check(training, mesh={"dp": 2, "tp": 1}, values=True).ok, "the next one runs"


def test_results_and_gradients_that_are_not_finite():
    def build(mesh):
        w = torch.nn.Linear(2, 2)
        zero = float(mesh.get_rank() != 1)

        def step(x):
            return {"loss": w(x).sum() * (1 / torch.tensor(zero)), "fine": torch.ones(2)}

        return step, (torch.ones(1, 2),)

    found = fcoll.check(build, mesh={"dp": 2}, values=True)
    assert not found.ok and str(found).startswith("found")
    told = [str(f) for f in found.findings]
    assert told[0] == "rank 1: the result['loss'] has 1 infinite of 1 elements"
    assert "rank 1: the gradient of weight has 4 infinite of 4 elements" in told
    assert all(f.rank == 1 for f in found.findings)
    assert "finite" not in str(found).splitlines()[1].replace("infinite", "")


def test_a_rank_that_exits_early():
    def build(mesh):
        def step(x):
            if fcoll.assume(bool(x.sum() > 0), False):
                raise SystemExit(0)  # exits
            return x * 2

        return step, (torch.full((2,), float(mesh.get_rank())),)

    found = fcoll.check(build, mesh={"dp": 2}, values=True)
    (finding,) = found.findings
    assert finding.rank == 1 and "ended by SystemExit" in str(finding)
    assert line("exits") in str(finding)


@pytest.mark.parametrize("made", ["float8", "sparse", "complex", "int", "bool", "nothing"])
def test_results_of_any_kind(made):
    kinds = {
        "float8": torch.tensor([1.0, float("nan")]).to(torch.float8_e5m2),
        "sparse": torch.tensor([1.0, float("nan")]).to_sparse(),
        "complex": torch.tensor([1.0, complex(0, float("nan"))]),
        "int": torch.ones(2, dtype=torch.int64),
        "bool": True,
        "nothing": None,
    }

    def build(mesh):
        return lambda: kinds[made], ()

    found = run_on_ranks(build, {"dp": 2}).findings
    bad = made in ("float8", "sparse", "complex")
    assert found == (
        tuple((r, "the result has 1 NaN of 2 elements") for r in (0, 1)) if bad else ()
    )


@pytest.mark.parametrize("where", ["argument", "parameter", "in the step"])
def test_without_values_it_cannot_be_run(where):
    def build(mesh):
        w = torch.nn.Linear(2, 2, device="meta" if where == "parameter" else "cpu")

        def step(x):
            if where == "in the step":
                dist.all_reduce(torch.ones(2, device="meta"))
            return w(x)

        return step, (torch.ones(1, 2, device="meta" if where != "in the step" else "cpu"),)

    with pytest.raises(NoValues, match="real tensors"):
        fcoll.check(build, mesh={"dp": 2}, values=True)


def test_too_many_ranks():
    """Said before the work; the mesh that it names is small enough."""
    with pytest.raises(BadMesh, match=r"128 simulated ranks.*smaller mesh, as dp=8,tp=8\."):
        fcoll.check(None, mesh={"dp": 16, "tp": 8}, values=True)


def test_shared_parameters_are_told():
    w = torch.nn.Linear(2, 2, bias=False)

    def build(mesh):
        return lambda x: fcoll.all_reduce(w(x), "sum", mesh), (torch.ones(1, 2),)

    found = fcoll.check(build, mesh={"dp": 2}, values=True)
    assert found.ok and any("share 1 tensor that requires gradients" in n for n in found.notes)


def test_progress_counts_the_ranks():
    told = []
    fcoll.check(training, {"dp": 2, "tp": 1}, values=True, progress=lambda *at: told.append(at))
    assert told == [(1, 2), (2, 2)] * 2


def test_a_check_on_a_simulated_rank():
    def nested(rank):
        fcoll.check(training, {"dp": 2, "tp": 1})

    with pytest.raises(NotOnSimulatedRanks, match=r"outside fcoll\.simulate_ranks"):
        fcoll.simulate_ranks(nested, 2)


# -- the command ---


@pytest.mark.parametrize(
    "name, code, says",
    [
        ("training", FINE, "values: ran on 2 simulated ranks"),
        ("deadlock", FOUND, "rank 1 waits in barrier"),
        ("differs", FOUND, line("differs")),
        ("raises", FOUND, f"no such expert', at {__file__}"),
    ],
)
def test_command(name, code, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # lines are shown whole
    target = f"{__file__}:{name}"
    assert main(["check", target, "--mesh", "dp=2,tp=1"[: 4 if code else None], "--values"]) == code
    printed = capsys.readouterr()
    assert says in printed.out
    assert "then running them" in printed.err


def test_command_that_cannot_be_told(capsys):
    assert main(["check", "--demo", "tiny", "--mesh", "dp=2,tp=1", "--values"]) == FAILED
    assert "NoValues: the tensor" in capsys.readouterr().err
    assert main(["check", "--demo", "tiny", "--mesh", "dp=65,tp=1", "--values"]) == FAILED
    assert "take a smaller mesh, as dp=33,tp=1" in capsys.readouterr().err
