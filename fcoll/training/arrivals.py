"""Which gradients have arrived in a backward pass: hooks on the parameters count buckets down.

Two classes do the same, this one and ``Arrivals`` of native/gradients.cpp, which also copies the
gradients of plain parameters into their buckets. This one is for traces, whose gradients have no
data, for other devices, and where the C++ is not built; it takes 2 to 4 us of a gradient's time,
the other less than 1 us. Both tell their owner:

- ``PASS``: a backward pass has its first gradient;
- ``FULL``: all gradients of a bucket are there, and of those before it;
- ``REFUSED``: one came for a parameter that has had all that it was to get;
- ``LATE``: with ``late`` set, one came while none was expected. It is told once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fcoll.training import _torch
from fcoll.training.unused import gradient_accumulator
from fcoll.transport.native import build

PASS, FULL, REFUSED, LATE = range(4)
Tell = Callable[[int, int], None]  # event, and the parameter or bucket


class Arrivals:
    """Counts the gradients of these parameters."""

    def __init__(self, params: Sequence[Tensor], tell: Tell) -> None:
        self.params = params
        self._dtypes = [p.dtype for p in params]
        self._tell = tell
        self._handles: list[Any] = []
        self._nodes: list[Any] = []  # which live as long as somebody holds them
        self._armed = self._counts = self._begun = False
        self._order: list[int] = []
        self._ready_in = [-1] * len(params)
        self._ready_ns = [0] * len(params)
        self.scale, self.copies, self.late = 1.0, False, False
        self.forget_used()

    def listen(self) -> None:
        """Be called for each gradient."""
        me = weakref.ref(self)  # hooks live as long as the parameters

        def hook_of(index: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                arrivals = me()
                if arrivals is not None:
                    arrivals._arrive(index)

            return hook

        for index, param in enumerate(self.params):
            self._nodes.append(gradient_accumulator(param))
            self._handles.append(self._nodes[-1].register_hook(hook_of(index)))

    def remove(self) -> None:
        """Be called no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def into(self, bucket_of: list[int], views: Sequence[Tensor | None], share: bool) -> None:
        """The bucket of each parameter, and its view of it: for copies, which Python makes when
        the bucket is full."""
        self._bucket_of = bucket_of

    def arm(self, pending: list[int], expected: list[int], counts: bool) -> None:
        """Gradients are to be reduced: so many of each bucket's parameters, which get so many each.
        Without ``counts`` they are only noted."""
        self._pending, self._remaining, self._counts = pending, expected, counts
        self._armed = True
        self._next = self._passes = 0
        self._task = -1
        self._order.clear()
        self._started_ns = time.perf_counter_ns()
        self._ready_in = [-1] * len(self.params)

    def disarm(self) -> bool:
        """The reduction has ended. Had any gradient come?"""
        self._armed = False
        begun, self._begun = self._begun, False
        return begun

    def changed(self) -> int:
        """The first parameter whose dtype is not what it was when this was made, or -1."""
        now = zip(self.params, self._dtypes, strict=True)
        return next((i for i, (p, dtype) in enumerate(now) if p.dtype is not dtype), -1)

    def give_back(self, bucket: int) -> bool:
        """Have the gradients of a bucket, which is reduced, its values? Then nothing is left to do;
        else, as always here, nothing was done."""
        return False

    def mark(self, index: int) -> None:
        """No gradient will come for this parameter."""
        self._remaining[index] = 0
        self._complete(index)

    def forget_used(self) -> None:
        self._used = [0] * len(self.params)

    def not_copied(self, bucket: int) -> list[int]:
        """The parameters of a bucket whose gradients are not in it."""
        return [i for i, b in enumerate(self._bucket_of) if b == bucket]

    def seen(self) -> dict[str, Any]:
        """What has arrived: ``begun`` is whether any gradient has since the last reduction,
        ``order`` all since arming, ``ready_in`` the backward pass that completed each parameter or
        -1, ``ready_ns`` when, from arming on, ``used`` the parameters that had a gradient."""
        return {
            "begun": self._begun,
            "order": self._order,
            "ready_in": self._ready_in,
            "ready_ns": self._ready_ns,
            "used": list(self._used),
        }

    def _arrive(self, index: int) -> None:
        self._begun = True
        # without a gradient the hook is called where an output is not in the loss
        self._used[index] |= self.params[index].grad is not None
        if not self._armed:
            late, self.late = self.late, False
            if late:
                self._tell(LATE, index)
            return
        self._order.append(index)
        if not self._counts:
            return
        task = _torch.backward_pass()
        if task != self._task:
            self._task = task
            self._passes += 1
            self._tell(PASS, index)
        if not self._remaining[index]:
            self._tell(REFUSED, index)
        self._remaining[index] -= 1
        if not self._remaining[index]:
            self._complete(index)

    def _complete(self, index: int) -> None:
        self._ready_in[index] = self._passes - 1
        self._ready_ns[index] = time.perf_counter_ns() - self._started_ns
        self._pending[self._bucket_of[index]] -= 1
        while self._next < len(self._pending) and not self._pending[self._next]:
            self._next += 1
            self._tell(FULL, self._next - 1)


def arrivals_of(params: Sequence[Tensor], tell: Tell) -> Any:
    """Arrivals in C++ if the parameters are on a CPU and have data, else in Python."""
    plain = all(p.device.type == "cpu" and not _torch.has_no_data(p) for p in params)
    if plain and not build.load() and build.has_fast_path():
        return build.fast.Arrivals(list(params), tell)
    return Arrivals(params, tell)
