"""Timers around every collective that this process issues, while there are listeners.

The program runs as it does without them: the timers stand around the calls of the extension
module (eager's fast path, and compiled graphs), around fcoll's own kernels, and around the ops of
the dispatcher, which C++ calls pass as well. Of calls within calls only the outermost is timed.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import _torch as fcoll_torch
from fcoll.eager import dispatch
from fcoll.eager.async_tensor import AsyncCollectiveTensor
from fcoll.graph._torch import call_arguments
from fcoll.groups import Group, by_name, group_name
from fcoll.profiling import _torch
from fcoll.profiling.call_lines import CallLines
from fcoll.ranks.patches import Patches
from fcoll.simulation.baton import Rank, this_rank
from fcoll.simulation.group import SimulatedGroup
from fcoll.simulation.work import SimulatedWork
from fcoll.source import current_part
from fcoll.table import c10d
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective
from fcoll.tracing import _torch as tracing_torch
from fcoll.transport import messages
from fcoll.transport.native import build


@dataclass(slots=True)
class TimedCall:
    """One collective that was issued. Times are of this rank's thread, in microseconds."""

    op: str
    group: Group
    bytes: int  # the larger of what goes in and what comes out
    dtype: str
    phase: str  # "fwd" or "bwd"
    way: str  # "fast", "op", "c10d" or "compiled"
    source: str
    start_us: float
    wait_us: float = 0.0
    waits: int = 0
    part: str = ""  # of the program, beside its line: a reducer's bucket

    @property
    def total_us(self) -> float:
        """What the thread spent in the calls; not what lay between start and wait."""
        return self.start_us + self.wait_us

    def waited(self, us: float) -> None:
        self.wait_us += us
        self.waits += 1


class _TimerState(threading.local):
    def __init__(self) -> None:
        # in a timed call, as all that fcoll's own thread does
        self.inside = threading.current_thread().name == messages.THREAD
        # simulated ranks hear of their own calls, the process's own threads of all
        self.owner = this_rank()


# What compiled graphs call: (own, collective, reduce op, group, dim); collect has announce's token.
COMPILED = ("meet", "announce", "meet_and_reduce")

Describe = Callable[[Any, Any, Any], tuple[str, str, int, str]]  # -> op, group, bytes, dtype


