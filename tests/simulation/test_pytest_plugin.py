"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}

TESTS = """
import pytest
import torch
import torch.distributed as dist
import fcoll

seen = []

@pytest.mark.ranks(4)
def test_body_runs_on_each_rank():
    seen.append(dist.get_rank())
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 4

def test_it_did():
    assert seen == [0, 1, 2, 3]

@pytest.mark.ranks(3)
@pytest.mark.parametrize("scale", [1, 2])
def test_with_arguments(fcoll_rank, scale, tmp_path):
    assert fcoll_rank == dist.get_rank()
    x = torch.ones(1) * scale * fcoll_rank
    assert fcoll.all_reduce(x).item() == 3 * scale

def test_world(fcoll_world):
    assert fcoll_world(3).run(lambda rank: rank + dist.get_world_size()) == [3, 4, 5]
    kill = fcoll.faults.Kill(1)
    killed = fcoll_world(2, faults=[kill]).run(lambda rank: rank and dist.barrier())
    assert killed == [0, kill]
    assert fcoll_world(2).explore(lambda rank: rank).runs == 1

@pytest.mark.ranks(2)
class TestClass:
    def test_method(self):
        assert dist.get_world_size() == 2

@pytest.mark.ranks(2)
def test_skips():
    pytest.skip("not today")

@pytest.mark.ranks(2)
async def test_coroutine_fails(fcoll_rank):
    dist.barrier()
    assert fcoll_rank == 0

@pytest.mark.ranks(3)
def test_fails_on_rank_2(fcoll_rank):
    dist.barrier()
    assert fcoll_rank < 2

@pytest.mark.ranks(2)
def test_deadlock(fcoll_rank):
    dist.recv(torch.zeros(1), 1 - fcoll_rank)

@pytest.mark.ranks
def test_no_number():
    pass

def test_no_marker(fcoll_rank):
    pass

def program(mesh, summed):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4))
    def step(x):
        loss = (x * weight).sum()
        loss.backward()
        if summed:
            dist.all_reduce(weight.grad)
        return fcoll.all_reduce(loss.detach())
    return step, (torch.randn(4, 4).chunk(mesh.size())[mesh.get_rank()],)

def test_proved(fcoll_prove):
    verdict = fcoll_prove(lambda mesh: program(mesh, summed=True), mesh={"dp": 2}, trials=1)
    assert verdict.compared["gradients"] == 1

def test_not_proved(fcoll_prove):
    fcoll_prove(lambda mesh: program(mesh, summed=False), mesh={"dp": 2})

def test_could_not_be_told(fcoll_prove):
    fcoll_prove(lambda mesh: (lambda: torch.rand(2).sum(), ()), mesh={"dp": 2})
"""


def run(tmp_path, *options):
    path = tmp_path / "test_theirs.py"
    path.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "fcoll_pytest.plugin", str(path), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=150, cwd=tmp_path, env=ENV
    ).stdout


def test_tests_on_simulated_ranks(tmp_path):
    out = run(tmp_path, "-q", "-rfEs", "--strict-markers", "-W", "error")
    assert "6 failed, 7 passed, 1 skipped, 1 error" in out, out
    assert "rank 2: AssertionError: assert 2 < 2, at test_theirs.py:" in out
    assert "rank 1: AssertionError: assert 1 == 0, at test_theirs.py:" in out
    assert "rank 0 waits in recv(1 float32) from rank 1" in out
    assert "use @pytest.mark.ranks(n), with one number of ranks" in out
    assert 'an all-reduce over "dp" is missing' in out and "could not tell: " in out
    assert "fcoll_rank is for tests with @pytest.mark.ranks(n)" in out


def test_pytest_starts_without_torch(tmp_path):
    """Every user of an environment with fcoll pays for what the plugin imports."""
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass")
    program = (
        "import sys, pytest; assert pytest.main(['-q', '-p', 'fcoll_pytest.plugin']) == 0; "
        "assert not {'torch', 'fcoll', 'numpy'} & set(sys.modules), 'imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=ENV
    )
    assert done.returncode == 0, done.stdout + done.stderr
