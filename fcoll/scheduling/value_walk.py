"""A graph read in order: what each value is, in terms, and which memory is in flight.

A write puts other pieces into a storage, so a read that moved past one finds another value. From
its start to its wait nothing may read what a collective gives, or write to what it gives or sends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from fcoll.graph import _torch
from fcoll.graph.issued import SPLITS
from fcoll.graph.nodes import arguments, effect_of, row_of_node
from fcoll.scheduling.value_moves import (
    MAY_COPY,
    MOVES,
    OF_ROWS,
    Storage,
    Unsure,
    Value,
    Wrong,
    form_of,
    nbytes,
    whole,
)
from fcoll.scheduling.value_parts import Wholes
from fcoll.scheduling.value_terms import Piece, Pieces, Terms, joined, replaced, taken
from fcoll.table.exchange import ALL_TO_ALL_SINGLE
from fcoll.table.gather import ALL_GATHER_INTO_TENSOR, BROADCAST
from fcoll.table.reduce import ALL_REDUCE, REDUCE_SCATTER_TENSOR
from fcoll.table.row import Collective


@dataclass(frozen=True)
class Scalar:
    """A value that is no tensor: a number, a group, a graph."""

    term: int


@dataclass
class Event:
    """A collective that is issued, or a call that may communicate. ``cover`` are the pieces by
    which the same collective, or a bucket with it, is known in another graph."""

    node: Node
    cover: Pieces
    group: str
    effect: str
    is_start: bool


@dataclass
class GraphValues:
    """What a graph does."""

    results: list[tuple[str, int]]  # what it is ("result 2") and its term
    written: dict[str, int]  # by the input: what it has at the end, if it was written to
    events: list[Event]
    made_by: dict[int, str]  # the name of the first node that has a term
    made_of: dict[int, str]  # ... of the first that issues a collective's pieces
    count: int  # of the terms by then
    shared: set[tuple[str, str]]  # results that lie in the same memory
    term_of: Callable[[str], int | None]  # what the node of a tensor has at the end


def read(nodes: Iterable[Node], terms: Terms, wholes: Wholes | None = None) -> GraphValues:
    """Nodes in the order in which they run. ``wholes`` are the calls of the graph that this one is
    compared with: what is done in parts here is taken for parts of what they give. Raises Wrong
    where memory is used that is in flight, or a value before it is made, Unsure where it cannot be
    told."""
    return _ValueWalk(nodes, terms, wholes).run()


class _ValueWalk:
    def __init__(self, nodes: Iterable[Node], terms: Terms, wholes: Wholes | None) -> None:
        self.nodes, self.terms, self.wholes = list(nodes), terms, wholes
        self.env: dict[Node, Any] = {}
        self.events: list[Event] = []
        self.made_by: dict[int, str] = {}
        self.made_of: dict[int, str] = {}
        self.inputs: dict[str, Value] = {}
        self.traced: dict[int, Value] = {}  # inputs, by the storage that they were traced with
        self.sent_by: dict[Node, list[Storage]] = {}
        self.uninitialized = terms.of("uninitialized")
        self.copied: dict[int, Node] = {}  # storages of which there may, or may not, be a copy
        # Graphs that were traced apart may have other names for a group: its ranks tell.
        self.groups = {
            arguments(node).get("group_name"): f"{list(group.ranks)}, {instance}"
            for node in self.nodes
            if row_of_node(node) is not None and "group" in node.meta
            for group, instance in [node.meta["group"]]
        }
        self.places = self.draws = self.barriers = 0

    def run(self) -> GraphValues:
        results: list[tuple[str, int]] = []
        given: list[tuple[str, Any]] = []
        last: Any = None
        for last in self.nodes:
            for needed in last.all_input_nodes:
                if needed not in self.env:
                    text = f"{last.name} comes before {needed.name}, which it takes"
                    raise Wrong(text, last, needed)
            if last.op == "output":
                given = [(f"result {i}", x) for i, x in enumerate(_leaves(last.args))]
                results = [(name, self.key(x, last)) for name, x in given]
            else:
                self.env[last] = self.visit(last)
        written = {
            name: self.whole(value, last)
            for name, value in self.inputs.items()
            if value.storage.is_written
        }
        by_name = {node.name: value for node, value in self.env.items()}

        def term_of(name: str) -> int | None:
            value = by_name.get(name)
            return self.whole(value, last) if isinstance(value, Value) else None

        shared = _shared((name, self.env[x]) for name, x in given if isinstance(x, Node))
        made, count = (self.made_by, self.made_of), len(self.terms.keys)
        return GraphValues(results, written, self.events, *made, count, shared, term_of)

    # -- values ---

    def pieces(self, value: Value, node: Node) -> Pieces:
        """What a value has now."""
        if value.storage.fills is not None:
            start = value.storage.fills
            raise Wrong(f"{node.name} uses the result of {start.name} before its wait", node, start)
        content = value.storage.content
        if value.seen_by is not None:
            base, head, form = value.seen_by
            key = ("call", *head, (self.whole(base, node),))
            content = self.terms.given(self.term(key, form), nbytes(*form))
        if len(content) == 1 and value.ranges == ((0, content[0].size),):
            return content
        return joined(Piece(*p) for p in taken(content, value.ranges))

    def term(self, key: tuple[Any, ...], form: Any, op: Any = None) -> int:
        """Of a call; a new one may give a part of what a call of the other graph does."""
        if self.wholes is not None and key not in self.terms.number:
            parts = self.wholes.part(key, (form[0], form[1][0]), op)
            if parts is not None:
                self.terms.parts[self.terms.of(*key)] = parts
        return self.terms.of(*key, form=(form[0], form[1][0]))

    def whole(self, value: Value, node: Node) -> int:
        return self.terms.value(self.pieces(value, node), value.form)

    def key(self, x: Any, node: Node) -> Any:
        """An argument as a part of a term's key."""
        if isinstance(x, Node):
            return self.key(self.env[x], node)
        if isinstance(x, Value):
            return self.whole(x, node)
        if isinstance(x, Scalar):
            return x.term
        if isinstance(x, (list, tuple)):
            return tuple(self.key(y, node) for y in x)
        if isinstance(x, dict):
            return tuple(sorted((k, self.key(y, node)) for k, y in x.items()))
        if isinstance(x, slice):
            return ("slice", *(self.key(y, node) for y in (x.start, x.stop, x.step)))
        return type(x).__name__, repr(x)

    def made(self, node: Node, term: int, val: Any) -> Value:
        """A new tensor that is all of a term."""
        shape, dtype = form_of(val)
        self.terms.forms[term] = self.terms.forms[term] or (shape, dtype[0])
        self.made_by.setdefault(term, node.name)
        return whole(self.terms.given(term, nbytes(shape, dtype)), shape, dtype)

    def write(self, value: Value, pieces: Pieces, node: Node) -> None:
        storage = value.storage
        if storage.fills is not None or storage.sends:
            start = storage.fills or storage.sends[0]
            what = "gives" if storage.fills is not None else "sends"
            text = f"{node.name} writes to what {start.name} {what}, which is in flight"
            raise Wrong(text, node, start)
        if (copy := self.copied.get(id(storage))) is not None:
            raise Unsure(f"{node.name} writes to what {copy.name} may have copied, or not")
        storage.is_written = True
        if value.seen_by is None and sum(p.size for p in pieces) == value.size:
            storage.content = replaced(storage.content, value.ranges, pieces)
            return
        # through a view whose places are not worked out: all of the storage is something new
        old = self.terms.of("value", None, storage.content)
        term = self.terms.of("written into", self.view_of(value), value.ranges, old, pieces)
        self.made_by.setdefault(term, node.name)
        storage.content = (Piece(term, 0, sum(p.size for p in storage.content)),)

    def view_of(self, value: Value) -> Any:
        if value.seen_by is None:
            return value.ranges
        base, head, _ = value.seen_by
        return self.view_of(base), head

    # -- nodes ---

    def visit(self, node: Node) -> Any:
        if node.op == "placeholder":
            self.places += 1
            return self.input(node, ("input", self.places))
        if node.op == "get_attr":
            return self.input(node, ("attribute", str(node.target)))
        row = row_of_node(node)
        if row is not None and row.is_wait:
            return self.wait(node)
        effect = effect_of(node)
        if row is not None and not effect:
            return self.start(node, row)
        if effect in ("barrier", "ordered"):
            return self.barrier(node, effect, row is not None)
        if node.target is operator.getitem:
            return self.item(node)
        name = _torch.op_text(node.target)
        if self.wholes is not None and name in OF_ROWS and (found := self.of_rows(node)):
            return found
        move = MOVES.get(name)
        found = move(self, node) if move is not None else None
        return self.call(node, effect) if found is None else found

    def of_rows(self, node: Node) -> Any:
        """What cuts or joins rows is a call where there are too many: so are parts of it then."""
        assert self.wholes is not None
        made = self.call(node, "")
        first = made[0] if isinstance(made, list) else made
        known = first.storage.fills is None and self.pieces(first, node)
        return made if known and all(p.term < self.wholes.count for p in known) else None

    def input(self, node: Node, key: tuple[Any, ...]) -> Any:
        """By its position or its name."""
        val, term = node.meta.get("val"), self.terms.of(*key)
        self.made_by.setdefault(term, node.name)
        if val is not None and not isinstance(val, Tensor):
            return Scalar(term)
        place = None if val is None else val.untyped_storage()._cdata
        shared = self.traced.get(place) if place is not None else None
        value = self.made(node, term, val)
        if shared is not None:  # an input is a view of another
            value = self.seen_as(shared, ("input", term), val)
        elif place is not None:
            self.traced[place] = value
        self.inputs["{} {}".format(*key)] = value
        return value

    def wait(self, node: Node) -> Any:
        given = self.env[node.args[0]]  # type: ignore[index]
        for value in given if isinstance(given, list) else [given]:
            start = value.storage.fills
            value.storage.fills = None
            for sent in self.sent_by.pop(start, ()) if start is not None else ():
                sent.sends.remove(start)
        return given

    def item(self, node: Node) -> Any:
        of, i = self.env[node.args[0]], node.args[1]  # type: ignore[index]
        if isinstance(of, list) and isinstance(i, int):
            if not -len(of) <= i < len(of):
                raise Wrong(f"{node.name} is element {i} of {len(of)}", node)
            return of[i]
        if isinstance(of, Scalar):
            return Scalar(self.terms.of("call", "getitem", of.term, repr(i)))
        if isinstance(of, Value):
            return self.seen_as(of, ("getitem", repr(i)), node.meta.get("val"))
        return self.call(node, "")

    def seen_as(self, of: Value, head: tuple[Any, ...], val: Any) -> Value:
        """A view by places that are not worked out."""
        shape, dtype = form_of(val)
        form = (shape, dtype)
        return Value(of.storage, shape, dtype, ((0, nbytes(*form)),), (of, head, form))

    def call(self, node: Node, effect: str) -> Any:
        """A call of which nothing is known but what it takes."""
        drawn: tuple[Any, ...] = ()
        if effect == "random":
            self.draws += 1
            drawn = ("draw", str(self.draws))
        outs = _written(node)
        given = {k: v for k, v in node.kwargs.items() if k != "out"}
        head = (_name(node), *drawn)
        if not outs and (of := self.aliased(node)) is not None:
            rest = self.key([x for x in node.args if x is not of], node)
            return self.views(node, self.env[of], (*head, rest, self.key(given, node)))
        key = ("call", *head, self.key(node.args, node), self.key(given, node))
        val = node.meta.get("val")
        term = self.term(key, form_of(val), node.target) if self.wholes else self.terms.of(*key)
        made = self.results(node, term, outs)
        if _torch.op_text(node.target) in MAY_COPY:
            both = [made, self.env.get(node.args[0])]  # type: ignore[arg-type]
            self.copied |= {id(x.storage): node for x in both if isinstance(x, Value)}
        return made

    def views(self, node: Node, of: Value, head: tuple[Any, ...]) -> Any:
        val = node.meta.get("val")
        if isinstance(val, (list, tuple)):
            return [self.seen_as(of, (*head, str(i)), x) for i, x in enumerate(val)]
        return self.seen_as(of, head, val)

    def results(self, node: Node, term: int, outs: Sequence[tuple[str, Any]]) -> Any:
        """What a call gives, with what it writes written."""
        val = node.meta.get("val")
        targets: list[Value] = []
        has_schema = getattr(node.target, "_schema", None) is not None
        returned = has_schema and _torch.op_returns_written(node.target)
        for name, out in outs:
            for i, x in enumerate(_leaves(out)):
                value = self.env[x] if isinstance(x, Node) else None
                if isinstance(value, Value):
                    if returned and len(outs) == 1 and not isinstance(out, (list, tuple)):
                        part = term  # it gives nothing else
                        self.terms.forms[term] = self.terms.forms[term] or value.form
                    else:
                        part = self.terms.of("written", term, name, i, form=value.form)
                    self.made_by.setdefault(part, node.name)
                    self.write(value, self.terms.given(part, value.size), node)
                    targets.append(value)
        if targets and returned:
            several = isinstance(val, (list, tuple)) or len(targets) > 1
            return targets if several else targets[0]
        self.made_by.setdefault(term, node.name)
        if isinstance(val, (list, tuple)):
            parts = [self.terms.of("item", term, i) for i in range(len(val))]
            return [
                self.made(node, part, x) if isinstance(x, Tensor) else Scalar(part)
                for part, x in zip(parts, val, strict=True)
            ]
        if val is not None and not isinstance(val, Tensor):
            return Scalar(term)
        return self.made(node, term, val)

    def aliased(self, node: Node) -> Node | None:
        """The argument whose memory an op's result is."""
        if not _torch.op_is_view(node.target) or _torch.op_text(node.target) in MAY_COPY:
            return None
        first = node.args[0] if node.args else None
        found = self.env.get(first) if isinstance(first, Node) else None
        return first if isinstance(found, Value) else None  # type: ignore[return-value]

    def barrier(self, node: Node, effect: str, is_start: bool) -> Any:
        """A call that keeps its place; one without a schema may write to all that it takes."""
        self.barriers += 1
        args = self.key(node.args, node), self.key(node.kwargs, node)
        term = self.terms.of("call", _name(node), "barrier", str(self.barriers), *args)
        self.made_by.setdefault(term, node.name)
        self.events.append(Event(node, (Piece(term, 0, 1),), "", effect, is_start))
        self.made_of.setdefault(term, node.name)
        outs = _written(node)
        if getattr(node.target, "_schema", None) is None:
            outs = [(str(i), x) for i, x in enumerate(node.all_input_nodes)]
        results = self.results(node, term, outs)
        if is_start:  # a message is under way until its wait, too
            sent = [self.env[x] for x in node.all_input_nodes]
            self.under_way(node, _leaves(results), [x for x in sent if isinstance(x, Value)])
        return results

    # -- collectives ---

    def start(self, node: Node, row: Collective) -> Any:
        given = arguments(node)
        group = given.get("group_name")
        key = self.groups.get(group, group) if isinstance(group, str) else self.key(group, node)
        first = row.arguments[0].name
        sent = _leaves(given[first])
        values = [self.env[x] for x in sent]
        rest = {k: v for k, v in given.items() if k not in (first, "out", "group_name")}
        cover: list[Piece] = []
        made: list[Pieces] = []
        for value in values:
            pieces, known_by = self.message(node, row, value, rest, str(key))
            made.append(pieces)
            cover += known_by
        for piece in (*cover, *(piece for pieces in made for piece in pieces)):
            self.made_of.setdefault(piece.term, node.name)
        self.events.append(Event(node, joined(cover), str(key), "", True))
        targets = self.received(node, row, given, values, made)
        self.under_way(node, targets, values)
        return targets if row.on_lists else targets[0]

    def under_way(self, node: Node, targets: Sequence[Any], sent: Sequence[Value]) -> None:
        for value in targets:
            if isinstance(value, Value):
                value.storage.fills = node
        self.sent_by[node] = [v.storage for v in sent if v.storage.fills is None]
        for storage in self.sent_by[node]:
            storage.sends.append(node)

    def received(
        self, node: Node, row: Collective, given: Any, values: list[Value], made: list[Pieces]
    ) -> list[Value]:
        """The tensors that a collective fills from now on."""
        val = node.meta.get("val")
        vals = list(val) if isinstance(val, (list, tuple)) else [val] * len(made)
        if row.mutates:
            targets = values if not row.has_out else [self.env[x] for x in _leaves(given["out"])]
            for value, sent, pieces in zip(targets, values, made, strict=True):
                _check_place(node, sent, value)
                self.write(value, pieces, node)
        else:
            targets = [whole(p, *form_of(x)) for p, x in zip(made, vals, strict=True)]
        return targets

    def message(
        self, node: Node, row: Collective, value: Value, rest: dict[str, Any], group: str
    ) -> tuple[Pieces, Pieces]:
        """What a collective makes of one tensor; and what it is known by."""
        mine = self.pieces(value, node)
        name = (row.single or row.message).removesuffix("_coalesced")
        n = rest.get("group_size")
        dims = _leaves([rest.get("dim"), rest.get("dims")])
        plain = value.shape is not None and not any(dims) and not rest.get("sizes")
        plain = plain and rest.get("factor") is None
        grad = rest.get("grad", "sum")
        if plain and name == ALL_GATHER_INTO_TENSOR.name and isinstance(n, int):
            parts = [self.terms.each((name, group, r), mine) for r in range(n)]
            return joined(p for part in parts for p in part), parts[0]
        if plain and name == ALL_REDUCE.name:
            how: tuple[Any, ...] = (name, group, rest.get("reduce_op"), grad, value.dtype)
            return (made := joined(self.terms.each(how, mine))), made
        if plain and name == REDUCE_SCATTER_TENSOR.name and isinstance(n, int):
            parts = self.cut_into(mine, n, value.size // n)
            head = (name, group, rest.get("reduce_op"), value.dtype)
            return (made := self.terms.combined(head, parts)), made
        if plain and name == BROADCAST.name:
            made = joined(self.terms.each((name, group, rest.get("src")), mine))
            return made, made
        if plain and name == ALL_TO_ALL_SINGLE.name and (n := _even_parts(rest, value)):
            sent = self.terms.combined(("sent",), self.cut_into(mine, n, value.size // n))
            parts = [self.terms.each((name, group, str(r)), sent) for r in range(n)]
            return joined(p for part in parts for p in part), parts[0]
        args = self.key(rest, node), self.terms.value(mine, value.form)
        val = node.meta.get("val")
        shape, dtype = form_of(val[0] if isinstance(val, (list, tuple)) and val else val)
        term = self.terms.of("call", name, group, *args, form=(shape, dtype[0]))
        self.made_by.setdefault(term, node.name)
        made = (Piece(term, 0, nbytes(shape, dtype)),)
        return made, made

    def cut_into(self, pieces: Pieces, n: int, size: int) -> list[Pieces]:
        return [tuple(Piece(*p) for p in taken(pieces, [(r * size, size)])) for r in range(n)]


# -- what is known of nodes ---


def _shared(results: Iterable[tuple[str, Any]]) -> set[tuple[str, str]]:
    """The pairs of results that may overlap."""
    spans = [
        (id(value.storage), begin, begin + size, name)
        for name, value in results
        if isinstance(value, Value)
        for begin, size in (value.ranges if value.seen_by is None else _ANYWHERE)
        if size
    ]
    found: set[tuple[str, str]] = set()
    under: list[tuple[int, float, float, str]] = []  # those that the next one may begin in
    for storage, begin, end, name in sorted(spans):
        under = [x for x in under if x[0] == storage and x[2] > begin]
        found |= {(min(x[3], name), max(x[3], name)) for x in under if x[3] != name}
        under.append((storage, begin, end, name))
    return found


_ANYWHERE = ((0, float("inf")),)  # of a view whose places are not worked out


def _check_place(node: Node, sent: Value, out: Value) -> None:
    """What is sent out of the result itself must be a rank's part of it, as backends have it."""
    if sent.storage is not out.storage or sent.ranges == out.ranges or sent.seen_by is not None:
        return
    places = [begin - out.ranges[0][0] for begin, _ in sent.ranges]
    if len(sent.ranges) > 1 or len(out.ranges) > 1 or places[0] % max(sent.size, 1):
        raise Wrong(f"{node.name} sends what is no rank's part of its result", node)


def _even_parts(given: dict[str, Any], value: Value) -> int:
    """Into how many equal parts an exchange cuts what it sends and what it gets; 0: not equal."""
    sizes = [list(given.get(name) or ()) for name in SPLITS]
    n = len(sizes[0])
    rows = value.shape[0] if value.shape else 0
    return n if n and all(s * n == rows for s in sizes[0]) and sizes[0] == sizes[1] else 0


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [x for part in value for x in _leaves(part)]
    return [] if value is None else [value]


def _name(node: Node) -> str:
    """Of the call; writing in place is another way to give the same value."""
    return f"{node.op} {_torch.op_text(node.target)}"


def _written(node: Node) -> list[tuple[str, Any]]:
    places = _torch.op_writes(node.target)
    found = [(n, node.args[i] if i < len(node.args) else node.kwargs.get(n)) for i, n in places]
    return [(name, value) for name, value in found if value is not None]
