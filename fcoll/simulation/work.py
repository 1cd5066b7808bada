"""The handle of a simulated call: complete once the call has been carried out for all its ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.errors import FcollError
from fcoll.simulation import _torch
from fcoll.simulation.baton import Rank, this_rank


class SimulatedWork(dist.Work):
    """What a rank waits for, and can say so (``Awaited``)."""

    timeout: Any = None  # from torch 2.15 on a property of dist.Work, which cannot be set

    def __init__(self, rank: Rank, call: Any, outs: Any) -> None:
        super().__init__()
        self.rank = rank
        self.call = call  # calls.Call
        self.outs = outs
        self.tensors = list(outs)  # by which C++ may know the work
        self.done = False
        self.failure: FcollError | None = None
        self.source = -1
        self.timeout: timedelta | None = None  # of the wait, where the call gave one
        # ends it for all ranks that take part
        self.cancel: Callable[[FcollError], None] = lambda error: None
        self.done_at = 0.0
        self.missing_ranks: Any = ()
        self.future: Any = None
        self.abandoned = False  # its rank has ended
        self.for_cpp = False  # is it C++ that has the future?

    # -- what the simulation calls ---

    def complete(self, at: float, failure: FcollError | None = None) -> None:
        self.done, self.done_at, self.failure = True, at, failure
        if self.future is not None:
            self.rank.futures = [work for work in self.rank.futures if work is not self]
            if this_rank() is self.rank:
                self.settle_future()
            else:  # its callbacks may call collectives
                self.rank.settling.append(self)
        self.rank.baton.wake(self.rank)

    def ready(self) -> bool:
        return self.done

    def missing(self) -> tuple[int, ...]:
        missing = self.missing_ranks
        return tuple(missing() if callable(missing) else missing)

    def registered_for(self, out: Tensor) -> None:
        """C++ has the work in its registry, under this tensor."""
        if all(x is not out for x in self.tensors):
            self.tensors.append(out)

    def expire(self, error: FcollError) -> None:
        self.cancel(error)

    def __str__(self) -> str:
        return str(self.call)

    # -- torch's interface ---

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.abandoned:
            return True
        self.rank.session.unasked.discard(self)
        if not self.done:
            me = self.rank if this_rank() is self.rank else _foreign(self)
            limit = timeout or self.timeout
            if limit:
                me.session.limit(me, self, limit)
            me.wait_for(self)
        rank = self.rank
        if rank.settling and this_rank() is rank:
            rank.settle()
        if self.done_at > rank.clock:
            rank.clock = self.done_at
        if self.failure is not None:
            raise _again(self.failure)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        session = self.rank.session
        session.unasked.discard(self)
        if self.done:  # on real ranks it might not be yet
            return not session.may_differ(self)
        session.poll(self.rank, self)
        return self.done

    def is_success(self) -> bool:
        return self.is_completed() and self.failure is None

    def exception(self) -> Any:
        return self.failure

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self.outs)

    def source_rank(self) -> int:
        self.wait()
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """In a backward (DDP's reducer) C++ waits for it when all gradients are there: a callback
        ahead of that wait lets the other ranks run. Where that time has come (a static graph's
        first backward starts its calls and waits for them in one callback) it is waited for here.
        Elsewhere Python's ``wait`` lets others run."""
        self.rank.session.unasked.discard(self)
        if self.done or _torch.backward_is_over():
            self.wait()  # raises if it failed
        if self.future is None:
            self.future = _Future(self)
            if self.done:
                self.settle_future()
                return self.future
            self.rank.futures.append(self)
            if _torch.in_backward():
                self.for_cpp = True
                _torch.after_backward(self._wait_ahead_of_cpp)
        return self.future

    def _wait_ahead_of_cpp(self) -> None:
        """Also for what its future's callbacks have started: C++ waits for all of it."""
        self.wait()
        _wait_for_all(self.rank, lambda: False)

    def settle_future(self) -> None:
        if self.failure is None:
            self.future.set_result(list(self.outs))
        elif not self.for_cpp:  # C++ takes any value for tensors; the callback raises ahead of it
            self.future.set_exception(self.failure)


class _Future(torch.futures.Future):
    """A future whose wait lets other ranks run."""

    def __init__(self, work: SimulatedWork) -> None:
        super().__init__()
        self.work = work

    def wait(self) -> Any:
        self.work.wait()
        return super().wait()

    def value(self) -> Any:
        self.work.wait()
        return super().value()

    def done(self) -> bool:
        if not super().done() and this_rank() is self.work.rank:
            self.work.is_completed()  # lets others run
            self.work.rank.settle()
        return super().done()


def wait_for_future(original: Any, future: Any) -> Any:
    """torch's wait for a future on a simulated rank: for one that C++ has made of those above
    (``then``, DDP's comm hooks), other ranks run until the works that it may follow are done."""
    me = this_rank()
    if me is not None:
        _wait_for_all(me, future.done)
    return original(future)


def _wait_for_all(me: Rank, done: Callable[[], bool]) -> None:
    """For the works whose futures were asked for, and those that their callbacks start."""
    me.settle()
    while me.futures and not done():
        me.wait_for(me.futures.pop(0))


def _again(error: FcollError) -> FcollError:
    """The error as a new object: each rank and each wait has a traceback of its own."""
    copy = type(error)(*error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def _foreign(work: SimulatedWork) -> Rank:
    me = this_rank()
    if me is None:
        raise RuntimeError(
            f"rank {work.rank.number}'s {work.call} is waited for in a thread that "
            "simulate_ranks did not start: wait for it where it was issued"
        )
    return me
