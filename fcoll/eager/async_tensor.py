"""AsyncCollectiveTensor: the result of a collective in eager, waited for at its first real use."""

from __future__ import annotations

import atexit
import copy
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fcoll import _torch
from fcoll.errors import from_native
from fcoll.source import Frames, show, sites_of
from fcoll.transport.native import build


@dataclass(eq=False)
class Pending:
    """One collective in flight: shared by its result and all views of it."""

    op: str = "collective"
    stack: Any = None  # where it was issued: read if somebody asks, which takes ten times as long
    done: bool = False
    error: Exception | None = None  # what waiting for it ended with: there is no result to use
    # held while waiting: torch gives the work to the first who waits, a second would find nothing
    # to wait for and go on too early
    lock: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[valid-type]
    reported: bool = True  # or is it still to be mentioned at exit, if nobody waits for it?

    @property
    def sites(self) -> Frames:
        return sites_of(_torch.frames_of(self.stack))

    def __del__(self) -> None:
        if not (self.done or self.reported or self.error):
            _dropped[self.op, self.sites] += 1


# Collectives issued and not yet waited for; and of those whose tensors were dropped, how many each
# line issued. Only counted: a step that never looks at a result drops one each time.
_in_flight: WeakSet[Pending] = WeakSet()
_dropped: Counter[tuple[str, Frames]] = Counter()
Unwaited = tuple[frozenset[Pending], Counter[tuple[str, Frames]]]


class AsyncCollectiveTensor(_torch.TorchAsyncCollectiveTensor):
    """A tensor whose bytes may still be under way; any use but a view waits for them first.

    It is an instance of torch's class of the same name, so DTensor, FSDP2 and torch.compile treat
    it as theirs. Unlike torch's, views know when their base has been waited for, a completed one
    never waits again, waiting keeps the autograd graph, and it can be copied and pickled.
    """

    elem: Tensor
    _pending: Pending

    @staticmethod
    def __new__(cls, elem: Tensor, pending: Pending | None = None) -> AsyncCollectiveTensor:
        if isinstance(elem, _torch.TorchAsyncCollectiveTensor):
            raise TypeError("an AsyncCollectiveTensor does not hold another: pass its elem")
        self = _torch.make_wrapper(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=elem.device,
            requires_grad=elem.requires_grad,
        )
        self.elem = elem
        self._pending = pending or Pending()
        return self

    @property
    def completed(self) -> bool:  # type: ignore[override]
        return self._pending.done

    @completed.setter
    def completed(self, value: bool) -> None:
        self._pending.done = value
        if value:
            _in_flight.discard(self._pending)

    # -- waiting ------------------------------------------------------------------------------

    def trigger_wait(self) -> Tensor:
        """The plain tensor inside, complete; without the autograd graph around it."""
        if not self.completed:
            with self._pending.lock:
                self._wait_unless_completed()
        return self.elem

    def _wait_unless_completed(self) -> None:
        if self.completed:
            return
        if self._pending.error is not None:
            raise self._pending.error.with_traceback(None)
        try:
            complete = wait_undispatched(self.elem)
        except Exception as error:
            _in_flight.discard(self._pending)  # there is nothing left to wait for
            self._pending.error = error
            raise
        if not complete:
            # While tracing, the waited-for tensor is another node of the graph. It is torch's
            # op, since ours does not become it below autograd, where modes may call this.
            self.elem = torch.ops._c10d_functional.wait_tensor(self.elem)
        self.completed = True

    def wait(self) -> Tensor:
        """The plain, complete tensor, in the same autograd graph."""
        if self.requires_grad and torch.is_grad_enabled():
            return torch.ops.fcoll.wait_tensor(self)
        return self.trigger_wait()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0].trigger_wait()
        first = args[0] if args else None
        if isinstance(first, cls) and first._can_stay_async(func):
            pending = first._pending
            out = func(first.elem, *args[1:], **kwargs)
            return tree_map_only(Tensor, lambda view: cls(view, pending), out)
        args, kwargs = tree_map_only(cls, cls.trigger_wait, (args, kwargs))
        return func(*args, **kwargs)

    def _can_stay_async(self, func: Any) -> bool:
        # a view in a trace must come after the wait: nothing else there keeps the order
        return not self.completed and _torch.is_view_op(func) and not _torch.tracing()

    # -- what looks at the values outside the dispatcher ------------------------------------------

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AsyncCollectiveTensor({self.wait()})"

    def __deepcopy__(self, memo: dict) -> Tensor:
        return copy.deepcopy(self.trigger_wait(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.trigger_wait().__reduce_ex__(protocol)

    # -- torch.compile ----------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Tensor:
        return AsyncCollectiveTensor(inner["elem"])

    def __coerce_same_metadata_as_tangent__(
        self, expected_metadata: Any, expected_type: type | None = None
    ) -> Tensor | None:
        return self.trigger_wait() if expected_type in (Tensor, None) else None


def _of_the_waited_for(name: str) -> Any:
    def method(self: AsyncCollectiveTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.wait(), name)(*args, **kwargs)

    return method


# Methods that reach for the memory or for Python values without asking the dispatcher. The wrapper
# has no memory: some of them would crash.
for _name in ("tolist", "numpy", "data_ptr", "share_memory_", "__dlpack__", "__format__"):
    setattr(AsyncCollectiveTensor, _name, _of_the_waited_for(_name))


def wait_undispatched(x: Tensor) -> bool:
    """Wait for a plain tensor by its kernel; False if x is not plain, or somebody listens."""
    if build.fast and build.fast.wait_tensor(x) is x:
        return True
    if not _torch.plain(x):
        return False
    try:
        _torch.wait_plain(x)
    except Exception as error:
        raise from_native(error) from None
    return True


class _Wrap(torch.autograd.Function):
    """plain -> async, an identity of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending) -> Tensor:
        return AsyncCollectiveTensor(x, pending)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def in_flight(x: Tensor, op: str) -> Tensor:
    """The result of an eager call: async, if it is not complete."""
    if _torch.work_registry_size() == 0:  # no work is outstanding: x is complete
        return x
    pending = Pending(op, _torch.stack_here(), reported=False)
    _in_flight.add(pending)
    if x.requires_grad:
        return _Wrap.apply(x, pending)
    return AsyncCollectiveTensor(x, pending)


def unwaited() -> Unwaited:
    """The collectives that nobody has waited for yet: in flight, and dropped."""
    return frozenset(_in_flight), Counter(_dropped)


def forget_all_but(kept: Unwaited) -> None:
    """Others have been reported, or failed: they are not mentioned at exit."""
    global _dropped
    in_flight, _dropped = kept
    for pending in set(_in_flight) - in_flight:
        pending.reported = True
        _in_flight.discard(pending)


@atexit.register
def _report_unwaited() -> None:
    counts = _dropped + Counter((p.op, p.sites) for p in _in_flight if not p.reported)
    for pending in _in_flight:
        pending.reported = True  # what is dropped from here on
    if not counts:
        return
    lines = [
        f"  {op} at {show(*sites) or '?'}" + (f" (x{k})" if k > 1 else "")
        for (op, sites), k in counts.items()
    ]
    print(
        f"fcoll: {counts.total()} collectives were issued and never waited for "
        "(use the result, or call fcoll.wait_tensor on it):",
        *lines,
        sep="\n",
        file=sys.stderr,
    )
