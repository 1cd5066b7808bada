"""Start a rank's process in milliseconds: as a fork of one that has imported torch and fcoll.

Importing them, and what torch imports at the first async result (DTensor, sympy) and the first
compiled graph, takes 3.4 s of CPU time, what torch prepares for that graph 2.5 s more, and a run of
all tests starts hundreds of ranks. There are two nurseries, for even and odd ranks, so that ranks
differ in their hash seeds and addresses, as they do in the field. A process whose environment
differs from its nursery's in what is read while torch is imported is started by itself.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
MESSAGE_BYTES = 1 << 20

# What torch and fcoll read when it is needed; all else may have been read at their import.
READ_LATE = (
    *("FCOLL_", "INDUCTOR_EXT_", "TORCHINDUCTOR_CACHE_DIR", "PYTEST_", "CXX", "PATH", "HOME"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_"),
)
# After fcoll, as in a user's program.
IMPORTED = ("torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx")


class Nursery:
    """A process that forks ranks."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = [sys.executable, "-u", "-c", "import nursery; nursery.main()"]
            self.process = subprocess.Popen(
                [*program, str(theirs.fileno()), str(os.getpid())],
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def serves(self, environ: dict[str, str]) -> bool:
        names = environ.keys() | self.environ.keys()
        differ = [name for name in names if environ.get(name) != self.environ.get(name)]
        return self.process.poll() is None and all(name.startswith(READ_LATE) for name in differ)

    def fork(self, environ: dict[str, str], files: list[int], arguments: list[int]) -> Forked:
        """A rank with these for its connection, stdout and stderr; it runs rank_worker.work."""
        return Forked(self, self.ask(("fork", environ, arguments), files))

    def ask(self, request: Any, files: list[int]) -> int:
        try:
            socket.send_fds(self.socket, [pickle.dumps(request)], files)
            return pickle.loads(self.socket.recv(MESSAGE_BYTES))
        except BaseException:
            self.close()  # also when pytest's timeout strikes: the answer may come yet
            raise

    def close(self) -> None:
        """End it, and with it the ranks that it has forked."""
        self.process.kill()
        self.process.wait()
        self.socket.close()


# What is frozen is still there at the end, which a library of Triton's says on stderr.
FROZEN = re.compile(r"^(nanobind: | - leaked | - \.\.\. skipped|See https://nanobind).*\n?", re.M)


class Forked:
    """What subprocess.Popen has, for a child of a nursery."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.nursery, self.pid = nursery, pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            self.returncode = self.nursery.ask(("code", self.pid), [])
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


_nurseries: dict[int, Nursery] = {}


def start(environ: dict[str, str], files: list[int], flags: list[int]) -> Any:
    """The process of a rank that runs rank_worker.work on the first of these files, the others
    being its stdout and stderr."""
    odd = int(environ["RANK"]) % 2
    found = _nurseries.get(odd)
    if found is None or found.process.poll() is not None:
        # Both at once: a rank that has joined waits 30 s for one whose nursery is still compiling.
        for which in (odd, 1 - odd):
            if which == odd or which not in _nurseries:
                _nurseries[which] = made = Nursery(environ | {"RANK": str(which)})
                atexit.register(made.close)
        found = _nurseries[odd]
    if found.serves(environ):
        return found.fork(environ, files, flags)
    # Imported, not run as __main__: what is pickled there must be the same class here.
    program = [sys.executable, "-u", "-c", "import rank_worker; rank_worker.work()"]
    return subprocess.Popen(
        [*program, *map(str, [files[0], os.getpid(), *flags])],
        env=environ,
        pass_fds=[files[0]],
        stdin=subprocess.DEVNULL,
        stdout=files[1],
        stderr=files[2],
        process_group=0,
    )


# -- in the nursery ---


def main() -> None:
    """Serve; returns in the children, which then are ranks."""
    fd, parent = map(int, sys.argv[1:])
    import rank_worker

    import fcoll

    rank_worker.die_with(parent)
    for module in IMPORTED:
        importlib.import_module(module)
    _compile_something()
    # Nobody looks through what is imported for garbage, at the end least of all: that takes 0.9 s.
    gc.freeze()
    assert fcoll.functions and len(os.listdir("/proc/self/task")) == 1, "a fork loses threads"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    if _serve(socket.socket(fileno=fd)):
        rank_worker.work()


def _compile_something() -> None:
    """Where there is a compiler; nothing of the graph is left."""
    import torch

    if not shutil.which("g++"):
        return
    torch.set_num_threads(1)
    without_cuda = torch.version.cuda is None  # else gradients start threads, which a fork loses
    with torch.set_grad_enabled(without_cuda):
        y = torch.compile(torch.nn.Linear(2, 2))(torch.ones(2, 2))
        if y.requires_grad:
            y.sum().backward()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _serve(connection: socket.socket) -> bool:
    """True in a child."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not message:
            return False
        what, *facts = pickle.loads(message)
        if what == "code":
            _, status = os.waitpid(facts[0], 0)
            connection.send(pickle.dumps(os.waitstatus_to_exitcode(status)))
            continue
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become_a_rank(parent, files, *facts)
            return True
        os.setpgid(pid, pid)  # here and there: whoever kills the group finds it
        for file in files:
            os.close(file)
        connection.send(pickle.dumps(pid))


def _become_a_rank(
    parent: int, files: list[int], environ: dict[str, str], flags: list[int]
) -> None:
    os.setpgid(0, 0)
    os.dup2(files[1], 1)
    os.dup2(files[2], 2)
    os.environ.clear()
    os.environ.update(environ)
    random.seed()
    sys.argv[1:] = map(str, [files[0], parent, *flags])
