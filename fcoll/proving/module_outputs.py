"""Inputs and outputs of modules: where programs differ first, where a deep one is cut in pieces.

A cut replaces the output of a module by an uninterpreted function of it, in both programs. Equal
for every function is equal for the identity; and degrees, which a deep model multiplies, start
anew. Values are matched as sets: the elements that a rank has are among one device's, however they
are sharded, gathered or cut into microbatches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fcoll.proving import _torch
from fcoll.proving.algebra import Algebra
from fcoll.proving.ring import Ring
from fcoll.source import user_line

CUT = "output of "  # in names of functions: of which module


INPUT, OUTPUT, GRADIENT = "input", "output", "gradient of the output"
Event = tuple[str, str]  # what, of which module
Noted = dict[Event, list[Tensor]]


@dataclass
class ModuleValues:
    """What modules were given and gave in one step on one rank, in the order of the step."""

    forward: Noted = field(default_factory=dict)
    backward: Noted = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)  # where each module was called first
    model: str = "the model"  # the class of the outermost


@contextmanager
def watched(
    modules: Mapping[str, torch.nn.Module], algebra: Algebra, values: ModuleValues
) -> Iterator[None]:
    """Inside, inputs and outputs are noted. Hooks that a parallel style has put on a module run
    before."""
    if "" in modules:
        values.model = type(modules[""]).__name__
    with ExitStack() as stack:
        for name, module in modules.items():
            watch = _ModuleWatch(name, algebra, values)
            before = module.register_forward_pre_hook(watch.before, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(watch.after).remove)
        yield


@dataclass
class _ModuleWatch:
    name: str
    algebra: Algebra
    values: ModuleValues
    calls: int = 0
    is_dry: bool = False

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.values.lines.setdefault(self.name, user_line() or "")
        self.is_dry = not self.calls and _in_pipeline()
        self.calls += 1
        if not self.is_dry:
            for x in filter(_is_value, _torch.tree_leaves((args, kwargs))):
                self._note(self.values.forward, INPUT, x)

    def after(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if not torch.compiler.is_compiling() and not self.is_dry:
            for x in filter(_is_value, _torch.tree_leaves(out)):
                self._note(self.values.forward, OUTPUT, x)
                if x.requires_grad:
                    x.register_hook(lambda grad: self._note(self.values.backward, GRADIENT, grad))

    def _note(self, values: Noted, what: str, x: Tensor) -> None:
        with _torch.raw():
            value = _torch.local_of(x).detach().clone()
        values.setdefault((what, self.name), []).append(value)


def _is_value(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta


# -- cuts ---


@dataclass(eq=False)
class CutOutputs:
    """What modules give on one device where they are cut: noted there, and then compared with what
    they give on ranks. Where that is anything else, as partial sums are, is no place for a cut."""

    noted: dict[str, list[Tensor]] = field(default_factory=dict)
    known: dict[str, Tensor] | None = None  # sorted elements, when one device has run
    other: str = ""  # a module that gives others on a rank

    def compare(self) -> None:
        """One device has run: ranks follow."""
        self.known = {k: torch.cat(xs).sort().values for k, xs in self.noted.items()}
        self.noted = {}

    def see(self, name: str, x: Tensor) -> bool:
        """Is it one device's?"""
        if self.known is None:
            self.noted.setdefault(name, []).append(x.flatten().clone())
            return True
        known = self.known.get(name, x.new_empty(0))
        place = torch.searchsorted(known, x.contiguous()).clamp(max=len(known) - 1)
        return bool(len(known)) and torch.equal(known[place], x)


class CutElsewhere(Exception):
    """A module gives ranks what it does not give one device."""


@contextmanager
def cut_at(
    names: frozenset[str],
    modules: Mapping[str, torch.nn.Module],
    algebra: Algebra,
    outputs: CutOutputs | None,
) -> Iterator[None]:
    """Inside, the outputs of these modules are replaced, and seen before."""
    cuts = [_Cut(name, algebra, outputs) for name in modules if name in names]
    with ExitStack() as stack:
        for cut in cuts:
            stack.callback(modules[cut.name].register_forward_hook(cut.after).remove)
        yield


