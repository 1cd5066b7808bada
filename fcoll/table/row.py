"""A row of the table: the description of one collective."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from fcoll.reductions import REDUCTIONS

Expr = Any  # an int, a float, or a sympy expression
Shape = list[int]
Sizes = Sequence[int] | None
OWN = -1  # in the place of a size


@dataclass(frozen=True)
class Argument:
    """One argument of a schema."""

    name: str
    type: str  # "Tensor", "Tensor[]", "str", "int", "SymInt[]?"
    writes: bool  # is it written to?
    default: Any = None

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("Tensor")


@dataclass(frozen=True)
class Native:
    """The C++ parts of a row (transport/native); a test compares the names."""

    #: Has the op a kernel for CPU tensors, ``fcoll_native::<row>``?
    kernel: bool = False
    #: The arguments of the extension's function of the row's name, which serves plain eager calls
    #: of the public function; None if there is no such function.
    fast: tuple[str, ...] | None = None
    #: What a compiled graph reads of the ranks' parts where they lie: "whole" parts, or this
    #: rank's "share" of each. None if it has no such form.
    arena: str | None = None


class Call(SimpleNamespace):
    """A call that is differentiated, as an adjoint sees it.

    It has the arguments of the schema by name (tensors left out), ``op``, ``input_shape``, the
    tensors that the row saves as ``saved_input`` and ``saved_output`` (else None), and two ways to
    go on: ``call(name, *args)`` makes another collective and waits for it, ``identity(x)`` is x
    with a gradient that is summed over the group.
    """

    op: str
    group_name: str
    call: Callable[..., Any]
    identity: Callable[[Tensor], Tensor]


def each(rule: Callable[..., Tensor], xs: Any, *more: Any) -> Any:
    """``rule(x, ...)`` of a tensor; of a list, that of each, where others are lists or None."""
    if isinstance(xs, Tensor):
        return rule(xs, *more)
    columns = [[None] * len(xs) if values is None else values for values in more]
    return [rule(*call) for call in zip(xs, *columns, strict=True)]


@dataclass(frozen=True)
class Collective:
    """One row: everything there is to know of a collective.

    ``schema`` starts like that of torch's op of the same name, where there is one, and goes on with
    arguments that have defaults: a call of torch's op is a call of ours. ``targets`` names those
    ops. ``check``, ``shape`` and ``run`` take the schema's arguments; ``adjoint`` takes the
    gradient of the result and a ``Call``; ``stacked`` takes the tensors of all ranks, stacked (the
    leading dim is the rank), the other arguments by name, and a ``Partition`` of the ranks.

    ``wire_bytes`` and ``steps`` are of the bandwidth-optimal algorithm on n ranks: the bytes that
    each rank sends, where b is the size of its largest argument or result in bytes, and how many
    messages follow one another. They are written so that n and b may be sympy symbols.
    """

    name: str
    schema: str
    check: Callable[..., None]
    shape: Callable[..., Any]
    run: Callable[..., Any]
    adjoint: Callable[..., Any] | None
    wire_bytes: Callable[[Expr, Expr], Expr]
    steps: Callable[[Expr], Expr]
    targets: tuple[str, ...] = ()
    #: The results of all ranks from the tensors of all ranks. Of a form that writes: what it
    #: writes. None, of a row that came without one: it cannot be simulated in a batch.
    stacked: Callable[..., Any] | None = None
    #: The same of one group's tensors in a list, whose shapes may differ, and of each rank's other
    #: arguments by name; results may share memory. None: only even ones are known.
    uneven: Callable[[list[Tensor], list[dict[str, Any]]], list[Tensor]] | None = None
    #: Whose values the gradient needs: ("input",), ("input", "output") or ().
    saves: Callable[[Any], tuple[str, ...]] | None = None
    #: Does torch's op want contiguous strides?
    contiguous: bool = False
    #: Must a call stay in a graph even if nobody uses its result?
    side_effect: bool = False
    #: What the busiest rank sends where everything goes to its place in one step; None: wire_bytes.
    one_shot_bytes: Callable[[Expr, Expr], Expr] | None = None
    #: Has each pair of ranks bytes of its own, which nobody can combine or pass on for others?
    personal: bool = False
    #: Is it between two ranks, instead of called by the whole group?
    is_p2p: bool = False
    #: Does it only wait for another collective's result?
    is_wait: bool = False
    #: Is the result the same on all ranks of the group?
    replicates: bool = False
    #: Of an in-place or out form: the row that does the same and returns a new tensor.
    functional: str | None = None
    #: Of a row on lists: the row of one tensor.
    single: str | None = None
    #: Arguments that each rank gives for itself; all others must be the same on all ranks.
    own_args: tuple[str, ...] = ()
    #: From the arguments by name: the dim along which ranks hold parts of their own sizes.
    own_dim: Callable[[Mapping[str, Any]], int | None] | None = None
    native: Native = Native()

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The schema's arguments in order.

        >>> [a.name for a in COLLECTIVES["broadcast"].arguments]
        ['input', 'src', 'group_name']
        """
        inside = self.schema.partition(" -> ")[0][1:-1]
        return tuple(_argument(part) for part in inside.split(", ") if part and part != "*")

    @cached_property
    def position(self) -> dict[str, int]:
        """Where each argument stands in the schema."""
        return {a.name: i for i, a in enumerate(self.arguments)}

    @cached_property
    def mutates(self) -> bool:
        """Does it write to an argument (the in-place and out forms)?"""
        return any(a.writes for a in self.arguments)

    @cached_property
    def has_out(self) -> bool:
        """Does it write its result into a tensor called ``out``?"""
        return "out" in self.position

    @property  # no cached_property, whose lock Dynamo cannot trace
    def on_lists(self) -> bool:
        """Does it take and return a list of tensors?"""
        return " -> Tensor[]" in self.schema

    @cached_property
    def batched(self) -> bool:
        """Can vmap run it? All that return new tensors: the mapped dim goes along, last."""
        return not self.mutates and bool(self.arguments) and self.arguments[0].is_tensor

    def agreed(
        self, args: Mapping[str, Any], shapes: Iterable[Sequence[Any]]
    ) -> tuple[dict[str, Any], list[list[Any]]]:
        """The part of a call that must be equal on all ranks of the group: arguments by name but
        for those at their defaults, which other forms of it lack, and the shapes of tensors, with
        OWN where each rank has a size of its own."""
        own = self.own_dim(args) if self.own_dim else None
        common = [[OWN if d == own else size for d, size in enumerate(s)] for s in shapes]
        defaults = {a.name: a.default for a in self.arguments}
        same = {
            name: x
            for name, x in args.items()
            if name not in self.own_args and not _equal(x, defaults.get(name, ...))
        }
        return same, common

    @property
    def message(self) -> str:
        """The name of the functional row: in place or not, the message is the same."""
        return self.functional or self.name


