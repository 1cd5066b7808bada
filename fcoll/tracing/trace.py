"""A step of a program, run once without data: every op and every collective that it issues."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from types import FrameType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_iter, tree_map

from fcoll.errors import BadOption, DataDependent, UntraceableDDP, ran
from fcoll.graph.issued import Issued, collectives_of, why_none
from fcoll.graph.steps import Step, input_bytes, sizes_of, steps_of
from fcoll.graph.symbolic_sizes import born_at, by_symbol, from_text, to_text
from fcoll.plugins import plugin
from fcoll.source import Site, is_library, line_of
from fcoll.tracing import _torch
from fcoll.tracing.compiled import compiled
from fcoll.tracing.fake_world import (
    NewGroup,
    current_axes,
    new_groups_noted,
    traceable_reducers,
)
from fcoll.tracing.fakes import Reachable, faked, reachable
from fcoll.tracing.reading import reading, reading_compiled
from fcoll.tracing.recorder import CompiledRecorder, Recorder, others_paused, parts_of
from fcoll.tracing.values import Values, settled
from fcoll.units import show_bytes, table

Mode = Literal["joint", "compiled", "forward"]
MODES = get_args(Mode)

log = logging.getLogger(__name__)  # shown by TORCH_LOGS="+fcoll"


class Trace:
    """What one rank's step does: a graph, and the collectives in the order of their issue.

    ``print(trace)`` shows a table. In ``graph_module`` the ops are in the order in which they ran,
    writes in place included; each node's ``meta["origin"]`` says who asked for it. A trace read
    from JSON has no graph, only collectives and steps. Numbers that the step reads from tensors
    are placeholders in it; ``notes`` say where it decides by one.
    """

    notes: tuple[str, ...] = ()
    taken: Mapping[str, int] = {}  # the values of sizes that were given by take()
    layouts: tuple[dict[str, str], ...] = ()  # a card of each layout of sharded tensors in it
    own_backward: bool = False  # did the step run a backward pass itself?
    new_groups: tuple[NewGroup, ...] = ()  # that it made

    def __init__(
        self,
        graph_module: fx.GraphModule | None,
        collectives: tuple[Issued, ...],
        rank: int,
        mesh: dict[str, int],
        steps: tuple[Step, ...] | None = None,
    ) -> None:
        self.graph_module = graph_module
        self.collectives = collectives
        self.rank = rank
        self.mesh = mesh
        if steps is not None:
            self.steps = steps

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The graph as a timeline and a scheduler see it.

        Sizes that only a run knows are taken to be as large as they can be. For one without a bound
        say ``trace.take({"u0": 4096})`` first, or MissingSize is raised.
        """
        assert self.graph_module is not None
        with _no_collection():
            return steps_of(self.graph_module, self.collectives, sizes=self.sizes)

    @cached_property
    def input_bytes(self) -> int:
        """The memory of what the step is given: parameters, optimizer states, batch."""
        return input_bytes(self.graph_module) if self.graph_module is not None else 0

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The values of symbolic sizes in this trace: {"s0": 128}; or, of those that only a run
        knows, their upper bounds; of an exchange's splits, even shares."""
        return sizes_of(self.graph_module) if self.graph_module is not None else {}

    def take(self, sizes: Mapping[str, int]) -> None:
        """Give sizes that only a run knows a value, by symbol or by the line that reads them:
        ``trace.take({"u5": 128, "moe.py:31": 64})``."""
        if sizes:
            lines = born_at(self.graph_module.graph) if self.graph_module is not None else {}
            self.taken = by_symbol(sizes, lines)
            self.sizes |= self.taken

    def to_json(self) -> str:
        """The trace without its graph, as text."""
        plain: dict[str, Any] = {"rank": self.rank, "mesh": self.mesh}
        plain |= {"input_bytes": self.input_bytes, "sizes": self.sizes, "notes": self.notes}
        plain |= {"layouts": self.layouts}
        rows = {"collectives": self.collectives, "steps": self.steps}
        lists = {key: [vars(row) for row in value] for key, value in rows.items()}
        return json.dumps({**plain, **lists}, default=_expression_to_json)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        data = json.loads(text, object_hook=_expression_from_json)
        collectives = tuple(_restored(Issued, row) for row in data["collectives"])
        steps = tuple(_restored(Step, row) for row in data["steps"])
        loaded = cls(None, collectives, data["rank"], data["mesh"], steps)
        loaded.input_bytes, loaded.sizes = data["input_bytes"], data["sizes"]
        loaded.notes = tuple(data.get("notes", ()))
        loaded.layouts = tuple(data.get("layouts", ()))
        return loaded

    def __eq__(self, other: object) -> bool:
        """The same step: all but the graph, which a trace from JSON has not."""
        return isinstance(other, Trace) and self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]

    def _content(self) -> tuple[Any, ...]:
        facts = self.rank, self.mesh, self.input_bytes, self.sizes
        return *facts, self.collectives, self.steps

    def diff(self, other: Trace) -> Diff:
        """What the other trace issues that this one does not, and the other way round."""
        mine, theirs = Counter(map(_key, self.collectives)), Counter(map(_key, other.collectives))
        return Diff(
            removed=_surplus(self.collectives, mine - theirs),
            added=_surplus(other.collectives, theirs - mine),
            same_order=[*map(_key, self.collectives)] == [*map(_key, other.collectives)],
        )

    def records(self) -> list[dict[str, Any]]:
        """A dict for each collective: ``pandas.DataFrame(trace.records())``."""
        return [
            {**{k: v for k, v in vars(c).items() if k != "stack"}, "n": c.n}
            | {"wire_bytes": c.wire_bytes}
            for c in self.collectives
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "mesh": dict(self.mesh), "collectives": self.records()}

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={n}" for axis, n in self.mesh.items()) or "no mesh"
        head = f"rank {self.rank} of {mesh}: {len(self.collectives)} collectives"
        shown = _table(self.collectives) if self.collectives else [why_none(self.mesh)]
        return "\n".join([head, *shown, *self.notes])

    def __repr__(self) -> str:
        return f"Trace({len(self.collectives)} collectives, rank={self.rank}, mesh={self.mesh})"


