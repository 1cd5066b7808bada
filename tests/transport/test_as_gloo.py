"""FCOLL_AS=gloo and fcoll.as_gloo(): groups that a program asks for as gloo's are made by fcoll."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import launch
from test_backend import ON_SHARED_MEMORY, run, torch_finds_fcoll
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fcoll


def served_by(group: Any) -> str:
    return group._get_backend(torch.device("cpu")).name()


def check_sum(group: Any) -> None:
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2, 2]


# What a program says, and what torch.distributed then says of it.
WAYS = {"gloo": "gloo", "GLOO": "gloo", "cpu:gloo": "cpu:gloo", None: "undefined"}


def asking(rank: int, asked: str | None, says: str) -> None:
    with fcoll.as_gloo():
        dist.init_process_group(asked)
        named = dist.new_group(backend="gloo")
        inherited = dist.new_group()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)).get_group()
        alone, _ = dist.new_subgroups(1)
    for group in (dist.group.WORLD, named, inherited, mesh):
        assert served_by(group) == "fcoll"
        before = group._get_sequence_number_for_group()
        check_sum(group)
        assert group._get_sequence_number_for_group() == before + 1
    assert served_by(alone) == alone.name() == "gloo"  # of one rank: there is nothing to carry
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=named)
    log = model._get_ddp_logging_data()
    assert log["backend_name"] == "gloo" and log["gloo_num_threads"] == 2
    assert dist.get_backend() == dist.get_backend(inherited) == says
    assert dist.get_backend(named) == "gloo"
    # one that torch made itself: what is said of it is the same
    theirs = dist.new_group()
    assert served_by(theirs) == "gloo" and dist.get_backend(theirs) == says
    assert dist.get_backend_config(theirs) == dist.get_backend_config()
    dist.monitored_barrier(named, timeout=timedelta(seconds=30))
    dist.destroy_process_group()


@pytest.mark.parametrize("asked", WAYS)
def test_every_way_to_ask_for_gloo(compiled: None, asked: str | None) -> None:
    made = run(asking, 2, asked, WAYS[asked])
    said = "made by fcoll: fcoll.as_gloo()"
    assert made.stderr[0].count(said) == 1 and said not in made.stderr[1]


def nested(rank: int) -> None:
    theirs = dist.distributed_c10d._new_process_group_helper
    outer, inner = fcoll.as_gloo(), fcoll.as_gloo()
    outer.undo()
    outer.undo()  # once is enough
    dist.init_process_group("gloo")
    assert served_by(dist.group.WORLD) == "fcoll"
    with pytest.raises(ZeroDivisionError), inner:
        _ = 1 // 0
    assert dist.distributed_c10d._new_process_group_helper is theirs
    # ranks that are not members, a group that torch finds by its tag, another backend
    with fcoll.as_gloo():
        mine = [dist.new_group([r]) for r in (0, 1)][rank]
        ours = dist.new_group(backend="fcoll")
        fake = dist.new_group(backend="fake")
    assert (dist.get_backend(mine), dist.get_backend(ours)) == ("gloo", "fcoll")
    assert dist.get_backend(fake) == "fake"
    check_sum(ours)
    dist.destroy_process_group()


def test_it_nests_and_leaves_others_alone(compiled: None) -> None:
    run(nested, 2)


def with_an_accelerator(rank: int) -> list[str | None]:
    """What is asked of torch where the machine has one: the devices are torch's own words."""
    import fcoll_backend._torch as names

    names.torch = FakeTorch
    config = dist.distributed_c10d.BackendConfig
    asked = ("gloo", "cpu:gloo,cuda:nccl", "nccl", "cpu:fcoll,cuda:nccl", "cuda:gloo")
    return [names._with_fcoll(config(name).get_device_backend_map()) for name in asked]


class FakeTorch:
    class _C:
        @staticmethod
        def _get_accelerator() -> torch.device:
            return torch.device("cuda")


def test_other_devices_keep_their_backends() -> None:
    made = launch(with_an_accelerator, 1, init=False)
    expected = ["cpu:fcoll,cuda:gloo", "cpu:fcoll,cuda:nccl", None, None, None]
    assert made.results == [expected], made.stderr


# -- the environment variable: a program that knows nothing of fcoll ---

PROGRAM = """
import sys
import torch
import torch.distributed as dist
assert "fcoll" not in sys.modules and "fcoll.transport" not in sys.modules
dist.init_process_group("gloo")
x = torch.ones(3)
dist.all_reduce(x)
dist.monitored_barrier()
served = dist.group.WORLD._get_backend(torch.device("cpu")).name()
sys.stdout.write(f"rank {dist.get_rank()} {x.tolist()} {dist.get_backend()} {served}\\n")
dist.destroy_process_group()
"""


def under_torchrun(program: Path, **env: str) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(program)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=90, env={**os.environ, **env}
    )


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    path = torch_finds_fcoll(tmp_path)

    def run(name: str) -> subprocess.CompletedProcess:
        return under_torchrun(file, PYTHONPATH=path, FCOLL_AS=name, **ON_SHARED_MEMORY)

    return run


def test_the_variable_is_enough(compiled: None, program: Callable) -> None:
    done = program("gloo")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} [2.0, 2.0, 2.0] gloo fcoll" in done.stdout
    assert done.stderr.count("made by fcoll: FCOLL_AS=gloo") == 1


def test_a_value_that_is_not_known_is_said(program: Callable) -> None:
    done = program("nccl")
    assert done.returncode == 0, done.stderr
    assert "rank 0 [2.0, 2.0, 2.0] gloo gloo" in done.stdout
    assert "FCOLL_AS=nccl has no effect" in done.stderr


def test_torch_imports_none_of_fcoll_for_it(tmp_path: Path) -> None:
    """The name takes two small files, also where the variable is set."""
    path = torch_finds_fcoll(tmp_path)
    program = (
        "import sys, torch\n"
        "print(*sorted(name for name in sys.modules if name.startswith('fcoll')))"
    )
    env = {**os.environ, "PYTHONPATH": path, "FCOLL_AS": "gloo"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.split() == ["fcoll_backend", "fcoll_backend._torch"], done.stderr


def profiled(rank: int) -> None:
    with fcoll.as_gloo():
        dist.init_process_group("gloo")
    with torch.profiler.profile() as seen:
        dist.all_reduce(torch.ones(2))
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2), async_op=True).wait()
    names = [event.name for event in seen.events()]
    assert {"gloo:all_reduce", "gloo:all_gather"} <= set(names), names
    dist.destroy_process_group()


def test_a_profile_has_the_name_of_the_backend_that_was_asked_for(compiled: None) -> None:
    run(profiled, 2)
