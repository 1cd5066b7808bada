"""Libraries as they are installed, on fcoll: examples/clients gives the same as on gloo.

Skipped where a library is not there; docs/clients.md says how to install them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from transport.test_backend import torch_finds_fcoll

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "clients"

# program -> the package that it needs, and the arguments of its runs
PROGRAMS = {
    "transformers_tp": ("transformers", ["llama", "qwen3"]),
    "accelerate_train": ("accelerate", ["ddp", "fsdp2"]),
    "lightning_ddp": ("lightning", [""]),
    "megatron_linear": ("megatron.core", [""]),
    "torchtitan_debug": ("torchtitan", [""]),
    "deepspeed_zero": ("deepspeed", ["1", "2", "3"]),
    "vllm_communicator": ("vllm", [""]),
}
PROVED = {"megatron_prove"}  # on simulated ranks, by tests/proving/test_libraries.py
RUNS = [(name, argument) for name, (_, arguments) in PROGRAMS.items() for argument in arguments]


@cache
def is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def results_of(name: str, *arguments: str, **env: str) -> list[str]:
    """What rank 0 prints: lines of losses, tokens or values."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(FOLDER / f"{name}.py"), *filter(None, arguments)]
    env = {**os.environ, "FCOLL_NATIVE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=env)
    assert done.returncode == 0, done.stderr
    kinds = ("losses ", "tokens ", "values ")
    return [line for line in done.stdout.splitlines() if line.startswith(kinds)]


def test_every_program_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*PROGRAMS, *PROVED}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "argument"), RUNS, ids=[" ".join(run).strip() for run in RUNS])
def test_the_same_as_on_gloo(name: str, argument: str, tmp_path: Path) -> None:
    package, _ = PROGRAMS[name]
    if not is_there(package):
        pytest.skip(f"{package} is not installed")
    wanted = results_of(name, "gloo", argument)
    assert wanted
    assert results_of(name, "fcoll", argument, PYTHONPATH=str(ROOT)) == wanted
    path = torch_finds_fcoll(tmp_path)
    assert results_of(name, "gloo", argument, PYTHONPATH=path, FCOLL_AS="gloo") == wanted


@pytest.mark.slow
def test_torchtitan_is_checked_without_ranks() -> None:
    if not is_there("torchtitan"):
        pytest.skip("torchtitan is not installed")
    program = f"{FOLDER / 'torchtitan_debug.py'}:build"
    command = [sys.executable, "-m", "fcoll", "check", program, "--mesh", "dp=8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=ROOT)
    assert done.returncode == 0 and "proved for all 8 ranks" in done.stdout, done.stderr