@dataclass(frozen=True)
class Diff:
    """Two traces compared by op, axis, size, phase and module; lines may move."""

    removed: tuple[Issued, ...]
    added: tuple[Issued, ...]
    same_order: bool

    @property
    def same(self) -> bool:
        return self.same_order and not self.removed and not self.added

    def __str__(self) -> str:
        if self.same:
            return "the same collectives in the same order"
        if not self.removed and not self.added:
            return "the same collectives in another order"
        lines = [f"- {line}" for line in _table(self.removed)[1:]]
        return "\n".join([*lines, *(f"+ {line}" for line in _table(self.added)[1:])])


def _key(c: Issued) -> tuple[Any, ...]:
    return c.op, c.axis, c.n, c.shapes, c.dtypes, repr(c.args), c.phase, c.module


def _surplus(collectives: tuple[Issued, ...], counts: Counter[Any]) -> tuple[Issued, ...]:
    remaining, extra = Counter(counts), []
    for c in collectives:
        if remaining[_key(c)] > 0:
            remaining[_key(c)] -= 1
            extra.append(c)
    return tuple(extra)


_HEAD = ("count", "collective", "axis", "n", "each", "dtype", "phase", "source", "module")


def _table(collectives: Iterable[Issued]) -> list[str]:
    """A line for all that the same source line issues alike, in order of first issue."""
    groups: dict[Any, list[Issued]] = {}
    for c in collectives:
        groups.setdefault((c.phase, c.op, c.label, c.n, c.bytes, c.dtypes, c.source), []).append(c)
    rows: list[tuple[str, ...]] = [_HEAD]
    for (phase, op, label, n, size, dtypes, source), same in groups.items():
        modules = {re.sub(r"\b(?<!\w)\d+\b", "*", c.module) for c in same}
        module = modules.pop() if len(modules) == 1 else f"{len(modules)} modules"
        kinds = ", ".join(dict.fromkeys(dtypes))
        cells = (len(same), op, label, n, show_bytes(size), kinds, phase)
        rows.append(tuple(map(str, (*cells, source, module))))
    return table(rows, "><<>><<<<")


