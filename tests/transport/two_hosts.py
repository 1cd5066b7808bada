"""Two hosts on one machine: network and PID namespaces of their own, and a link between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SUBNET = "10.231.78"  # inside the namespaces only
TESTS = Path(__file__).parent.parent


def why_not() -> str:
    """Why there can be none here; empty if there can."""
    missing = [tool for tool in ("ip", "unshare", "sh") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is missing"
    if os.geteuid() != 0:
        return "namespaces need root"
    name = f"fcoll-try-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return done.stderr.strip()


@dataclass
class Hosts:
    """Their names, and what runs on them."""

    names: tuple[str, str]
    folder: Path
    running: list[subprocess.Popen] = field(default_factory=list)

    def start(self, ranks: Sequence[int], module: str, *args: str, timeout_s: float) -> None:
        """So many ranks on each host run ``module``'s ``main(rank, *args)``."""
        first = 0
        for host, count in enumerate(ranks):
            numbers = range(first, first + count)
            first += count
            program = f"{sys.executable} -m transport.{module}"
            each = " & ".join(
                f"{program} {r} {' '.join(args)} >{self.out(r)} 2>&1" for r in numbers
            )
            command = ["ip", "netns", "exec", self.names[host]]
            command += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
            env = os.environ | {
                "FCOLL_NATIVE": "1",
                "GLOO_SOCKET_IFNAME": f"link{host}",
                "MASTER_ADDR": f"{SUBNET}.1",
                "MASTER_PORT": "29511",
                "WORLD_SIZE": str(sum(ranks)),
                "TIMEOUT_S": str(timeout_s),
                "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
            }
            made = subprocess.Popen([*command, "sh", "-c", f"{each} & wait"], env=env)
            self.running.append(made)

    def out(self, rank: int) -> Path:
        return self.folder / f"rank{rank}"

    def said(self, rank: int) -> list[str]:
        """What a rank has printed as JSON, a line each."""
        lines = self.out(rank).read_text().splitlines() if self.out(rank).exists() else []
        return [json.loads(line) for line in lines if line.startswith('"')]

    def wait(self, timeout_s: float) -> None:
        for process in self.running:
            process.wait(timeout_s)

    def kill(self, host: int) -> None:
        """All processes of a host at once: with the first of a PID namespace go all."""
        process = self.running[host]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)

    def cut(self) -> None:
        """Pull the cable."""
        _run("ip", "-n", self.names[0], "link", "set", "link0", "down")


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    names = tuple(f"fcoll-test-{os.getpid()}-{i}" for i in range(2))
    hosts = Hosts((names[0], names[1]), folder)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", names[0], "link", "add", "link0", "type", "veth", "peer", "name", "link1")
        _run("ip", "-n", names[0], "link", "set", "link1", "netns", names[1])
        for i, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"{SUBNET}.{i + 1}/30", "dev", f"link{i}")
            _run("ip", "-n", name, "link", "set", f"link{i}", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for process in hosts.running:
            process.kill()
            process.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
