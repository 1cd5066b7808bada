"""A graph -> the collectives that it issues, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import sympy
from torch import Tensor, fx

from fcoll.errors import FcollError, MissingSize
from fcoll.graph import _torch
from fcoll.graph.nodes import SPLITS as SPLITS
from fcoll.graph.nodes import arguments, collectives, origin_of, waits_of
from fcoll.graph.origin import Frames
from fcoll.graph.symbolic_sizes import Hints
from fcoll.groups import Group, by_name
from fcoll.source import line_in, show
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective
from fcoll.transport.messages import PLAIN

GroupKey = tuple[tuple[int, ...], int]  # its ranks, and which of the groups with these ranks

SHOWN = 4  # ranks of a group without a name


@dataclass(frozen=True)
class Issued:
    """One collective that a step issues."""

    id: int  # position in the order of issue
    op: str  # the row's name
    target: str  # the op as it was called, "_c10d_functional::all_reduce"
    group: str  # the process group's name
    axis: str | None  # the mesh axis that the group spans
    ranks: tuple[int, ...]  # its global ranks
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that go in
    dtypes: tuple[str, ...]
    bytes: int  # the larger of what goes in and what comes out
    args: dict[str, Any]  # the other arguments, by name
    phase: str  # "fwd", "bwd" or "opt"
    source: str  # the user's line, "model.py:31"
    module: str  # "layers.0.attention.wo"
    start: str  # names of nodes in the graph
    wait: str | None
    stack: tuple[str, ...] = field(default=(), repr=False)  # the user's lines, innermost last
    instance: int = 0  # which of the groups with these ranks, in the order they were made

    @property
    def n(self) -> int:
        return len(self.ranks)

    @property
    def group_key(self) -> GroupKey:
        return self.ranks, self.instance

    @property
    def row(self) -> Collective:
        return COLLECTIVES[self.op]

    @property
    def label(self) -> str:
        """The group for people: its axis or name, or its ranks, where torch has only a number."""
        if self.axis or not self.group.isdigit():
            return self.axis or self.group
        first = ",".join(map(str, self.ranks[:SHOWN]))
        return f"ranks {first}{',...' if self.n > SHOWN else ''}"

    @property
    def wire_bytes(self) -> Any:
        """The bytes that each rank sends."""
        return self.row.wire_bytes(self.n, self.bytes)

    def agreed(self) -> tuple[dict[str, Any], list[list[Any]]]:
        """What all ranks of the group must have alike: arguments by name, and shapes."""
        return self.row.agreed(self.args, self.shapes)


def with_sizes(call: Issued, sizes: Mapping[str, int]) -> Issued:
    """The same call with values for symbols: those of shapes, bytes, splits."""

    def resolved(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(resolved, x))
        if not isinstance(x, sympy.Expr):
            return x
        value = x.subs({s: sizes[str(s)] for s in x.free_symbols if str(s) in sizes})
        return int(value) if value.is_Integer else value

    args = {name: resolved(value) for name, value in call.args.items()}
    return replace(call, shapes=resolved(call.shapes), bytes=resolved(call.bytes), args=args)


def messages_of(call: Issued) -> Iterator[tuple[bool, int, int]]:
    """(sends, the peer's place in the group, tag) of each message of a call."""
    kinds = call.args.get("op_list", [call.op])
    peers = call.args.get("peer_list", [call.args.get("dst", call.args.get("src"))])
    tags = call.args.get("tag_list", [call.args.get("tag")])
    for kind, peer, tag in zip(kinds, peers, tags, strict=True):
        yield kind == "isend", peer, tag


def collectives_of(graph_module: fx.GraphModule, here: Frames = ()) -> tuple[Issued, ...]:
    """The collectives of a recorded graph; ``here`` is where those without a line are from."""
    lines = cache(_lines_in)  # a step's calls are from few lines, and paths take long to shorten
    starts = enumerate(collectives(graph_module.graph))
    return tuple(_issued(i, node, row, here, lines) for i, (node, row) in starts)


Lines = tuple[str, tuple[str, ...]]


def _lines_in(frames: Frames) -> Lines:
    """The user's line, and those of the whole stack."""
    return line_in(frames), tuple(map(show, frames))


def _issued(
    id: int, node: fx.Node, row: Collective, here: Frames, lines: Callable[[Frames], Lines]
) -> Issued:
    tensors: list[Tensor] = []
    others: dict[str, Any] = {}
    for name, value in arguments(node).items():
        nodes = [x for x in _leaves(value) if isinstance(x, fx.Node)]
        if name != "out":
            values = [x.meta.get("val") for x in nodes]  # a group may be a value of the graph
            tensors.extend(x for x in values if isinstance(x, Tensor))
        if not nodes and name != "group_name":
            others[name] = _tags(value) if name in ("tag", "tag_list") else value
    results = [x for x in _leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    origin, (group, instance) = origin_of(node), _group_of(node)
    source, stack = lines(origin.frames or here)
    waits = waits_of(node)
    return Issued(
        id=id,
        op=row.name,
        target=_torch.op_name(node.target),
        group=group.name,
        axis=group.axis,
        ranks=group.ranks,
        shapes=tuple(tuple(map(_torch.size_expr, x.shape)) for x in tensors),
        dtypes=tuple(str(x.dtype).removeprefix("torch.") for x in tensors),
        bytes=_larger(_bytes(tensors), _bytes(results)),
        args=others,
        phase=origin.phase,
        source=source,
        module=origin.module,
        start=node.name,
        wait=waits[0].name if waits else None,
        stack=stack,
        instance=instance,
    )


def _tags(tags: Any) -> Any:
    """As the program gave them: how a message goes is no part of its tag."""
    return [tag % PLAIN for tag in tags] if isinstance(tags, (list, tuple)) else tags % PLAIN


def _leaves(value: Any) -> list[Any]:
    """The values in an argument or result: itself, or a list's. pytree takes four times as long."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _group_of(node: fx.Node) -> tuple[Group, int]:
    """The group of a call, and which of the groups with its ranks. Of a graph that no trace made,
    the group that has the call's name now; nothing is known of its ranks where there is none."""
    if "group" in node.meta:
        return node.meta["group"]
    args = arguments(node)
    name = str(args.get("group_name", ""))
    try:
        return by_name(name), 0
    except FcollError:
        ranks = tuple(range(args.get("group_size") or 0))
        return Group(name, ranks, 0, None, name, ()), 0


def why_none(mesh: Mapping[str, int]) -> str:
    """Why a step may issue no collectives, and what to do.

    >>> why_none({"dp": 1})
    'one rank has nobody to send to. Name a larger world: --mesh dp=8'
    """
    if mesh and prod(mesh.values()) == 1:
        axis = next(iter(mesh))
        return f"one rank has nobody to send to. Name a larger world: --mesh {axis}=8"
    over = " over " + ", ".join(f"{axis}={n}" for axis, n in mesh.items()) if mesh else ""
    return (
        f"nothing is sharded or reduced{over}, each rank runs the whole step by itself. "
        "Give the mesh to what shards the model (fully_shard, parallelize_module, "
        "DistributedDataParallel), or call a collective in the step; a plan whose names match no "
        "module shards nothing"
    )


def describe(call: Issued) -> str:
    """A call as errors name it: "all_reduce(sum) of float32 (8, 16) at model.py:31 in layers.0"."""
    shown = [str(v) for k, v in call.args.items() if k in _SHOWN and v is not None]
    shown += ["grad=identity"] * (call.args.get("grad") == "identity")
    parts = [f"{d} {s}" for d, s in zip(call.dtypes, call.shapes, strict=True)]
    of = f" of {', '.join(parts)}" if parts else ""
    where = f" at {call.source}" + (f" in {call.module}" if call.module else "")
    return f"{call.op}({', '.join(shown)}){of}{where}"


#: The arguments of an exchange that say how many rows go to whom, and come from whom.
_SHOWN = ("reduce_op", "src", "dst", "sizes", "op_list", "peer_list", "tag", "tag_list", *SPLITS)


def _larger(a: Any, b: Any) -> Any:
    """By the values or bounds of symbolic sizes; the first if they have none."""
    hint = Hints()
    try:
        return _torch.size_expr(b if hint(b) > hint(a) else a)
    except MissingSize:
        return _torch.size_expr(a)


def _bytes(tensors: list[Tensor]) -> Any:
    return sum(x.numel() * x.element_size() for x in tensors)
