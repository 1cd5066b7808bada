"""N ranks as threads of this process: any program of torch.distributed, exactly."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fcoll.eager import async_tensor
from fcoll.errors import BadOption, RankFailed, RanksTimeout, ran
from fcoll.ranks.patches import torchrun_variables
from fcoll.simulation import _torch, rank_worlds
from fcoll.simulation.baton import Rank, RankStopped, become
from fcoll.simulation.faults import Fault
from fcoll.simulation.rank_settings import RankSettings, isolated
from fcoll.simulation.reports import never_waited_for
from fcoll.simulation.schedules import Choices, Schedule
from fcoll.simulation.session import RankKilled, Session
from fcoll.source import show, sites_from

SLICE_S = 0.2  # of a wait for all ranks
CALL_S = 0.1  # for a rank to make its next call, in which it ends
GRACE_S = 2.0  # for ranks to unwind after a timeout or an interrupt


def simulate_ranks(
    fn: Callable[[int], Any],
    world_size: int,
    *,
    timeout: float | None = 300.0,
    faults: Sequence[Fault] = (),
    schedule: Schedule | None = None,
    backend: str = "gloo",
    num_threads: int = 1,
    generators: bool = False,
    isolate: Iterable[str] | None = None,
    arithmetic: Any = None,
) -> list[Any]:
    """``[fn(0), fn(1), ...]``, each on a simulated rank of a world of this size.

    >>> def total(rank):
    ...     x = torch.full((2,), float(rank))
    ...     dist.all_reduce(x)
    ...     return x.tolist(), dist.get_rank()
    >>> fcoll.simulate_ranks(total, 3)
    [([3.0, 3.0], 0), ([3.0, 3.0], 1), ([3.0, 3.0], 2)]

    Each rank is a thread, and exactly one runs at a time: until it waits for others. The order does
    not depend on the machine. All of torch.distributed works on the thread's rank: groups, meshes,
    DTensor, FSDP2, DDP, pipelines, objects, stores; so do fcoll's own calls. The world is there
    already, and a program that calls init_process_group gets its own. A send is complete when its
    receive is; reductions run in rank order, narrow floats in f32.

    Ranks that wait for one another are a ``Deadlock`` at once, calls that differ a
    ``CollectiveMismatch``, with ranks and lines. What a rank raises ends the others (their
    ``finally`` blocks run) and is raised as ``RankFailed``, which is also of its class, "rank 3:
    ...". Calls that nobody waited for are a warning.

    A rank begins with the caller's default dtype, warning filters and state of torch's generator,
    and has its own from then on; with ``generators=True`` also of ``random`` and numpy's (40 us a
    turn). ``isolate``: modules whose globals and class attributes each rank has for itself, too,
    by name, with those below them: ``isolate=["mylib.state"]``. State of Megatron's and
    accelerate's is isolated without a word; ``isolate=()`` isolates nothing. What else a process
    has for itself, threads share: other modules' globals, other flags of torch, tensors and modules
    made outside ``fn``. Collectives in threads that a rank starts are not served.

    ``timeout``: seconds for all of it. Threads cannot be killed: the rank that computes is ended at
    its next line of Python; one that is inside a call of C++ is left behind, and named.
    ``faults``: see ``fcoll.faults``. ``schedule``: a run of ``fcoll.explore``, again. ``backend``:
    what dist.get_backend() says before init_process_group. ``num_threads``: of torch, for each
    rank; 1, so that values do not depend on the machine. ``arithmetic``: what reductions
    are made by, an object with ``fold`` and ``scaled`` as in ``fcoll.reductions``; ``fcoll.prove``
    has one.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise BadOption(op="simulate_ranks", arg="world_size", value=world_size, known="1, 2, ...")
    choices = None if schedule is None else Choices(tuple(schedule))
    session = Session(world_size, faults, choices)
    session.arithmetic = arithmetic or session.arithmetic
    return run(session, fn, timeout, backend, num_threads, generators, isolate)


