"""``fcoll prove`` and ``fcoll check --prove``: codes, files, libraries with globals."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from fcoll.cli import main
from fcoll.proving.verdict import Difference, Verdict
from fcoll.report import proof_page

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/15_prove.py"
MESH = ("--mesh", "dp=2,tp=2", "-q")

PROGRAM = """\
import torch, fcoll, keeps_its_rank

def build(mesh):
    keeps_its_rank.set_up(mesh.get_rank())
    weight = torch.nn.Parameter(torch.ones(4))
    def step(x):
        loss = (x * weight).sum() * (1 + mesh.get_rank() - keeps_its_rank.RANK)
        loss.backward()
        return loss
    return step, (torch.arange(4.0),)

def single(mesh):
    step, args = build(mesh)
    return (lambda x: 2 * step(x)), args

def draws(mesh):
    return (lambda x: (x * torch.rand(4)).sum()), (torch.ones(4),)
"""
LIBRARY = """\
RANK = None

def set_up(rank):
    global RANK
    assert RANK is None, "set up already"
    RANK = rank
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "proved_here.py").write_text(PROGRAM)
    (tmp_path / "keeps_its_rank.py").write_text(LIBRARY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("proved_here", "keeps_its_rank"):
        sys.modules.pop(name, None)


def run(capsys, *args: str) -> tuple[int, str]:
    code = main(args)
    return code, capsys.readouterr().out


def test_check_goes_on_to_prove(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, out = run(capsys, "check", f"{EXAMPLE}:build", *MESH, "--prove")
    assert code == 0
    assert out.startswith("ok: proved for all 4 ranks") and "\nproved equal to one device" in out
    code, out = run(capsys, "check", f"{EXAMPLE}:broken", *MESH, "--prove", "--json")
    found = json.loads(out)
    assert code == 1 and found["ok"] and found["prove"]["equal"] is False
    assert 'an all-reduce over "tp" is missing' in found["prove"]["text"]


def test_what_cannot_be_told(capsys, project):
    code, out = run(capsys, "check", "proved_here.py:draws", "--mesh", "dp=2", "-q", "--prove")
    assert code == 2 and "could not tell" in out


def test_a_library_with_globals(capsys, project):
    program = ("proved_here.py:build", "--mesh", "dp=2", "-q")
    isolate = ("--isolate", "keeps_its_rank")
    assert run(capsys, "prove", *program, *isolate)[0] == 0
    assert run(capsys, "check", *program, *isolate, "--values", "--prove")[0] == 0
    code, out = run(capsys, "prove", *program, *isolate, "--single", "proved_here.py:single")
    assert code == 1 and out.startswith("differs first: loss")
    code, out = run(capsys, "prove", *program)
    assert code == 2 and "set up already" in out


def test_the_picture_in_the_readme_is_that_of_the_example(capsys, tmp_path, monkeypatch):
    """FCOLL_UPDATE_GOLDEN=1 draws it anew."""
    monkeypatch.chdir(ROOT)
    kept = ROOT / "docs" / "verdict.svg"
    drawn, page = tmp_path / "verdict.svg", tmp_path / "verdict.html"
    files = ("--svg", str(drawn), "--html", str(page))
    assert run(capsys, "prove", f"{EXAMPLE}:broken", *MESH, *files)[0] == 1
    if os.environ.get("FCOLL_UPDATE_GOLDEN"):
        kept.write_text(drawn.read_text())
    assert drawn.read_text() == kept.read_text()
    text = page.read_text()
    assert drawn.read_text().rstrip() in text.replace("\n</section>", "</section>")
    assert "x = x * self.scale" in text  # the line, and those around it
    assert text.count("<tr><td>") == 2


def test_pages_of_other_verdicts():
    compared = {"losses": 1, "gradients": 1000, "updated parameters": 1000}
    proved = proof_page.html(Verdict(True, 2e-14, 3, compared, uninterpreted=("gelu",)), "a <b>")
    assert "≤ 2e-14" in proved and "gelu" in proved and "a &lt;b&gt;" in proved
    assert 'class="differs"' not in proved and "1000 gradients" in proved
    assert proved.count('<rect class="same"') < 1000  # what fits
    unknown = proof_page.svg(Verdict(None, 1.0, 0, {}, why="no rule & no line"), "x")
    assert "could not tell" in unknown and "no rule &amp; no line" in unknown
    names = ["loss", *(f"gradient (step {k}) of w" for k in range(9))]
    wrong = Verdict(False, 0.0, 1, compared, tuple(Difference(n, "", "", "") for n in names))
    assert proof_page.svg(wrong, "x").count('<rect class="differs"') == 10
    assert "and 6 more" in proof_page.svg(wrong, "x")
    told = (
        "result of relu",
        "gradient of the output of up",
        "optimizer's exp_avg of w",
        "input of up",
    )
    wrong = Verdict(False, 0.0, 1, compared, tuple(Difference(n, "", "", "") for n in told))
    assert '<rect class="differs"' not in proof_page.svg(wrong, "x")
