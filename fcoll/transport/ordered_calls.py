"""Calls carried out one after the other: small ones by their caller, others by a thread."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from fcoll.errors import GroupClosed
from fcoll.transport import messages

INLINE = 64 << 10  # bytes of a call that is carried out by its caller
END_S = 5.0  # for calls that are under way when the process ends


class OrderedCalls:
    """The calls of a group, in the order in which they are made; ``closed`` is told of the first
    that fails, behind which none is carried out: nobody is where the others think."""

    def __init__(self, closed: Callable[[str], object]) -> None:
        self.closed, self.why = closed, ""
        self.count = 0
        self.turn = threading.Lock()  # held while a call is carried out or put behind others
        self.unfinished = 0  # calls of the thread
        self.waiting = queue.SimpleQueue[Callable[[], None] | None]()
        self.thread: threading.Thread | None = None

    def start(self, nbytes: int, call: Callable[[int], Callable[[], None]]) -> dist.Work | None:
        """Carry out what ``call`` makes of the call's number, now if it is small and none is
        behind; what is wrong is raised here or where the work is waited for."""
        with self.turn:
            self._check()
            self.count += 1
            run = call(self.count)
            if nbytes <= INLINE and not self.unfinished:
                self._run(run)
                return None
            work = OrderedWork()
            self.unfinished += 1
            self.waiting.put(lambda: self._run_for(work, run))
            if self.thread is None:
                self.thread = threading.Thread(
                    target=_serve, args=(self.waiting,), name=messages.THREAD, daemon=True
                )
                self.thread.start()
                atexit.register(self.end)
            return work

    def _run_for(self, work: OrderedWork, run: Callable[[], None]) -> None:
        try:
            self._run(run)
        except Exception as error:
            work.error = error
        with self.turn:
            self.unfinished -= 1
        work.done.set()

    def _run(self, run: Callable[[], None]) -> None:
        self._check()
        try:
            with torch.no_grad():
                run()
        except BaseException as error:
            self.why = self.why or str(error)
            self.closed(str(error))
            raise

    def _check(self) -> None:
        if self.why:
            raise GroupClosed(message=f"the group was closed by an earlier error: {self.why}")

    def end(self) -> None:
        """Finish the calls that were made."""
        self.waiting.put(None)
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout=END_S)


def _serve(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := waiting.get()) is not None:
        call()


class OrderedWork(dist.Work):
    """A call that the thread carries out."""

    def __init__(self) -> None:
        super().__init__()
        self.done = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.done.wait()  # its own waits have the group's timeout
        if self.error is not None:
            raise self.error
        return True
