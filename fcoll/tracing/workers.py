"""Traces of many ranks, in several processes where one alone would take long."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, TypeVar

import torch

T = TypeVar("T")

LONG_S = 1.0  # a trace that takes longer is worth a process
MOST = 8  # processes; each has the memory of a trace


class Tracer:
    """Calls ``fn(rank)`` for many ranks.

    The first ones here; once one has taken more than LONG_S, a part of the rest in forks of this
    process. A fork that fails, for whatever reason, changes nothing: its ranks are traced here.
    """

    def __init__(self, fn: Callable[[int], T]) -> None:
        self.fn = fn
        self.longest_s = 0.0

    def trace(self, ranks: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """(rank, fn(rank)) in the order of the ranks."""
        pending = list(ranks)
        while pending and (self.longest_s < LONG_S or len(pending) == 1 or not can_fork()):
            yield pending[0], self._timed(pending.pop(0))
        if pending:
            yield from self._shared_out(pending)

    def _timed(self, rank: int) -> Any:
        begin = perf_counter()
        result = self.fn(rank)
        self.longest_s = max(self.longest_s, perf_counter() - begin)
        return result

    def _until_error(self, ranks: list[int]) -> dict[int, Any]:
        """What was found for the ranks; the error at the one that raises it, and no more. It is
        raised when it is that rank's turn: an earlier one may have one too."""
        results: dict[int, Any] = {}
        for rank in ranks:
            try:
                results[rank] = self._timed(rank)
            except Exception as error:
                results[rank] = error
                break
        return results

    def _shared_out(self, ranks: list[int]) -> Iterator[tuple[int, Any]]:
        n = min(len(os.sched_getaffinity(0)), len(ranks), MOST)
        started = [Fork(self.fn, ranks[i::n]) for i in range(1, n)]
        forks = {rank: fork for fork in started for rank in fork.ranks}
        patience_s = 60 + 20 * self.longest_s
        try:
            # this process's own first: meanwhile the others are at work
            mine = self._until_error([rank for rank in ranks if rank not in forks])
            for rank in ranks:
                if rank in forks:
                    mine[rank] = forks[rank].result(patience_s)
                result = mine[rank]
                if isinstance(result, Exception):
                    raise result
                yield rank, result if result is not None else self._timed(rank)
        finally:
            for fork in started:
                fork.end()


class Fork:
    """A process with all that this one has, which traces some ranks and sends what it found."""

    def __init__(self, fn: Callable[[int], Any], ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(fn, ranks, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def result(self, patience_s: float) -> Any:
        """What it found for the next of its ranks; None if it failed or takes too long."""
        try:
            if self._connection.poll(patience_s):
                return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError, pickle.PickleError, AttributeError, ImportError, TypeError):
            pass
        self.end()
        return None

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


def _work(fn: Callable[[int], Any], ranks: Sequence[int], connection: Connection) -> None:
    torch.set_num_threads(1)  # the threads of the parent's pools are not in this process
    with suppress(Exception), open(os.devnull, "w") as nowhere:
        # the parent makes the same trace if this one fails, and says why
        sys.stdout = sys.stderr = nowhere
        payloads = []
        try:
            for rank in ranks:
                payloads.append(pickle.dumps(fn(rank)))
        finally:
            for payload in payloads:  # not before: a pipe takes little, and the parent is at work
                connection.send_bytes(payload)


def can_fork() -> bool:
    """Not where there are other threads, which a fork would stop in the middle of something."""
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()
        and multiprocessing.current_process().daemon is False
    )