def run(
    session: Session,
    fn: Callable[[int], Any],
    timeout: float | None,
    backend: str = "gloo",
    num_threads: int = 1,
    generators: bool = False,
    isolate: Iterable[str] | None = None,
) -> list[Any]:
    """Run a session's ranks to their end."""
    results: list[Any] = [None] * session.n
    caller, threads = RankSettings.now(generators, isolated(isolate)), torch.get_num_threads()
    unwaited = async_tensor.unwaited()
    following = caller.modules.following_imports()
    with rank_worlds.in_force, torchrun_variables(session.n), following:
        try:
            for number in range(session.n):
                rank = Rank(number, session.baton, caller.for_rank(number), session)
                args = (rank, fn, results, backend, num_threads)
                name = f"rank {number}"
                rank.thread = threading.Thread(target=_run, args=args, name=name, daemon=True)
                session.baton.ranks.append(rank)
            _wait(session, timeout)
        finally:
            caller.restore()
            torch.set_num_threads(threads)
            async_tensor.forget_all_but(unwaited)
    _end(session)
    return [session.killed.get(number, result) for number, result in enumerate(results)]


def _run(
    rank: Rank, fn: Callable[[int], Any], results: list[Any], backend: str, num_threads: int
) -> None:
    """The life of a rank's thread."""
    session, baton = rank.session, rank.baton
    become(rank)
    try:
        rank.lock.acquire()  # in here: an interrupt may arrive as soon as it has the baton
        rank.settings.restore()
        torch.set_num_threads(num_threads)
        with torch.autograd.set_multithreading_enabled(False):
            if not baton.stopping:
                rank_worlds.begin_world(backend)
                result = ran("simulate_ranks", fn(rank.number))
                results[rank.number] = _torch.waited_for(result)
    except RankKilled:
        pass
    except RankStopped:
        baton.stop()  # the others too, if this came from outside
    except SystemExit as error:
        if error.code not in (None, 0):
            session.fail(error, rank)
    except BaseException as error:
        if rank.number not in session.killed:  # else it is of a finally block
            session.fail(error, rank)
    finally:
        try:
            rank_worlds.end_world()
        finally:
            become(None)
            baton.end(rank)


def _wait(session: Session, timeout: float | None) -> None:
    baton = session.baton
    try:
        baton.start()
        if not _ended(baton.all_ended, timeout):
            running = baton.running
            who = "no rank" if running is None else f"rank {running.number}"
            there = "" if running is None else _line_in(running)
            session.failed = None
            session.failure = RanksTimeout(seconds=f"{timeout:g}", ranks=who, there=there)
            _interrupt(session)
    except BaseException:  # Ctrl-C
        _interrupt(session)
        raise


def _ended(event: threading.Event, timeout: float | None) -> bool:
    """As event.wait(timeout), in slices: a signal that arrives just before the thread sleeps does
    not wake it, so an interrupt is noticed at the end of one."""
    end = None if timeout is None else time.monotonic() + timeout
    while not event.wait(SLICE_S if end is None else min(SLICE_S, end - time.monotonic())):
        if end is not None and time.monotonic() >= end:
            return False
    return True


def _line_in(rank: Rank) -> str:
    """The user's line that the thread of a rank is in."""
    ident = rank.thread.ident if rank.thread is not None else None
    frame = sys._current_frames().get(ident) if ident is not None else None
    line = show(*sites_from(frame))
    return f", at {line}" if line else ""


def _interrupt(session: Session) -> None:
    """End the ranks from outside: those that wait or make a call by themselves; one that computes
    at its next line of Python, then the others."""
    baton = session.baton
    baton.stopping = True
    if baton.all_ended.wait(CALL_S):
        return
    running = baton.running
    if running is not None and running.thread is not None and running.thread.ident:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(running.thread.ident), ctypes.py_object(RankStopped)
        )
    baton.all_ended.wait(GRACE_S)


def _end(session: Session) -> None:
    """Raise what went wrong, or warn of what was left."""
    failure, rank = session.failure, session.failed
    if failure is not None:
        if rank is None:
            raise failure
        raise RankFailed.of(rank.number, failure) from failure
    left = [work for work in session.unasked if work.rank.number not in session.killed]
    for work in left:
        if work.failure is not None:
            raise RankFailed.of(work.rank.number, work.failure) from work.failure
    if left:
        lines = never_waited_for(left)
        message = f"simulated ranks ended, and nobody waited for the results of\n{lines}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
