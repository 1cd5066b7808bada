"""N ranks as threads of this process: any program of torch.distributed, exactly."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from fcoll.errors import BadOption, RankFailed, RanksTimeout
from fcoll.simulation import _torch, world
from fcoll.simulation.baton import Rank, RankStopped, become
from fcoll.simulation.session import Session
from fcoll.simulation.settings import Settings

GRACE_S = 2.0  # for ranks to unwind after a timeout or an interrupt


def simulate_ranks(
    fn: Callable[[int], Any],
    world_size: int,
    *,
    timeout: float | None = 300.0,
    backend: str = "gloo",
    num_threads: int = 1,
    generators: bool = False,
) -> list[Any]:
    """``[fn(0), fn(1), ...]``, each on a simulated rank of a world of this size.

    >>> def total(rank):
    ...     x = torch.full((2,), float(rank))
    ...     dist.all_reduce(x)
    ...     return x.tolist(), dist.get_rank()
    >>> fcoll.simulate_ranks(total, 3)
    [([3.0, 3.0], 0), ([3.0, 3.0], 1), ([3.0, 3.0], 2)]
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise BadOption(op="simulate_ranks", arg="world_size", value=world_size, known="1, 2, ...")
    session = Session(world_size)
    results: list[Any] = [None] * world_size
    caller = Settings.now(generators)
    threads = torch.get_num_threads()
    with world.in_force(), world.environment(world_size):
        try:
            for number in range(world_size):
                rank = Rank(number, session.baton, caller.for_rank(number), session)
                args = (rank, fn, results, backend, num_threads)
                name = f"rank {number}"
                rank.thread = threading.Thread(target=_run, args=args, name=name, daemon=True)
                session.baton.ranks.append(rank)
            _wait(session, timeout)
        finally:
            caller.restore()
            torch.set_num_threads(threads)
    _raise(session)
    return results


def _run(
    rank: Rank, fn: Callable[[int], Any], results: list[Any], backend: str, num_threads: int
) -> None:
    """The life of a rank's thread."""
    rank.lock.acquire()
    session, baton = rank.session, rank.baton
    become(rank)
    try:
        rank.settings.restore()
        torch.set_num_threads(num_threads)
        with torch.autograd.set_multithreading_enabled(False):
            if not baton.stopping:
                world.begin_world(backend)
                results[rank.number] = _torch.waited_for(fn(rank.number))
    except RankStopped:
        pass
    except BaseException as error:
        session.fail(error, rank)
    finally:
        try:
            world.end_world()
        finally:
            become(None)
            baton.end(rank)


def _wait(session: Session, timeout: float | None) -> None:
    baton = session.baton
    try:
        baton.start()
        if not baton.all_ended.wait(timeout):
            stuck = [baton.running] if baton.running else []
            session.failed, session.failure = (
                None,
                RanksTimeout(
                    seconds=f"{timeout:g}",
                    ranks=", ".join(f"rank {r.number}" for r in stuck) or "no rank",
                ),
            )
            _interrupt(session)
    except BaseException:  # Ctrl-C
        _interrupt(session)
        raise


def _interrupt(session: Session) -> None:
    """End the ranks from outside: the one that runs at its next line of Python, then the others.

    A thread that is inside a call of C++ cannot be reached: it is left behind.
    """
    baton = session.baton
    baton.stopping = True
    running = baton.running
    if running is not None and running.thread is not None and running.thread.ident:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(running.thread.ident), ctypes.py_object(RankStopped)
        )
    baton.all_ended.wait(GRACE_S)


def _raise(session: Session) -> None:
    failure, rank = session.failure, session.failed
    if failure is None:
        return
    if rank is None:
        raise failure
    raise RankFailed.of(rank.number, failure) from failure
