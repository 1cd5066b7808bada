"""The calls of torch's functions that a step makes, by the user's line: recorded, or changed.

Both are modes of a trial of their own, which is run only where a difference was found: stacks are
walked and values kept there, never in trials that prove.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcoll import functions
from fcoll.proving import _torch
from fcoll.source import is_library, is_pythons, program_sites, show

COLLECTIVES = ("fcoll", "_c10d_functional")
_SILENT = frozenset(
    ["backward", "grad", "requires_grad_", "register_hook", "retain_grad", "wait_tensor", "__set__"]
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_INTERNAL = tuple(os.path.join(_TORCH, name) for name in ("distributed", "optim", "_dynamo"))
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class CallSite(NamedTuple):
    """Where a call stands: file, line, the instruction, and the line that called its function."""

    file: str
    line: int
    instruction: int
    caller: tuple[str, int]
    function: str  # of torch

    @property
    def shown(self) -> str:
        """As people read it; a call in a library with the program's line that led to it."""
        return show(*program_sites([(self.file, self.line), self.caller]))


@dataclass
class RecordedCall:
    """One execution, as it was recorded on a rank."""

    place: CallSite
    args: tuple[Any, ...]
    values: list[Tensor]  # of its results
    came_from: list[int]  # the calls whose results it was given
    local_names: dict[str, Any]  # of the frame: names to tensors and integers
    body: int  # the first line of the function that it is in
    name: str  # of that function
    is_backward: bool
    is_collective: bool
    has_gradient: bool
    carried: frozenset[int]  # arguments that the same line gave before: running sums of a loop
    takes_parameter: bool
    is_of_parameters: bool  # made of nothing else: a view of a weight, a copy of another dtype
    unused: frozenset[str] = frozenset()  # names of results that no call is given
    gradients: list[Tensor | None] = field(default_factory=list)  # of its results


@dataclass
class CallsOfRank:
    """The calls of one rank, in order; those whose results the step returned, and those that wrote
    to parameters."""

    calls: list[RecordedCall] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


class Now(NamedTuple):
    """A call that is being made, for a change of it."""

    run: Callable[..., Any]  # the function itself
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    execution: int  # how often its place was passed before
    frame: FrameType
    rank: int
    mesh: Any  # the DeviceMesh

    def as_it_is(self) -> Any:
        return self.run(*self.args, **self.kwargs)


Change = Callable[[Now], Any]


class _Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Sees each call of a function of torch that the program's lines make."""

    def __enter__(self) -> Any:
        if getattr(_thread, "mode", None) is None:
            _thread.mode = self
        return super().__enter__()

    def ends(self, out: Any) -> None:
        """The step has returned this."""
        _thread.mode = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in _SILENT or name.startswith("_set_") or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        frame = _users_frame(sys._getframe(1), _is_collective(func))
        if frame is None:
            return func(*args, **kwargs)
        return self.see(func, name, args, kwargs, frame)

    def see(self, func: Any, name: str, args: Any, kwargs: Any, frame: FrameType) -> Any:
        raise NotImplementedError


