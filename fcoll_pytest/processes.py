"""A test on real ranks: each is a process that runs this one test, as torchrun would start it.

Fixtures are made on each of them. What a rank's pytest reports is written to a file, which the
first process reads.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = "FCOLL_PYTEST_FOLDER"  # of a rank: where ranks meet, and where its report goes
POLL_S = 0.05
GRACE_S = 10.0  # for the others to end by themselves when a rank has failed
SHOWN = 4000  # characters of what a rank printed
_SECTION = "\n===="  # what pytest begins its own report with


def run_on_processes(
    item: pytest.Function, n: int, timeout: float = 300.0, backend: str = "gloo"
) -> None:
    """Run a test on each of n processes; fail with the reports of the ranks that did."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "backend").write_text(backend)
        shared = _variables(n, folder)
        ranks = [_start(item, folder, shared, rank) for rank in range(n)]
        try:
            in_time = _wait(ranks, timeout)
            codes = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        limit = None if in_time else timeout
        failures = [_failure(folder, rank, code, limit) for rank, code in enumerate(codes)]
        for rank in range(n):  # pytest shows it if the test fails
            print(f"rank {rank} printed:\n{_printed(folder, rank).partition(_SECTION)[0]}")
        if any(failures):
            pytest.fail("\n\n".join(filter(None, failures)), pytrace=False)
        for report in filter(None, (_report(folder, rank) for rank in range(n))):
            if report["outcome"] == "skipped":
                pytest.skip(report["text"])


def _variables(n: int, folder: Path) -> dict[str, str]:
    """torchrun's, and none of those by which pytest would start more processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    ranks = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1"}
    mine = {"MASTER_PORT": port, "PYTEST_ADDOPTS": "", FOLDER: folder, **ranks}
    return inherited | {k: str(v) for k, v in mine.items()}


def _start(item: pytest.Function, folder: Path, shared: dict[str, str], rank: int) -> Any:
    config = item.config
    args = [f"{item.path}::{item.nodeid.partition('::')[2]}", f"--rootdir={config.rootpath}"]
    args += [f"--import-mode={config.getoption('importmode')}", "--runxfail", "-q", "-s"]
    args += ["-p", "no:cacheprovider"]
    args += [f"-c={config.inipath}"] if config.inipath else []
    args += [part for name in config.getoption("plugins") or () for part in ("-p", name)]
    args += ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
    with open(folder / f"{rank}.out", "w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *args],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=config.invocation_params.dir,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def _wait(ranks: list[Any], timeout: float) -> bool:
    """Until all have ended or, where one has failed, GRACE_S longer. False after the timeout."""
    end = time.monotonic() + timeout
    grace_ends = float("inf")
    while time.monotonic() < end:
        codes = [process.poll() for process in ranks]
        if None not in codes or time.monotonic() > grace_ends:
            return True
        if any(codes):
            grace_ends = min(grace_ends, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)
    return False


def _report(folder: Path, rank: int) -> dict[str, str] | None:
    try:
        return json.loads((folder / f"{rank}.json").read_text())
    except (OSError, ValueError):
        return None


def _failure(folder: Path, rank: int, code: int | None, limit: float | None) -> str:
    """What went wrong on a rank; empty if nothing did, or if it was ended for another's failure.
    ``limit`` is the timeout, if that is over."""
    report = _report(folder, rank)
    if report is not None and report["outcome"] == "failed":
        return f"rank {rank}: {report['text']}"
    if code is None:
        if limit is None:
            return ""
        why = f"had not ended after {limit:g} s"
    elif code == 0 and report is not None:
        return ""
    else:
        why = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"rank {rank} {why}; it printed:\n{_printed(folder, rank)}"


def _printed(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.out").read_text(errors="replace")[-SHOWN:]


# -- in the process of a rank ---


def is_rank() -> bool:
    return FOLDER in os.environ


def run_body(body: Callable[[int], Any]) -> None:
    """Run a test's body on this rank. The world is there already; a program that makes one itself
    makes it in its place."""
    import torch
    import torch.distributed as dist

    folder, rank, n = Path(os.environ[FOLDER]), int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(n)))
    init = dist.init_process_group

    def init_again(*args: Any, **kwargs: Any) -> None:
        patch.undo()
        dist.destroy_process_group()
        init(*args, **kwargs)

    # by a file: the address that torchrun's variables have is the program's
    meet = f"file://{folder}/store"
    init((folder / "backend").read_text(), init_method=meet, rank=rank, world_size=int(n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", init_again)
        try:
            body(rank)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def write_report(report: pytest.TestReport) -> None:
    """Write pytest's report of this rank's test: of its call, or of a phase that failed."""
    if report.when != "call" and report.outcome == "passed":
        return
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    content = {"outcome": report.outcome, "text": text.removeprefix("Skipped: ")}
    path = Path(os.environ[FOLDER], f"{os.environ['RANK']}.json")
    path.write_text(json.dumps(content))
