"""Run a function on real ranks: processes joined by a gloo process group.

    def total(rank, x):                       # at module level: ranks import it by name
        return fcoll.all_reduce(x + rank, "sum")

    def test_total(ranks2):                   # a RankPool of the session, see conftest.py
        assert ranks2.run(total, torch.zeros(1)) == [1, 1]

``RankPool`` keeps its processes for the whole session. ``launch`` starts new ones, for functions
that end their process or change it for good. See nursery.py for how they start.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import nursery
import torch.distributed as dist
from rank_worker import Answer, count_ranks, join

START_S = 120.0  # four processes that import torch from a cold disk on two cores
GRACE_S = 5.0  # for the other ranks once one has failed: most are blocked waiting for it
TAIL_CHARS = 6000  # of a rank's output, in an error message

TESTS = Path(__file__).parent


class RankError(Exception):
    """Some ranks raised, died or did not answer: ``errors`` has an exception for each of them.

    It is the original exception, a ChildProcessError for a rank that died, or a TimeoutError for
    one that did not answer. The message has their tracebacks, stacks and output.
    """

    def __init__(self, message: str, errors: dict[int, BaseException]):
        super().__init__(message)
        self.errors = errors


@dataclass(frozen=True)
class Launched:
    """What ``launch`` saw of each rank, in rank order."""

    results: list[Any]  # what fn returned, or None
    errors: list[BaseException | None]  # what fn raised
    exitcodes: list[int]  # minus the signal's number where one ended the process
    stdout: list[str]
    stderr: list[str]


class RankPool:
    """``world_size`` processes in one gloo world, started by the first ``run``.

    Each call of ``run`` begins with torch's seed set to the rank and with the warning filters of
    the caller. Groups that a function makes are destroyed before the next one.
    """

    def __init__(self, world_size: int, env: dict[str, str] | None = None):
        self.world_size = world_size
        self.env = env
        self._world: _World | None = None

    def run(self, fn: Callable, *args: Any, timeout: float = 60.0) -> list[Any]:
        """``[fn(0, *args), fn(1, *args), ...]``, each computed by its rank.

        Raises RankError if any rank raises, dies, or does not answer in time.
        """
        __tracebackhide__ = True
        answers = self._ask(fn, args, timeout, expecting=False)
        return [answers[rank].value for rank in range(self.world_size)]

    def run_expecting(
        self, fn: Callable, *args: Any, timeout: float = 60.0
    ) -> list[BaseException | None]:
        """The exception that each rank's ``fn(rank, *args)`` raised, or None.

        A rank that dies or does not answer is a RankError here too.
        """
        __tracebackhide__ = True
        answers = self._ask(fn, args, timeout, expecting=True)
        return [answers[rank].error for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes. The next ``run`` starts new ones."""
        if self._world is not None:
            self._world.end()
            self._world = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, fn: Callable, args: tuple, timeout: float, expecting: bool) -> dict[int, Answer]:
        __tracebackhide__ = True
        if self._world is None:
            self._world = _World(self.world_size, env=self.env)
        world = self._world
        usable = False
        failure = None
        try:
            world.ask(fn, args)
            answers = world.answers(timeout, None if expecting else GRACE_S)
            raised = sum(answer.error is not None for answer in answers.values())
            if len(answers) < self.world_size or (raised and not expecting):
                failure = world.failure(fn, answers)
            # Where only some failed, a peer's half of a collective may be under way.
            alike = len(answers) == self.world_size and raised in (0, self.world_size)
            usable = alike and (raised == 0 or world.in_step())
        finally:
            # Also after a KeyboardInterrupt or pytest's timeout: the ranks are in mid-function.
            if not usable:
                world.kill()
                self._world = None
        if failure:
            raise failure
        return answers


def launch(
    fn: Callable,
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
    init: bool = True,
) -> Launched:
    """Run ``fn(rank, *args)`` in fresh processes that then exit as a script would.

    They have torchrun's environment variables, and ``env``. With ``init=False`` they do not join
    a process group; ``dist.init_process_group("gloo")`` in ``fn`` does. An exception in ``fn`` is
    the process's end: a traceback on stderr and exit code 1. Nothing is destroyed on the way out.

    Only ranks that are still alive after ``timeout`` are a RankError.
    """
    __tracebackhide__ = True
    world = _World(world_size, env=env, init=init, once=True)
    try:
        deadline = monotonic() + timeout
        world.ask(fn, args)
        answers = world.answers(timeout, grace=None)
        if not world.exited(deadline):
            raise world.failure(fn, {r: a for r, a in answers.items() if world.has_exited(r)})
        return Launched(
            [answers[r].value if r in answers else None for r in range(world_size)],
            [answers[r].error if r in answers else None for r in range(world_size)],
            [worker.process.wait() for worker in world.workers],
            [_read(worker.stdout) for worker in world.workers],
            [_read(worker.stderr) for worker in world.workers],
        )
    finally:
        world.kill()


# What follows is how: one _World is one set of processes, each running rank_worker.work().


@dataclass
class _Worker:
    process: Any  # subprocess.Popen, or what stands for it
    connection: Connection
    stdout: Any  # unlinked files: nothing is left behind, whoever is killed
    stderr: Any
    seen: tuple[int, int] = (0, 0)  # how much of them was there before the current function
    gone: bool = False  # it closed its end of the connection, so it is ending

    def output(self) -> str:
        text = _read(self.stdout, self.seen[0]) + _read(self.stderr, self.seen[1])
        lines = [line for line in text.splitlines() if not line.startswith("Extension modules:")]
        return "\n".join(lines)[-TAIL_CHARS:].strip()