def _equal(x: Any, default: Any) -> bool:
    """Without asking what a symbol is."""
    return type(x) is type(default) and bool(x == default)


_ARGUMENT = re.compile(
    r"(?P<type>[\w\[\]]+)(\((?P<alias>[^)]*)\))?\??\s+(?P<name>\w+)(=(?P<default>.+))?"
)


def _argument(text: str) -> Argument:
    match = _ARGUMENT.match(text)
    assert match is not None, text
    default = ast.literal_eval(match["default"]) if match["default"] else None
    return Argument(match["name"], match["type"], "!" in (match["alias"] or ""), default)


def declare(name: str, schema: str, **facts: Any) -> Collective:
    """A row whose ``check``, ``shape`` and ``run`` take only those of the schema's arguments that
    they name, and ``op``, the row's own name, if they ask for it."""
    row = Collective(name, schema, **facts)
    rules: Any = {rule: by_name(row, facts[rule]) for rule in ("check", "shape", "run")}
    return replace(row, **rules)


def by_name(row: Collective, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that names its arguments, as one of all arguments of the row's schema."""
    parameters = inspect.signature(rule).parameters
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return rule  # it takes them all
    names = [*row.position, *(x for x in parameters if x not in row.position)]
    position = {name: i for i, name in enumerate(names)}
    named = {x: p.default for x, p in parameters.items()} | {"op": row.name}
    defaults, indices = [named.get(name) for name in names], [position[x] for x in parameters]

    def call(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *defaults[len(args) :]]
        for name, value in kwargs.items():
            values[position[name]] = value
        return rule(*[values[i] for i in indices])

    return call


def torch_ops(name: str, *more: str) -> tuple[str, ...]:
    """torch's ops of this name, in its namespaces for functional collectives and in ``more``."""
    spaces = ("_c10d_functional", "c10d_functional", *more)
    return tuple(f"{space}::{name}" for space in spaces)


# -- signatures: what all ranks must agree on, as the numbers that shared memory compares. The C++
# kernels make the same of the calls that they serve (transport/native/signature.h). ---

_OPS = {name: i for i, name in enumerate(REDUCTIONS)}


class Facts(NamedTuple):
    """Single arguments of a call; -1 where it has none. The order is that of C++'s Facts."""

    op: int
    root: int
    dim: int
    other_dim: int
    grad: int  # 1: identity
    own_dim: int  # sizes along it are each rank's own


class Signed(NamedTuple):
    """A call as it is compared: the functional row's name, tensors, facts, and more numbers."""

    row: str
    tensors: list[Tensor]
    facts: Facts
    more: list[int]


def signed(row: Collective, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signed:
    """The signature of a call of a row. In place or not, it is the same message."""
    named = {a.name: value for a, value in zip(row.arguments, args, strict=False)} | dict(kwargs)
    named.pop("out", None)
    tensors: list[Tensor] = []
    for a in row.arguments:
        value = named.get(a.name)
        if a.is_tensor and value is not None:
            tensors += value if isinstance(value, (list, tuple)) else [value]
    root = named.get("src", named.get("dst", -1))
    to_ranks = root if isinstance(root, (list, tuple)) else []  # of a permutation
    dims = named.get("dims", [0] * len(tensors) if "dims" in row.position else None)
    own = row.own_dim({"dim": 0, **named}) if row.own_dim else None
    facts = Facts(
        op=_OPS.get(named.get("reduce_op", ""), -1),
        root=-1 if to_ranks else root,
        dim=_dim(row, named),
        other_dim=named.get("shard_dim", -1),
        grad=int(named.get("grad") == "identity"),
        own_dim=-1 if own is None else own,
    )
    return Signed(
        row.message, tensors, facts, [*(named.get("sizes") or []), *(dims or []), *to_ranks]
    )


def _dim(row: Collective, named: Mapping[str, Any]) -> int:
    if "gather_dim" in named:
        return named["gather_dim"]
    # an out form has no dim: it is along the first
    return named.get("dim", 0) if "dim" in row.position or row.has_out else -1