class Recording(_Mode):
    def __init__(self, recorded: CallsOfRank) -> None:
        super().__init__()
        self.recorded = recorded
        self._made: dict[int, int] = {}  # of tensors the calls that gave them
        self._kept: list[Any] = []  # so that no other tensor has its id

    def see(self, func: Any, name: str, args: Any, kwargs: Any, frame: FrameType) -> Any:
        given = [self._made[k] for x in _tensors((args, kwargs)) if (k := _key(x)) in self._made]
        seen = _raw(args)
        out = func(*args, **kwargs)
        if results := list(_tensors(out)):
            # a collective's elements are there when it has been waited for
            done = map(functions.wait_tensor, results) if _is_collective(func) else results
            named = {k: x for k, x in frame.f_locals.items() if isinstance(x, (Tensor, int))}
            place = _place(frame, name)
            call = RecordedCall(
                place, seen, [_value(x) for x in done], sorted(set(given)),
                named, frame.f_code.co_firstlineno, frame.f_code.co_qualname,
                _torch.in_backward(), _is_collective(func),
                any(x.requires_grad for x in results), frozenset(self._carried(args, place)),
                any(map(_is_parameter, _tensors((args, kwargs)))),
                all(map(self._is_of_parameters, _tensors((args, kwargs)))),
            )  # fmt: skip
            if any(map(_is_parameter, results)) and not torch.is_grad_enabled():
                self.recorded.written.append(len(self.recorded.calls))
            self.recorded.calls.append(call)
            self._note_gradients(call, results, {_key(x) for x in _tensors((args, kwargs))})
            for x in results:
                self._made[_key(x)] = len(self.recorded.calls) - 1
            self._kept.append(results)
        return out

    def _is_of_parameters(self, x: Tensor) -> bool:
        made = self._made.get(_key(x))
        return _is_parameter(x) if made is None else self.recorded.calls[made].is_of_parameters

    def _note_gradients(
        self, call: RecordedCall, results: Sequence[Tensor], given: set[int]
    ) -> None:
        call.gradients = [None] * len(results)

        def note(k: int, grad: Tensor | None) -> None:
            if grad is not None:
                call.gradients[k] = _value(grad)

        for k, x in enumerate(results):
            if x.requires_grad and not x.is_leaf and _key(x) not in given:
                x.register_hook(partial(note, k))

    def _carried(self, args: Any, place: CallSite) -> Iterator[int]:
        for k, x in enumerate(args):
            made = self._made.get(_key(x)) if isinstance(x, Tensor) else None
            if made is not None and self.recorded.calls[made].place == place:
                yield k

    def ends(self, out: Any) -> None:
        super().ends(out)
        keys = [_key(x) for x in _tensors(out)]
        self.recorded.returned = [self._made[k] for k in keys if k in self._made]
        used = {i for call in self.recorded.calls for i in call.came_from}
        used.update(self.recorded.returned)
        for call in self.recorded.calls:
            named = {k: _key(x) for k, x in call.local_names.items() if isinstance(x, Tensor)}
            makers = {k: self._made[key] for k, key in named.items() if key in self._made}
            call.unused = frozenset(k for k, i in makers.items() if i not in used)


class Changing(_Mode):
    """The calls at some places are made otherwise."""

    def __init__(self, changes: dict[CallSite, Change], rank: int, mesh: Any) -> None:
        super().__init__()
        self.changes, self.rank, self.mesh = changes, rank, mesh
        self._lines = {(p.file, p.line, p.instruction) for p in changes}
        self._executions: Counter[CallSite] = Counter()

    def see(self, func: Any, name: str, args: Any, kwargs: Any, frame: FrameType) -> Any:
        if (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti) in self._lines:
            place = _place(frame, name)
            if (change := self.changes.get(place)) is not None:
                execution = self._executions[place]
                self._executions[place] += 1
                return change(Now(func, args, kwargs, execution, frame, self.rank, self.mesh))
        return func(*args, **kwargs)


_thread = threading.local()


def in_backward() -> Any:
    """Inside, the backward passes of steps that are watched are, too."""
    return _torch.engine_enters(lambda: getattr(_thread, "mode", None))


def executions(
    calls: Sequence[RecordedCall],
) -> Iterator[tuple[tuple[CallSite, int], RecordedCall]]:
    """Each call with its place and how often that was passed before."""
    seen: Counter[CallSite] = Counter()
    for call in calls:
        yield (call.place, seen[call.place]), call
        seen[call.place] += 1


# -- what is seen ---


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # x.T


def _is_collective(func: Any) -> bool:
    name = getattr(func, "_qualified_op_name", "")
    return name.partition("::")[0] in COLLECTIVES


def _users_frame(frame: FrameType | None, is_collective: bool) -> FrameType | None:
    """The frame of the program that makes this call; None of calls that fcoll, DTensor, FSDP or an
    optimizer make for themselves."""
    internal = () if is_collective else (_OURS, *_INTERNAL)
    if frame is not None and frame.f_code.co_filename.startswith(internal):
        return None
    while frame is not None and not _torch.is_engine(frame):
        file = frame.f_code.co_filename
        if not is_library(file) and not is_pythons(file):
            return frame
        frame = frame.f_back
    return None


def _place(frame: FrameType, name: str) -> CallSite:
    caller = _users_frame(frame.f_back, True)
    called = (caller.f_code.co_filename, caller.f_lineno) if caller else ("", 0)
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_lasti, called, name)


def _is_parameter(x: Tensor) -> bool:
    return x.is_leaf and x.requires_grad


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in _torch.tree_leaves(tree) if isinstance(x, Tensor))


def _key(x: Any) -> int:
    return id(getattr(x, "_local_tensor", getattr(x, "elem", x)))


def _value(x: Tensor) -> Tensor:
    with _torch.raw():
        return _torch.local_of(x).detach().clone()


def _raw(args: Any) -> Any:
    """The arguments with the values that they have now."""
    return _torch.tree_map(lambda x: _value(x) if isinstance(x, Tensor) else x, args)