def _expression_to_json(x: Any) -> Any:
    return {"expression": to_text(x)}


def _expression_from_json(x: dict[str, Any]) -> Any:
    return from_text(x["expression"]) if x.keys() == {"expression"} else x


def _restored(cls: Any, row: dict[str, Any]) -> Any:
    """A dataclass from its JSON: lists are tuples again, but for those among the arguments."""
    return cls(**{k: _tuples(v) if k != "args" else v for k, v in row.items()})


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def trace(fn: Callable[..., Any], *args: Any, mode: Mode = "joint", **kwargs: Any) -> Trace:
    """Run a module or function once on fake tensors and write down what it does.

    ``mode="joint"`` is the whole step: the forward pass, the backward pass and the optimizer, if
    ``fn`` calls one. A step that runs a backward pass has run it: if ``fn`` calls backward() or
    torch.autograd.grad() for any of its losses, whatever it returns, the trace runs none of its
    own; else it runs that of the sum of the results. (Gradients that are to be differentiated
    again, autograd.grad with create_graph=True, are a part of the forward pass.) "forward" leaves
    out the backward pass that ``fn`` does not run itself. "compiled" is the step as torch.compile
    makes it: AOTAutograd's graphs one after the other, without in-place ops, and what runs between
    them, where Dynamo breaks the graph. Where torch cannot compile the step as a whole, its
    outermost modules are compiled.

    Tensors may be real, fake or on the meta device: nothing is computed and nothing large is
    allocated. Parameters, gradients and optimizer states are afterwards what they were.

    Values that ``fn`` reads to print or log them are placeholders. Where it decides by a value, or
    makes a plain number of one (``float(loss)``), it runs again with another: if it then issues
    other collectives, DataDependent says where; ``fcoll.assume`` says which way to go.

    >>> with fcoll.fake_world(tp=4) as mesh:
    ...     t = fcoll.trace(lambda x: fcoll.all_reduce(x, "sum", mesh), torch.ones(8))
    >>> [(c.op, c.axis, c.n, c.bytes) for c in t.collectives]
    [('all_reduce', 'tp', 4, 32)]
    """
    if mode not in MODES:
        raise BadOption(op="trace", arg="mode", value=mode, known=MODES)
    objects = reachable(fn, args, kwargs)
    if mode == "compiled" and any(map(_torch.is_ddp, objects.modules)):
        raise UntraceableDDP(mode=mode)
    step = _Step(fn, args, kwargs, mode, objects, caller=sys._getframe(1))
    with _no_collection(), others_paused():
        traced, notes = settled(step.run)
    traced.notes += notes
    log.debug("%s", traced)
    return traced