class _World:
    """One set of worker processes, from start to end."""

    def __init__(
        self,
        world_size: int,
        env: dict[str, str] | None = None,
        init: bool = True,
        once: bool = False,
    ):
        # The parent serves the store, as torchrun does, so there is no race for a port.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers: list[_Worker] = []
        try:
            for rank in range(world_size):
                environ = _environ(rank, world_size, self.store.port) | (env or {})
                self.workers.append(_start(environ, init, once))
            joined = self.answers(START_S, grace=GRACE_S)
            if len(joined) < world_size or any(answer.error for answer in joined.values()):
                raise self.failure(join, joined)
        except BaseException:
            self.kill()
            raise

    def ask(self, fn: Callable, args: tuple) -> None:
        # Two layers: the path must be set before the names of the inner one are imported.
        call = pickle.dumps((warnings.filters, fn, args))
        request = pickle.dumps((sys.path, call))
        for worker in self.workers:
            worker.seen = (_size(worker.stdout), _size(worker.stderr))
            with contextlib.suppress(OSError):  # it died: `answers` reports that
                worker.connection.send_bytes(request)

    def answers(self, timeout: float, grace: float | None) -> dict[int, Answer]:
        """Answers by rank; ranks that died or took too long are missing.

        After a first failure the others have only ``grace`` seconds.
        """
        waiting = {worker.connection: rank for rank, worker in enumerate(self.workers)}
        answers: dict[int, Answer] = {}
        deadline = monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                    failed = answers[rank].error is not None
                except (EOFError, OSError):
                    self.workers[rank].gone = failed = True
                if failed and grace is not None:
                    deadline = min(deadline, monotonic() + grace)
        return answers

    def in_step(self) -> bool:
        """Whether a collective still works: not so after, say, a timeout in one."""
        self.ask(count_ranks, ())
        counts = self.answers(GRACE_S, grace=0.0)
        return len(counts) == len(self.workers) and not any(c.error for c in counts.values())

    def has_exited(self, rank: int) -> bool:
        return self.workers[rank].process.poll() is not None

    def exited(self, deadline: float) -> bool:
        try:
            for worker in self.workers:
                worker.process.wait(max(0.0, deadline - monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def failure(self, fn: Callable, answers: dict[int, Answer]) -> RankError:
        """What each failing rank did. Ends the ranks that are missing from ``answers``."""
        errors: dict[int, BaseException] = {}
        ranks_of: dict[str, list[int]] = {}  # ranks that tell the same story share a section
        for rank, worker in enumerate(self.workers):
            answer = answers.get(rank)
            if answer is None:
                errors[rank] = _end_silent(worker)
                story = str(errors[rank])
            elif answer.error is not None:
                errors[rank] = answer.error
                story = f"raised\n{answer.traceback}"
            else:
                continue
            output = worker.output()
            story += f"\nits output:\n{output}" if output else ""
            ranks_of.setdefault(story.rstrip(), []).append(rank)
        name = f"{fn.__module__}.{fn.__qualname__}"
        sections = [f"rank {_comma(ranks)} {story}" for story, ranks in ranks_of.items()]
        head = f"{len(errors)} of {len(self.workers)} ranks failed in {name}"
        return RankError("\n\n".join([head, *sections]), errors)

    def end(self) -> None:
        """Let idle processes exit by themselves, then make sure."""
        for worker in self.workers:
            worker.connection.close()
        self.exited(monotonic() + GRACE_S)
        self.kill()

    def kill(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                # The whole process group, for the compilers that a rank may have started.
                os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.wait()
            worker.connection.close()
            worker.stdout.close()
            worker.stderr.close()


def _start(environ: dict[str, str], init: bool, once: bool) -> _Worker:
    ours, theirs = Pipe()
    stdout = tempfile.TemporaryFile()  # noqa: SIM115 (_World.kill closes it)
    stderr = tempfile.TemporaryFile()  # noqa: SIM115
    with theirs:
        files = [theirs.fileno(), stdout.fileno(), stderr.fileno()]
        process = nursery.start(environ, files, [int(init), int(once)])
    return _Worker(process, ours, stdout, stderr)


def _environ(rank: int, world_size: int, port: int) -> dict[str, str]:
    """torchrun's variables for one rank, and those that keep small machines usable."""
    path = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    # Inductor's address of a function in this process: with it no nursery would serve.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("_TORCHINDUCTOR_")}
    return environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",  # do not depend on how the host's name resolves
        "OMP_NUM_THREADS": "1",
    }


def _end_silent(worker: _Worker) -> BaseException:
    """End a rank that did not answer. If it hangs, its stack goes to its stderr."""
    process = worker.process
    try:
        if worker.gone:
            code = process.wait(GRACE_S)
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            return ChildProcessError(f"died ({how})")
        # faulthandler writes every thread's stack on SIGABRT, then the process ends: its end
        # says that the stack is complete.
        process.send_signal(signal.SIGABRT)
        process.wait(GRACE_S)
        return TimeoutError("did not answer in time and was aborted to see its stack")
    except subprocess.TimeoutExpired:
        return TimeoutError("did not answer in time, nor to SIGABRT")


def _size(file: Any) -> int:
    return os.fstat(file.fileno()).st_size


def _read(file: Any, start: int = 0) -> str:
    # pread: the worker writes at the file offset that it shares with us.
    text = os.pread(file.fileno(), _size(file) - start, start).decode(errors="replace")
    return nursery.FROZEN.sub("", text)


def _comma(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
