"""Modules that are first imported on a simulated rank: what they keep of the world is no rank's."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch
import torch.distributed as dist

import fcoll

MODULE = """
import torch
import torch.distributed as dist


def total(x, group=dist.group.WORLD):
    dist.all_reduce(x, group=group)
    return x


class Summed:
    def __call__(self, x, group=dist.group.WORLD):
        return total(x, group)
"""

SCRIPT = """
import torch
import torch.distributed as dist

x = torch.ones(dist.group.WORLD.size())
dist.all_reduce(x, group=dist.group.WORLD)
"""


def test_defaults_of_a_module_that_ranks_import(tmp_path, monkeypatch):
    (tmp_path / "imported_by_ranks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def program(rank):
        from imported_by_ranks import Summed, total

        return total(torch.ones(1)).item(), Summed()(torch.ones(1)).item()

    try:
        assert fcoll.simulate_ranks(program, 3) == [(3.0, 3.0)] * 3
        assert fcoll.simulate_ranks(program, 2) == [(2.0, 2.0)] * 2
    finally:
        sys.modules.pop("imported_by_ranks", None)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_differentiable_collectives(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.distributed.nn")]:
        monkeypatch.delitem(sys.modules, name)

    def program(rank):
        from torch.distributed.nn.functional import all_reduce

        x = torch.tensor([rank + 1.0], requires_grad=True)
        all_reduce(x).sum().backward()
        return x.grad.item()

    assert fcoll.simulate_ranks(program, 4) == [4.0] * 4


def test_a_script_that_ranks_run_sees_its_world(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    results = fcoll.simulate_ranks(lambda rank: runpy.run_path(str(tmp_path / "script.py")), 2)
    assert [x["x"].tolist() for x in results] == [[2.0, 2.0]] * 2
    assert not dist.is_initialized()
