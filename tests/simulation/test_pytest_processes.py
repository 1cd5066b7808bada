"""@pytest.mark.ranks(n, processes=True), and the hint that names it, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_pytest_plugin import ENV

LIBRARY = """
import os

class State:
    "As accelerate's PartialState: its attributes are those of the first object."
    _shared_state = {}

    def __init__(self):
        self.__dict__ = self._shared_state
        if not self.__dict__:
            self.process_index = int(os.environ["RANK"])
"""
TESTS = """
import os
import pytest
import torch
import torch.distributed as dist
from their_state import State

@pytest.fixture
def mine(tmp_path):
    return tmp_path / "of this rank"

@pytest.mark.ranks(2, processes=True)
@pytest.mark.parametrize("scale", [3])
def test_state(fcoll_rank, mine, scale):
    assert State().process_index == fcoll_rank == dist.get_rank()
    x = torch.ones(1) * scale
    dist.all_reduce(x)
    assert x.item() == 6
    dist.init_process_group("gloo")  # as under torchrun
    dist.all_reduce(x)
    assert x.item() == 12 and not mine.exists()

@pytest.mark.ranks(2, processes=True)
def test_fails_on_one(fcoll_rank):
    size = dist.get_world_size()
    assert fcoll_rank + 1 == size
    dist.barrier()

@pytest.mark.ranks(1, processes=True)
def test_dies():
    print("last words", flush=True)
    os._exit(3)

@pytest.mark.ranks(1, processes=True)
def test_skips():
    pytest.skip("not today")

@pytest.mark.ranks(2, processes=True, faults=[])
def test_options():
    pass

@pytest.mark.ranks(2, isolate=["their_state"])
def test_on_threads_with_a_state_each(fcoll_rank):
    assert State().process_index == fcoll_rank
    dist.barrier()
    assert State().process_index == fcoll_rank

@pytest.mark.ranks(2)
def test_on_threads(fcoll_rank):
    assert State().process_index == fcoll_rank
"""


@pytest.mark.timeout(170)
def test_real_processes_and_the_hint(tmp_path):
    (tmp_path / "their_state.py").write_text(LIBRARY)
    (tmp_path / "test_theirs.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "fcoll_pytest.plugin", "-q", "-rs"]
    out = subprocess.run(
        command, capture_output=True, text=True, timeout=150, cwd=tmp_path, env=ENV
    ).stdout
    assert "4 failed, 2 passed, 1 skipped" in out and "not today" in out, out
    assert "rank 0: " in out and "assert (0 + 1) == 2" in out
    assert "rank 0 ended with code 3; it printed:" in out and "last words" in out
    assert "faults: of simulated ranks, not of processes=True" in out
    assert "their_state.State: one for the whole process" in out
    assert out.count("@pytest.mark.ranks(n, processes=True)") == 1
    assert out.count('@pytest.mark.ranks(n, isolate=["their_state"])') == 1
