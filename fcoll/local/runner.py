"""LocalRunnerMode: several programs of ranks in threads, one at a time, that exchange messages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from fcoll.local import active_mode
from fcoll.local.errors import BadRunner

_current: LocalRunnerMode | None = None


class _RankThread(threading.Thread):
    """A thread whose exception is raised where it is joined."""

    exception: BaseException | None = None

    def run(self) -> None:
        try:
            super().run()
        except BaseException as e:  # it is raised by join
            self.exception = e

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self.exception is not None:
            raise self.exception


class LocalRunnerMode:
    """Run ``fn(i)`` for i < ``concurrency`` in threads, of which one runs at a time.

    Each enters a LocalTensorMode of its own ranks, and messages (``local_p2p_op``) go between
    them: a receive that has to wait lets another thread run. If all of them wait, that is an
    error. The exception of a thread is raised when the mode is left.
    """

    runner_context = threading.local()

    def __init__(
        self, ranks: frozenset[int] | int, concurrency: int, fn: Callable[[int], None]
    ) -> None:
        self._ranks = frozenset(range(ranks)) if isinstance(ranks, int) else ranks
        self._fn = fn
        self._run_lock = threading.Lock()
        self._run_cond = threading.Condition(self._run_lock)
        self._run_id = -1
        self._messages: dict[tuple[int, int], deque[tuple[int, Any]]] = {}
        self._waiting: dict[int, str] = {}
        self._alive = concurrency
        self._runners = [
            _RankThread(target=self._run, args=(i,), name="LocalRunnerMode")
            for i in range(concurrency)
        ]
        self._shared = True

    def __enter__(self) -> LocalRunnerMode:
        global _current
        if _current is not None:
            hint = "Leave the first before you enter the next: they do not nest."
            raise BadRunner(what="another one is running", hint=hint)
        _current = self
        self._shared = active_mode.share_between_threads(False)
        for r in self._runners:
            r.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        global _current
        try:
            for r in self._runners:
                threading.Thread.join(r)
        finally:
            _current = None
            active_mode.share_between_threads(self._shared)
        for r in self._runners:
            r.join()

    def _run(self, id: int) -> None:
        LocalRunnerMode.runner_context.id = id
        self._acquire_run_lock()
        try:
            self._fn(id)
        finally:
            self._alive -= 1
            self._run_cond.notify_all()  # who waits for this one sees that nobody is left
            self._release_run_lock()

    def _acquire_run_lock(self) -> None:
        self._run_lock.acquire()
        self._run_id = LocalRunnerMode.runner_context.id

    def _release_run_lock(self) -> None:
        self._run_id = -1
        self._run_lock.release()

    def _assert_holds_run_lock(self) -> None:
        if self._run_id != LocalRunnerMode.runner_context.id:
            hint = "Call it in the function that the runner runs."
            raise BadRunner(what="it is another thread's turn", hint=hint)

    def _get_recv_object(self, src: int, dst: int, tag: int = 0) -> Any:
        """The oldest message with this tag from ``src`` (-1: from anybody), or None."""
        for peer in [src] if src != -1 else sorted(self._ranks):
            kept = self._messages.get((peer, dst), ())
            for message in kept:
                if message[0] == tag:
                    _drop(kept, message)
                    return message[1]
        return None

    def _signal_send(self, src: int, dst: int, obj: object, tag: int = 0) -> None:
        if obj is None:
            raise BadRunner(what="a message of None", hint="Send a tensor.")
        self._messages.setdefault((src, dst), deque()).append((tag, obj))
        self._waiting.clear()  # whoever waits looks again
        self._run_cond.notify_all()

    def _wait_recv(self, src: int, dst: int, post: Callable[[object], None], tag: int = 0) -> None:
        me = LocalRunnerMode.runner_context.id
        while True:
            obj = self._get_recv_object(src, dst, tag)
            if obj is not None:
                self._waiting.pop(me, None)
                post(obj)
                return
            peer = "any rank" if src == -1 else f"rank {src}"
            self._waiting[me] = f"rank {dst} waits for a message from {peer} (tag {tag})"
            if len(self._waiting) >= self._alive:
                all_wait = "; ".join(sorted(self._waiting.values()))
                del self._waiting[me]
                raise RuntimeError(f"deadlock: {all_wait}")
            self._run_cond.wait()
            self._run_id = me

    @staticmethod
    def current() -> LocalRunnerMode:
        """The runner whose threads run now."""
        if _current is None:
            hint = "Messages between ranks are exchanged inside `with LocalRunnerMode(...)`."
            raise BadRunner(what="none is running", hint=hint)
        return _current


def _drop(kept: Any, message: Any) -> None:
    """Remove by identity: tensors do not compare to one bool."""
    for i, m in enumerate(kept):
        if m is message:
            del kept[i]
            return