class Timers:
    """Installed while there are listeners; each is a list that calls are appended to: those of all
    threads, or, if a simulated rank listens, its own."""

    def __init__(self) -> None:
        self.listeners: list[tuple[list[TimedCall], Rank | None]] = []  # and whose they are
        self._lock = threading.RLock()
        self._installed, self._patches = ExitStack(), Patches("fcoll.profile")
        self._thread = _TimerState()
        self._pending: dict[int, TimedCall] = {}  # by the storage that is waited for
        self._works: dict[
            int, tuple[dist.Work, TimedCall]
        ] = {}  # held, so that an id stays its own
        # rank -> number of an autograd node, which each thread counts -> the line that made it
        self._forward: defaultdict[Rank | None, dict[int, str]] = defaultdict(dict)
        self._lines = CallLines()

    def listen(self, calls: list[TimedCall]) -> None:
        with self._lock:
            if not self.listeners:
                self._install()
            self.listeners.append((calls, self._thread.owner))

    def leave(self, calls: list[TimedCall]) -> None:
        with self._lock:
            self.listeners = [x for x in self.listeners if x[0] is not calls]
            if not self.listeners:
                self._installed.close()
                for state in (self._pending, self._works, self._forward):
                    state.clear()

    # -- where the timers are ---

    def _install(self) -> None:
        with ExitStack() as stack:
            self._ops(stack)
            stack.callback(self._patches.undo)
            self._patches.wrap(dispatch, "start_eager", self._of_start)
            self._patches.wrap(dispatch, "run", self._of_run)
            for kind in (dist.Work, SimulatedWork):
                self._patches.wrap(kind, "wait", self._work_waits)
            for op in c10d.OPS.values():  # on simulated ranks no op of c10d is called
                for name in op.methods:
                    self._patches.wrap(SimulatedGroup, name, self._of_method(op.row))
            if build.loaded():
                self._native(stack)
            else:
                self._patches.wrap(build, "load", lambda load: lambda: self._load(load))
            self._installed = stack.pop_all()

    def _load(self, load: Callable[[], str]) -> str:
        """Load the library; what came with it is timed from now on."""
        before, why_not = build.loaded(), load()
        if build.loaded() and not before:
            self._native(self._installed)
        return why_not

    def _native(self, stack: ExitStack) -> None:
        if build.has_fast_path():
            for row in COLLECTIVES.values():
                if row.native.fast is not None:
                    self._patches.wrap(build.fast, row.name, self._of_fast(row))
            for name in COMPILED:
                self._patches.wrap(build.fast, name, self._of_graph)
            self._patches.wrap(build.fast, "sum_in_place", self._of_bucket)
            for name in ("wait_tensor", "collect"):
                self._patches.wrap(build.fast, name, self._of_wait)
        for name in COMPILED:  # as graphs with a C++ wrapper call them
            op = _torch.find_op(f"fcoll_native::{name}")
            stack.enter_context(_torch.around_op(op, self._hook(_compiled, "compiled")))
        collect = _torch.find_op("fcoll_native::collect")
        stack.enter_context(_torch.around_op(collect, self._wait))

    def _ops(self, stack: ExitStack) -> None:
        for row in COLLECTIVES.values():
            for target in (f"fcoll::{row.name}", *row.targets):
                op = _torch.find_op(target)
                if op is None:
                    continue
                hook = self._wait if row.is_wait else self._hook(_of_op(op, row.name), "op")
                stack.enter_context(_torch.around_op(op, hook))
        for of_torch in c10d.OPS.values():
            op = _torch.find_op(f"c10d::{of_torch.name}")
            if op is None:  # of a newer torch
                continue
            hook = self._hook(_of_c10d(of_torch), "c10d")
            stack.enter_context(_torch.around_op(op, hook))

    # -- the timers ---

    def _hook(self, describe: Describe, way: str) -> Callable[[Any, Any, Any], Any]:
        def hook(run: Any, args: Any, kwargs: Any) -> Any:
            return self._time(run, args, kwargs, describe, way)

        return hook

    def _of_fast(self, row: Collective) -> Callable[[Any], Any]:
        at = (row.native.fast or ()).index("group")

        def describe(args: Any, kwargs: Any, out: Any) -> tuple[str, str, int, str]:
            return row.name, group_name(args[at]), *_size(args, out)

        return lambda run: lambda *args: self._time(run, args, {}, describe, "fast")

    def _of_graph(self, run: Any) -> Any:
        return lambda *args: self._time(run, args, {}, _compiled, "compiled")

    def _of_bucket(self, run: Any) -> Any:
        """Around sum_in_place(memory, at, bucket, group's name, tag)."""

        def describe(args: Any, kwargs: Any, out: Any) -> tuple[str, str, int, str]:
            return "all_reduce", args[3], *_size(args[2:3], None)

        return lambda *args: self._time(run, args, {}, describe, "fast")

    def _of_wait(self, run: Any) -> Any:
        return lambda *args: self._wait(run, args, {})

    def _of_start(self, run: Any) -> Any:
        """Around start_eager(name of the row, *its arguments)."""

        def describe(args: Any, kwargs: Any, out: Any) -> tuple[str, str, int, str]:
            return _of_row(COLLECTIVES[args[0]], args[1:], out)

        return lambda *args: self._time(run, args, {}, describe, "op")

    def _of_run(self, run: Any) -> Any:
        """Around run(row, its arguments), by which gradients make their calls."""

        def describe(args: Any, kwargs: Any, out: Any) -> tuple[str, str, int, str]:
            row, row_args = args
            return _of_row(row, row_args, out)

        return lambda *args: self._time(run, args, {}, describe, "op")

    def _of_method(self, row: str) -> Callable[[Any], Any]:
        """Around a method of a simulated group."""

        def describe(args: Any, kwargs: Any, out: Any) -> tuple[str, str, int, str]:
            return row, args[0].group_name, *_size((*args[1:], *kwargs.values()), None)

        return lambda run: lambda *args, **kwargs: self._time(run, args, kwargs, describe, "c10d")

    def _time(self, run: Any, args: Any, kwargs: Any, describe: Describe, way: str) -> Any:
        if self._thread.inside:
            return run(*args, **kwargs)
        node = tracing_torch.sequence_nr()
        out, us = self._measure(run, args, kwargs)
        if out is not NotImplemented:
            self._note(describe(args, kwargs, out), way, us, out, args, node)
        return out

    def _measure(self, run: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """The result of a call, and its time in us; calls within it are not timed."""
        self._thread.inside = True
        try:
            begin = perf_counter_ns()
            out = run(*args, **kwargs)
            return out, (perf_counter_ns() - begin) / 1e3
        finally:
            self._thread.inside = False

    def _wait(self, run: Any, args: Any, kwargs: Any) -> Any:
        if self._thread.inside:
            return run(*args, **kwargs)
        call = self._pending.pop(_storage(args[0]), None)
        registered = fcoll_torch.work_registry_size()
        out, us = self._measure(run, args, kwargs)
        if out is NotImplemented and call is not None:  # it is waited for in another way
            self._pending[_storage(args[0])] = call
        elif call is not None:
            call.waited(us)
        elif fcoll_torch.work_registry_size() < registered:
            self._wait_of_another(args[0], us)
        return out

    def _wait_of_another(self, x: Tensor, us: float) -> None:
        """A wait for what was issued before anyone listened."""
        source, phase = self._lines.here({})
        group = Group("", (0,), 0, None, "?", ())
        call = TimedCall("wait_tensor", group, x.nbytes, _dtype(x), phase, "op", source, 0.0)
        call.waited(us)
        self._tell(call)

    def _work_waits(self, wait: Any) -> Any:
        def timed(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            _, call = self._works.pop(id(work), (None, None))
            if call is None or self._thread.inside:
                return wait(work, *args, **kwargs)
            result, us = self._measure(wait, (work, *args), kwargs)
            call.waited(us)
            return result

        return timed

    # -- what they write down ---

    def _note(
        self, what: tuple[str, str, int, str], way: str, us: float, out: Any, args: Any, node: int
    ) -> None:
        op, name, nbytes, dtype = what
        forward = self._forward[self._thread.owner]
        source, phase = self._lines.here(forward)
        call = TimedCall(
            op, by_name(name), nbytes, dtype, phase, way, source, us, part=current_part()
        )
        self._tell(call)
        if phase == "fwd" and any(x.requires_grad for x in _tensors(args)):
            # above autograd the call makes the next node, below it the last one is the call's
            forward[node] = forward[node + 1] = source
        if way == "c10d":
            work = out if isinstance(out, dist.Work) else tracing_torch.work_of(out)
            if work is not None:
                self._hold(work, call)
                if phase == "bwd" and _torch.called_by_engine():
                    _torch.at_end_of_backward(functools.partial(self._wait_for, work))
        elif way == "compiled" or fcoll_torch.work_registry_size():
            self._pending.update((_storage(x), call) for x in _tensors(out))

    def _wait_for(self, work: dist.Work) -> None:
        """Wait for what C++ issued in a backward pass, as DDP's reducer: it would wait for it next,
        where nobody could see it."""
        if id(work) in self._works:
            work.wait()

    def _hold(self, work: dist.Work, call: TimedCall) -> None:
        if len(self._works) > 100:  # of those that C++ waits for, which nobody here sees
            finished = [key for key, (other, _) in self._works.items() if other.is_completed()]
            for key in finished:
                del self._works[key]
        self._works[id(work)] = work, call

    def _tell(self, call: TimedCall) -> None:
        for calls, owner in self.listeners:
            if owner is None or owner is self._thread.owner:
                calls.append(call)


# -- what a call is ---


def _of_op(op: Any, row: str) -> Describe:
    """Describe a call of an op of the table, by its schema."""

    def describe(args: Any, kwargs: Any, out: Any) -> tuple[str, str, int, str]:
        group = call_arguments(op, args, kwargs)["group_name"]
        name = group if isinstance(group, str) else fcoll_torch.unboxed_group(group).group_name
        return row, name, *_size((*args, *kwargs.values()), out)

    return describe


def _of_row(row: Collective, args: Sequence[Any], out: Any) -> tuple[str, str, int, str]:
    return row.name, args[row.position["group_name"]], *_size(args, out)


def _of_c10d(op: c10d.Op) -> Describe:
    def describe(args: Any, kwargs: Any, out: Any) -> tuple[str, str, int, str]:
        group = fcoll_torch.unboxed_group(op.named(args, kwargs)["process_group"])
        nbytes = _size((*args, *kwargs.values()), None) if op.row != "barrier" else (0, "")
        return op.row, group.group_name, *nbytes

    return describe


def _compiled(args: Any, kwargs: Any, out: Any) -> tuple[str, str, int, str]:
    """Describe a collective that is read in place: it has no result, so its row gives the shape."""
    own, row, reduce_op, name, _ = args
    values = {"reduce_op": reduce_op, "group_size": by_name(name).n, "group_name": name}
    schema = getattr(torch.ops.fcoll, row).default._schema
    required = [a.name for a in schema.arguments[1:] if not a.has_default_value()]
    shape = COLLECTIVES[row].shape(own, *(values[key] for key in required))
    elements = torch.Size(shape).numel()
    return row, name, max(own.nbytes, elements * own.itemsize), _dtype(own)


def _size(args: Sequence[Any], out: Any) -> tuple[int, str]:
    """The bytes of the largest of the arguments and the result, each of which may be a list."""
    nbytes, dtypes = 0, ""
    for value in (*args, out):
        tensors = _tensors(value)
        nbytes = max(nbytes, sum([x.nbytes for x in tensors]))
        dtypes = dtypes or ", ".join(dict.fromkeys(map(_dtype, tensors)))
    return nbytes, dtypes if nbytes else ""  # a barrier's token has none


def _tensors(value: Any) -> list[Tensor]:
    """The tensor, or those of a list of tensors or of lists. tree_iter takes 5 us for that."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [x for part in value for x in _tensors(part)]
    return []


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(x: Tensor) -> str:
    return _name(x.dtype)


def _storage(x: Tensor) -> int:
    """Where its memory begins; by the pointer, for which no storage object is made."""
    x = x.elem if isinstance(x, AsyncCollectiveTensor) else x
    begin = x.data_ptr() - x.storage_offset() * x.itemsize
    return begin if begin > 0 else tracing_torch.storage_id(x)  # an empty one, as a send gives


timers = Timers()
