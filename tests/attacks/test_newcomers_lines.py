"""Collectives that an installed library makes: the program's own line comes first, and the
library's is named by its package."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import fcoll
from fcoll.cli import main
from fcoll.report.html import source_text

LIBRARY = """\
import torch.distributed as dist
import fcoll


def total(x, group=None):
    return fcoll.all_reduce(x, "sum", group)  # line 6


def total_in_place(x):
    dist.all_reduce(x)  # line 10


def decide(x):
    return 1 if x.sum() > 0 else fcoll.all_reduce(x)  # line 14
"""
PROGRAM = """\
import threading

import torch
from somelib.parallel import layers


def build(mesh):
    def step(x):
        return layers.total(x, mesh)  # line 9

    return step, (torch.ones(8),)


def of_values(mesh):
    def step(x):
        return layers.decide(x)  # line 16

    return step, (torch.ones(8),)


def uneven(rank):
    x = torch.ones(4 + rank)
    layers.total_in_place(x)  # line 23


def bad(rank):
    layers.total(torch.ones(4), "no such group")  # line 27


def raises(rank):
    x = torch.ones(4)
    layers.total_in_place(x, x)  # line 32
"""
HERE = "newcomers_train.py"
THERE = "somelib/parallel/layers.py"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The program in the working directory, the library in a venv inside it."""
    packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    (packages / "somelib" / "parallel").mkdir(parents=True)
    (packages / "somelib" / "parallel" / "layers.py").write_text(LIBRARY)
    (tmp_path / HERE).write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(packages), str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module("newcomers_train")
    for name in set(sys.modules) - before:
        if name.startswith(("somelib", "newcomers")):
            del sys.modules[name]


def test_trace_check_and_page(program):
    with fcoll.fake_world(tp=2) as mesh:
        step, args = program.build(mesh)
        trace = fcoll.trace(step, *args)
    source = f"{HERE}:9 > {THERE}:6"
    assert {c.source for c in trace.collectives} == {source}
    assert source in str(trace) and trace.collectives[0].stack == (f"{HERE}:9", f"{THERE}:6")
    assert {s.source for s in trace.steps if s.kind == "comm"} <= {source}
    shown = [(text.strip(), here) for _, text, here in source_text(source)]
    assert (f"{HERE}:9", False) in shown and (f"{THERE}:6", False) in shown
    assert ("return layers.total(x, mesh)  # line 9", True) in shown
    assert ('return fcoll.all_reduce(x, "sum", group)  # line 6', True) in shown


def test_the_report_has_no_absolute_paths(program, tmp_path, capsys):
    page = tmp_path / "page.html"
    told = ["report", f"{HERE}:build", "--mesh", "tp=2", "--html", str(page), "-q"]
    assert main(told) == 0
    out = capsys.readouterr().out
    assert f"{HERE}:9 > {THERE}:6" in out and "site-packages" not in out + page.read_text()


def test_decisions(program):
    with fcoll.fake_world(tp=2) as mesh, pytest.raises(fcoll.FcollError) as caught:
        step, args = program.of_values(mesh)
        fcoll.trace(step, *args)
    assert f"at {HERE}:16 > {THERE}:14" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("uneven", f"{HERE}:23 > {THERE}:10"),
        ("bad", f"{HERE}:27 > {THERE}:6"),
        ("raises", f"at {HERE}:32"),
    ],
)
def test_errors_on_simulated_ranks(program, name, lines):
    with pytest.raises(fcoll.FcollError) as caught:
        fcoll.simulate_ranks(getattr(program, name), 2)
    assert lines in str(caught.value) and "site-packages" not in str(caught.value)


def test_profiles(program):
    def run(rank):
        with fcoll.profile() as p:
            program.layers.total(torch.ones(4)).sum()  # this line
        return str(p)

    shown = fcoll.simulate_ranks(run, 2)[0]
    assert f"> {THERE}:6" in shown and "test_newcomers_lines.py" in shown


def test_sizes_are_given_by_either_line():
    from fcoll.graph.symbolic_sizes import by_symbol

    lines = {"u0": "src/train.py:9 > somelib/moe.py:31", "u1": "train.py:10"}
    assert by_symbol({"moe.py:31": 64, "train.py:10": 8}, lines) == {"u0": 64, "u1": 8}
    assert by_symbol({"train.py:9": 64}, lines) == {"u0": 64}