@dataclass
class _Cut:
    name: str
    algebra: Algebra
    outputs: CutOutputs | None
    calls: int = 0

    def after(self, module: torch.nn.Module, args: Any, out: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        is_dry = not self.calls and _in_pipeline()
        self.calls += 1
        if not is_dry:
            self._see(out)
        return _torch.tree_map(lambda x: self._replaced(x) if _is_value(x) else x, out)

    def _see(self, out: Any) -> None:
        outputs = self.outputs
        if outputs is None or outputs.other:
            return
        with _torch.raw():
            values = [_torch.local_of(x).detach() for x in _torch.tree_leaves(out) if _is_value(x)]
            is_one_devices = all([outputs.see(self.name, x) for x in values])
        if not is_one_devices:
            outputs.other = self.name
            raise CutElsewhere(self.name)

    def _replaced(self, x: Tensor) -> Tensor:
        if not _torch.is_dtensor(x):
            return _Uninterpreted.apply(x, self.algebra, self.name)
        local = _Uninterpreted.apply(x.to_local(), self.algebra, self.name)  # type: ignore[attr-defined]
        return _torch.like_dtensor(local, x)


def _in_pipeline() -> bool:
    """Is it called by torch's pipelines? Their first call of a stage is dry: of whatever is in
    memory, to find out shapes."""
    pipelining = sys.modules.get("torch.distributed.pipelining")
    folder = os.path.dirname(getattr(pipelining, "__file__", None) or "")
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (folder and frame.f_code.co_filename.startswith(folder)):
        frame = frame.f_back
    return frame is not None


class _Uninterpreted(torch.autograd.Function):
    """A function of which nothing is known, elementwise, and a derivative of which nothing is
    known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, algebra: Algebra, name: str) -> Tensor:  # type: ignore[override]
        with _torch.raw():
            elements = _torch.local_of(x).detach()
            ctx.algebra, ctx.slope = algebra, algebra.opaque(f"{CUT}{name}'", elements)
            return algebra.opaque(f"{CUT}{name}", elements)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        with _torch.raw():
            return ctx.algebra.mul(_torch.local_of(grad), ctx.slope), None, None


def without_cuts(uninterpreted: set[str]) -> set[str]:
    """The functions of the program itself."""
    return {name for name in uninterpreted if not name.startswith(CUT)}


# -- whose outputs are one device's ---


def contained(ring: Ring, ranks: list[Tensor], one: list[Tensor]) -> bool:
    """Are all elements of the ranks' among one device's?"""
    known = torch.cat([x.flatten() for x in one]) % ring.modulus
    return all(bool(torch.isin(x % ring.modulus, known).all()) for x in ranks)


def all_outputs(one: ModuleValues) -> frozenset[str]:
    """The modules that give values, all finite, on one device."""
    return frozenset(
        name
        for (what, name), values in one.forward.items()
        if what == OUTPUT and name and all(bool(x.isfinite().all()) for x in values)
    )


def cuttable(ring: Ring, one: ModuleValues, ranks: Sequence[ModuleValues]) -> frozenset[str]:
    """The modules whose outputs ranks have as one device has them, all finite."""
    found = set()
    for name in all_outputs(one):
        event = (OUTPUT, name)
        of_ranks = [x for o in ranks for x in o.forward.get(event, ())]
        if of_ranks and contained(ring, of_ranks, one.forward[event]):
            found.add(name)
    return frozenset(found)


def not_one_devices(
    ring: Ring, one: Noted, ranks: Sequence[Noted], scales: Iterable[int]
) -> list[Event]:
    """Behind the last event whose values are one device's, those that have others. Before it,
    others are intended: partial sums, padded tokens.

    ``scales``: gradients of a mean over a part of the batch are so many times larger.
    """
    suspects: list[Event] = []
    numbers = [ring.number(n) for n in scales]
    for event, values in one.items():
        of_ranks = [x for o in ranks for x in o.get(event, ())]
        if not of_ranks:
            continue
        if any(contained(ring, of_ranks, [ring.mul(x, n) for x in values]) for n in numbers):
            suspects = []
        else:
            suspects.append(event)
    return suspects
