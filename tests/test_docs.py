"""What users read runs: docstrings and examples/ on real ranks, the code on README and docs/."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import torch
import torch.distributed as dist

import fcoll

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODULES = sorted(m.name for m in pkgutil.walk_packages(fcoll.__path__, "fcoll."))

ENV = {**os.environ, "FCOLL_NATIVE": "1"}  # as users run them
# Options that make an example small; the others have none.
SMALL = "--layers 1 --dim 128 --hidden 256 --vocab 256 --tokens 8 --rounds 1"
OPTIONS = {"tp_llama": SMALL.split()}
DROP_INS = ("fcoll.dist", "fcoll.compat")  # their functions have torch's docstrings


def run_doctests(rank: int, modules: list[str]) -> tuple[int, str]:
    """(examples tried, what failed) of all modules, with the names that examples may use."""
    names = {"fcoll": fcoll, "torch": torch, "dist": dist, "rank": rank, "os": os}
    names["n"] = dist.get_world_size()
    tried, failures = 0, []
    for name in modules:
        module = importlib.import_module(name)
        drop_in = name in DROP_INS
        for test in doctest.DocTestFinder(recurse=not drop_in).find(module, name):
            test.globs = {**vars(module), **names}
            if drop_in:
                test.globs[name.rpartition(".")[2]] = module
            runner = doctest.DocTestRunner(verbose=False)
            runner.run(test, out=failures.append)
            tried += runner.tries
    return tried, "".join(failures)


def test_doctests(ranks2):
    modules = [m for m in MODULES if not m.endswith("__main__")]
    for tried, failures in ranks2.run(run_doctests, modules):
        assert not failures, failures
        assert tried > 30


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path, tmp_path):
    command = [sys.executable, str(path)]
    if options := OPTIONS.get(path.stem):
        command += [*options, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=ROOT, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "never waited" not in done.stderr
    assert done.stdout
    if path.stem == "tp_llama":
        assert "sqrt" in (tmp_path / "fused_kernel.cpp").read_text()


def test_example_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(EXAMPLES[0])]
    env = {**ENV, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("summed over 2 ranks") == 2


def test_every_public_function_has_an_example_or_says_what_it_equals():
    from fcoll import functions

    for name, fn in vars(functions).items():
        if callable(fn) and not name.startswith("_") and fn.__module__ == "fcoll.functions":
            assert fn.__doc__, name


@pytest.mark.parametrize("argv", [["collectives"], ["--version"]])
def test_cli(argv):
    done = subprocess.run(
        [sys.executable, "-m", "fcoll", *argv], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert ("all_reduce" if argv == ["collectives"] else "fcoll") in done.stdout


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_page(page):
    assert [target for target in pages.links(page) if not target.exists()] == []
    pages.run(page)


@pytest.mark.parametrize("block", pages.files(), ids=lambda block: block.title)
def test_file_on_a_page(block, shared2):
    shared2.run(pages.run_file, block)


def test_pages_have_code():
    """The test above finds the blocks: it would pass on pages without any."""
    assert sum(len(pages.blocks(page)) for page in pages.PAGES) >= 25
