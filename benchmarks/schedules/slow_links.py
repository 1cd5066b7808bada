"""Two network namespaces with a link of limited rate between them: two hosts on one machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SUBNET = "10.231.77"  # inside the namespaces only


@contextmanager
def two_hosts(mbit: float, delay_us: float) -> Iterator[tuple[str, str]]:
    """The names of two namespaces. Needs root, `ip` and `tc`; a delay needs a kernel with netem."""
    hosts = tuple(f"fcoll-{os.getpid()}-{i}" for i in range(2))
    try:
        for host in hosts:
            _run("ip", "netns", "add", host)
        _run("ip", "-n", hosts[0], "link", "add", "link0", "type", "veth", "peer", "name", "link1")
        _run("ip", "-n", hosts[0], "link", "set", "link1", "netns", hosts[1])
        for i, host in enumerate(hosts):
            _run("ip", "-n", host, "addr", "add", f"{SUBNET}.{i + 1}/30", "dev", interface(i))
            _run("ip", "-n", host, "link", "set", interface(i), "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("tc", "-n", host, "qdisc", "add", "dev", interface(i), *_shape(mbit, delay_us))
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def interface(rank: int) -> str:
    """The name of the link's end in a rank's namespace."""
    return f"link{rank}"


def _shape(mbit: float, delay_us: float) -> Sequence[str]:
    if delay_us:
        return ("root", "netem", "delay", f"{delay_us}us", "rate", f"{mbit}mbit", "limit", "100000")
    return ("root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "2s")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()} (root, ip and tc are needed)")
