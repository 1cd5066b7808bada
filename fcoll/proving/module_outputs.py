"""Inputs and outputs of modules: where programs differ first, where a deep one is cut in pieces.

A cut replaces the output of a module by an uninterpreted function of it, in both programs. Equal
for every function is equal for the identity; and degrees, which a deep model multiplies, start
anew. Values are matched as sets: the elements that a rank has are among one device's, however they
are sharded, gathered or cut into microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
    modules: Mapping[str, torch.nn.Module],
    algebra: Algebra,
    cuts: frozenset[str],
    values: ModuleValues,
) -> Iterator[None]:
    """Inside, inputs and outputs are noted, and the outputs of ``cuts`` replaced. Hooks that a
    parallel style has put on a module run before."""
    if "" in modules:
        values.model = type(modules[""]).__name__
    with ExitStack() as stack:
        for name, module in modules.items():
            watch = _Watch(name, algebra, name in cuts, values)
            before = module.register_forward_pre_hook(watch.before, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(watch.after).remove)
        yield


@dataclass
class _Watch:
    name: str
    algebra: Algebra
    is_cut: bool
    values: ModuleValues

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.values.lines.setdefault(self.name, user_line() or "")
            for x in filter(_is_value, _torch.tree_leaves((args, kwargs))):
                self._note(self.values.forward, INPUT, x)

    def after(self, module: torch.nn.Module, args: Any, out: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        done = _torch.tree_map(lambda x: self._returned(x) if _is_value(x) else x, out)
        return done if self.is_cut else None

    def _returned(self, x: Tensor) -> Tensor:
        self._note(self.values.forward, OUTPUT, x)
        if x.requires_grad:
            x.register_hook(lambda grad: self._note(self.values.backward, GRADIENT, grad))
        return _cut(x, self.algebra, self.name) if self.is_cut else x

    def _note(self, values: Noted, what: str, x: Tensor) -> None:
        with _torch.raw():
            value = _torch.local_of(x).detach().clone()
        values.setdefault((what, self.name), []).append(value)


def _is_value(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta


# -- cuts ---


def _cut(x: Tensor, algebra: Algebra, name: str) -> Tensor:
    if not _torch.is_dtensor(x):
        return _Uninterpreted.apply(x, algebra, name)
    local = _Uninterpreted.apply(x.to_local(), algebra, name)  # type: ignore[attr-defined]
    return _torch.like_dtensor(local, x)


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


def cuttable(ring: Ring, one: ModuleValues, ranks: Sequence[ModuleValues]) -> frozenset[str]:
    """The modules whose outputs ranks have as one device has them, all finite; but of a first call
    anything: in it the stages of torch's pipelines find out shapes."""
    found = set()
    for (what, name), values in one.forward.items():
        calls = [o.forward.get((what, name), []) for o in ranks]
        first, later = [c for c in calls if len(c) == 1], [c[1:] for c in calls]
        of_ranks = [x for c in (*first, *later) for x in c]
        is_finite = all(bool(x.isfinite().all()) for x in values)
        if what == OUTPUT and name and is_finite and of_ranks and contained(ring, of_ranks, values):
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