@dataclass
class _Step:
    """A program that can be run on fake tensors, more than once."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: Mode
    objects: Reachable
    caller: FrameType
    compiled_modules: list[torch.nn.Module] | None = None  # where torch cannot compile the whole
    own_backward: bool = False  # of the last run

    @cached_property
    def fake(self) -> Any:
        """The fake mode of all runs: that of the program's fake tensors, if it has any."""
        tensors = [x for x, _ in self.objects.tensors.values()]
        return _torch.detect_fake_mode(tensors) or _torch.fake_mode()

    @property
    def _here(self) -> Site:
        """Where collectives without a line of their own come from: who asks for the trace, or,
        where that is fcoll itself, the step."""
        here = self.caller.f_code.co_filename, self.caller.f_lineno
        code = getattr(inspect.unwrap(self.fn), "__code__", None)
        return (code.co_filename, code.co_firstlineno) if code and is_library(here[0]) else here

    def run(self, values: Values) -> Trace:
        """Run the step once and record it; where it reads values, it gets these."""
        try:
            return self._run(values)
        except Exception as error:
            outermost = [m for m, path in self.objects.modules.items() if not path]
            tried = self.mode != "compiled" or self.compiled_modules is not None
            if tried or not outermost or not _torch.is_of_compiler(error):
                raise
            # As people do: torch.compile(model), and the step around it as it is.
            self.compiled_modules = outermost
            values.forget()
            return self._run(values)

    def _run(self, values: Values) -> Trace:
        with faked(self.objects, self.fake) as copies, self.fake:
            args, kwargs = tree_map(
                lambda x: copies.get(id(x), x) if isinstance(x, Tensor) else x,
                (self.args, self.kwargs),
            )
            tensors = [(copies.get(id(x), x), name) for x, name in self.objects.tensors.values()]
            kind = CompiledRecorder if self.mode == "compiled" else Recorder
            recorder = kind(_names(tensors), self.objects.modules, self.caller, self.fake)
            values.digest = recorder.shared_digest
            try:
                with (
                    self._reading(values, recorder),
                    self._reducers(recorder),
                    new_groups_noted() as groups,
                ):
                    out = self._call(args, kwargs, recorder)
            except _torch.NO_VALUE as error:
                raise DataDependent(line=line_of(error), why="") from None
            leaves = [*tree_iter(out), *(x.grad for x, _ in tensors if x.is_leaf)]
            outputs = [y for x in leaves if isinstance(x, Tensor) for y in parts_of(x)]
            graph_module = recorder.finish(outputs)
        collectives = collectives_of(graph_module, (self._here,))
        rank = dist.get_rank() if dist.is_initialized() else 0
        result = Trace(graph_module, collectives, rank, current_axes())
        result.notes = tuple(dict.fromkeys(recorder.notes))
        result.layouts = _distinct([*self._layouts_before(), *values.layouts])
        result.own_backward = self.own_backward
        result.new_groups = tuple(groups)
        return result

    def _call(self, args: Any, kwargs: Any, recorder: Recorder) -> Any:
        """Run the program, recording; and its backward pass, if it did not run one."""
        around = _torch.around_backward(recorder.runs_backward)
        with around, recorder.listening(), self._compiled(recorder) as step:
            out = ran("trace", step(*args, **kwargs))
            self.own_backward = recorder.ran_backward
            if self.mode != "forward" and not self.own_backward:
                backward_of(out)
        return out

    @contextmanager
    def _compiled(self, recorder: Recorder) -> Iterator[Callable[..., Any]]:
        """The step as torch.compile makes it, in that mode."""
        if self.mode == "compiled":
            with compiled(self.fn, self.compiled_modules, recorder) as step:
                yield step
        else:
            with _torch.not_compiled():
                yield self.fn

    def _layouts_before(self) -> Iterator[dict[str, str]]:
        """Cards of the sharded tensors that the program had before the step."""
        for x, name in self.objects.tensors.values():
            if hasattr(x, "layout_card"):
                yield x.layout_card() | {"name": name}

    def _reducers(self, recorder: Recorder) -> AbstractContextManager[None]:
        """DistributedDataParallel, here and made in the step, on reducers that can be traced."""
        if any(isinstance(m, DistributedDataParallel) for m in self.objects.modules):
            return plugin("reducers").traced(self.objects.modules, recorder.notes)
        return traceable_reducers()

    def _reading(self, values: Values, recorder: Recorder) -> AbstractContextManager[None]:
        if self.mode == "compiled":
            return reading_compiled(values)
        return reading(values, recorder.has_written)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A trace holds on to all that it makes: looking through it for garbage takes 15 % more."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _names(tensors: Any) -> dict[int, str]:
    return {id(part): name for x, name in tensors for part in parts_of(x)}


def _distinct(cards: list[dict[str, str]]) -> tuple[dict[str, str], ...]:
    """Each layout once, with what is known of its first tensor that has a name or line."""
    by_picture: dict[str, dict[str, str]] = {}
    for card in cards:
        by_picture.setdefault(card["svg"], card)
    return tuple(by_picture.values())


def backward_of(out: Any) -> None:
    """Run the backward pass of all results that have one."""
    results = [x for x in tree_iter(out) if isinstance(x, Tensor) and x.grad_fn is not None]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in results]
    losses = [x if x.dim() == 0 else x.sum() for x in local if x.is_floating_point()]
    if losses:
        torch.autograd.backward(losses)
