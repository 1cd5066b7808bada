"""Is one FX graph a right reordering of another? Whoever made it.

Nodes are matched by what they compute, not by their names (value_terms.py): the results, and what
is written to the inputs, must be the same terms. Then every collective is issued once, alone or in
a bucket, and what may communicate keeps its place. On each group all ranks issue in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NoReturn

from torch.fx import Graph, GraphModule, Node

from fcoll.errors import BadOption, FcollError, GraphNotProved
from fcoll.graph.issued import collectives_of
from fcoll.graph.proof_result import ProofResult
from fcoll.graph.steps import input_bytes, steps_of
from fcoll.scheduling import verify_order
from fcoll.scheduling.value_difference import difference
from fcoll.scheduling.value_moves import Unsure, Wrong
from fcoll.scheduling.value_parts import Wholes
from fcoll.scheduling.value_terms import Terms
from fcoll.scheduling.value_walk import Event, GraphValues, read
from fcoll.units import show_bytes


@dataclass(frozen=True)
class GraphVerdict(ProofResult):
    """Is the second graph right? ``equal`` is None where it could not be told, and ``why`` says why
    not. ``bool(verdict)`` is ``equal is True``.

    ``difference`` says what is wrong, ``nodes`` are the names of the nodes that show it: of the
    second graph, or of the first where the second has none. ``reordered`` are the groups on which
    the order of issue is another: right if all their ranks run graphs of this order.
    """

    error = GraphNotProved

    difference: str = ""
    nodes: tuple[str, ...] = ()
    why: str = ""
    reordered: tuple[str, ...] = ()
    collectives: tuple[int, int] = (0, 0)  # how many are issued, before and after
    peak_bytes: tuple[int | None, int | None] = (None, None)  # before, after; None: not known
    rank: int | None = None  # whose graph it is, where each rank has its own

    def __str__(self) -> str:
        of = "" if self.rank is None else f"rank {self.rank}: "
        if self.equal is None:
            return f"could not tell: {of}{self.why}"
        if not self.equal:
            return f"wrong: {of}{self.difference}"
        before, after = self.collectives
        text = f"proved: the same values, {before} collectives issued as {after}"
        if None not in self.peak_bytes:
            peaks = [show_bytes(x) for x in self.peak_bytes if x is not None]
            text += f", peak {peaks[0]} before and {peaks[1]} after"
        if self.reordered:
            text += (
                f"\nanother order on {', '.join(self.reordered)}: right only if all ranks of it "
                "run this very order"
            )
        return text


Given = Any  # a Graph, a GraphModule, or a Trace


def verify(before: Given, after: Given, mesh: Any = None) -> GraphVerdict:
    """Prove or refute that ``after`` computes what ``before`` does, and is safe to run.

    Both are a Trace, a GraphModule or a Graph; ``after`` may be anyone's: nodes may be moved,
    collectives merged into buckets, waits merged, pure nodes left out. ``{rank: graph}`` gives each
    rank's own, as ``before`` may: then the orders in which they issue are compared, too. With
    ``mesh`` (its sizes, or a DeviceMesh) a graph is one for all its ranks, and of a dict none may
    be missing.

    >>> def step(x):
    ...     return fcoll.all_reduce(x, "sum") + x * 2
    >>> with fcoll.fake_world(dp=4):
    ...     trace = fcoll.trace(step, torch.ones(8), mode="forward")
    ...     plan = fcoll.schedule(trace, scheduler="safe")
    >>> bool(fcoll.verify(trace, plan.apply()))
    True
    """
    afters = dict(after) if isinstance(after, Mapping) else {None: after}
    missing = _ranks_of(mesh) - set(afters) if isinstance(after, Mapping) else set()
    verdicts: list[GraphVerdict] = []
    orders: dict[Any, Order] = {}
    known: dict[int, Side] = {}
    for rank, given in afters.items():
        one = _graph_of(before[rank] if isinstance(before, Mapping) else before)
        other = _graph_of(given)
        if id(one) not in known:
            known[id(one)] = Side(one.nodes)
        match, orders[rank] = compare(known[id(one)], other.nodes), {}
        if isinstance(match, Match):
            match, orders[rank] = _proved(match, one, other)
        verdicts.append(replace(match, rank=rank))
    worst = min(verdicts, key=lambda v: (v.equal is not False, v.equal is not None))
    if not worst:
        return worst
    if isinstance(after, Mapping):
        worst = _of_all_ranks(verdicts, orders)
    if worst and missing:
        why = f"the graph of rank {min(missing)} is not given, and {len(missing) - 1} more"
        return replace(worst, equal=None, why=why)
    return replace(worst, reordered=()) if mesh is not None else worst


Order = dict[str, list[tuple[int, ...]]]  # by group: which calls of the first graph, in order


class Side:
    """The first of two graphs, which is read once for all that are compared with it."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes, self.terms = nodes, Terms()

    @cached_property
    def reading(self) -> GraphValues:
        return read(self.nodes, self.terms)


def _peak_bytes(graph: Graph) -> int | None:
    """Of each step on its own, without kernels that join them."""
    module = graph.owning_module
    if module is None or module.graph is not graph:
        module = GraphModule(module or {}, graph)
    try:
        names = {node.name for node in graph.nodes}  # no step's flops are asked for
        steps = steps_of(module, collectives_of(module), fuse=False, priced=names)
        return verify_order.peak_of(steps, input_bytes(module))
    except (FcollError, AttributeError, KeyError, TypeError, ValueError):
        return None  # a graph without traced values, or with sizes that only a run knows


def _graph_of(given: Given) -> Graph:
    module = getattr(given, "graph_module", given)
    graph = module if isinstance(module, Graph) else getattr(module, "graph", None)
    if not isinstance(graph, Graph):
        known = "a fcoll.Trace with its graph, a GraphModule, a Graph, or {rank: one of these}"
        raise BadOption(op="verify", arg="graph", value=given, known=known)
    return graph


def _ranks_of(mesh: Any) -> set[Any]:
    if mesh is None:
        return set()
    size = prod(mesh.values()) if isinstance(mesh, Mapping) else mesh.size()
    return set(range(size))


# -- one graph against another ---


class _Refuted(Exception):
    pass


@dataclass(frozen=True)
class Match:
    """Two graphs that do the same: ``members`` are, of each event of the second one, those of the
    first that it is: a bucket is several, a chunk is a part of one."""

    before: GraphValues
    after: GraphValues
    members: tuple[tuple[int, ...], ...]
    wholes: Wholes


def compare(
    before: Side, after: Iterable[Node], sums: Collection[str] = ()
) -> GraphVerdict | Match:
    """Why they do not do the same, or what in them does. ``after`` are nodes in the order in which
    they run; ``sums`` are products over rows that may be added up chunk by chunk."""
    try:
        a = before.reading
    except Wrong as error:
        return GraphVerdict(None, why=f"the first graph is not sound: {error}")
    except Unsure as error:
        return GraphVerdict(None, why=str(error))
    wholes = Wholes(before.terms, a.count, a.made_by, sums)
    try:
        b = read(after, before.terms, wholes)
    except Wrong as error:
        return GraphVerdict(False, str(error), error.nodes)
    except Unsure as error:
        return GraphVerdict(None, why=str(error))
    if (verdict := _same_values(before.terms, a, b)) is not None:
        return verdict
    members = _members(a.events, b.events)
    if isinstance(members, GraphVerdict):
        return members
    for check in (_same_memory(a, b), _effects_in_order(a.events, b.events, members)):
        if check is not None:
            return check
    return Match(a, b, tuple(members), wholes)


def _proved(match: Match, before: Graph, after: Graph) -> tuple[GraphVerdict, Order]:
    a, b = match.before.events, match.after.events
    order = _orders(a, b, match.members)
    changed = [
        g
        for g, calls in order.items()
        if [i for c in calls for i in c] != sorted(i for c in calls for i in c)
    ]
    starts = [sum(e.is_start for e in side) for side in (a, b)]
    return GraphVerdict(
        True,
        reordered=tuple(changed),
        collectives=(starts[0], starts[1]),
        peak_bytes=(_peak_bytes(before), _peak_bytes(after)),
    ), order


def _same_memory(a: GraphValues, b: GraphValues) -> GraphVerdict | None:
    """None if results that had memory of their own still have."""
    for one, other in sorted(b.shared - a.shared):
        why = f"{one} and {other} share memory now: a write to one of them is seen in both"
        return GraphVerdict(None, why=why)
    return None


def _same_values(terms: Terms, a: GraphValues, b: GraphValues) -> GraphVerdict | None:
    """None if all results, and all that is written to inputs, are the same."""
    if len(a.results) != len(b.results):
        return GraphVerdict(False, f"it has {len(b.results)} results, not {len(a.results)}")
    pairs = [(name, x, y) for (name, x), (_, y) in zip(a.results, b.results, strict=True)]
    for name in dict.fromkeys([*a.written, *b.written]):
        if name not in a.written or name not in b.written:
            which, done = ("no longer", a) if name in a.written else ("now", b)
            text = f"{name} is {which} written to"
            return GraphVerdict(
                False, text, tuple(filter(None, [done.made_by.get(done.written[name])]))
            )
        pairs.append((f"what {name} has at the end", a.written[name], b.written[name]))
    unsure = None
    for name, one, two in pairs:
        if one == two:
            continue
        found = difference(terms, name, one, two, a, b)
        if found.is_sure:
            return GraphVerdict(False, found.text, found.nodes)
        unsure = unsure or GraphVerdict(None, nodes=found.nodes, why=found.text)
    return unsure


def _members(
    before: Sequence[Event], after: Sequence[Event]
) -> list[tuple[int, ...]] | GraphVerdict:
    """Of each event of the second graph, which of the first it is: a bucket is several, a chunk is
    a part of one."""
    exact: dict[Any, list[int]] = {}
    for i, event in enumerate(before):
        exact.setdefault(event.cover, []).append(i)
    sent = _Sent(before, exact)
    found: list[tuple[int, ...]] = []
    times: dict[int, float] = {}
    for event in after:
        mine = sent.whole(event) or sent.parts(event)
        if mine is None:
            text = f"{event.node.name} is no collective of the first graph, nor a bucket of them"
            return GraphVerdict(False, text, (event.node.name,))
        for i, part in mine.items():
            times[i] = times.get(i, 0.0) + part
        found.append(tuple(mine))
    for i, event in enumerate(before):
        name, often = event.node.name, times.get(i, 0.0)
        if often > 1 + 1e-9:
            nodes = [e.node.name for e, of in zip(after, found, strict=True) if i in of]
            return GraphVerdict(False, f"{name} is issued more than once", tuple(nodes))
        if often < 1 - 1e-9 and not any(times.get(j) for j in exact[event.cover]):
            return GraphVerdict(False, f"{name} is not issued", (name,))
    return found


class _Sent:
    """Which parts of the first graph's events the second one's have sent. Several events may send
    one part of a value: it is that of the first that begins with it and has sent nothing, else of
    the first that has not sent it."""

    def __init__(self, events: Sequence[Event], alike: Mapping[Any, Sequence[int]]) -> None:
        self.events, self.alike = events, alike
        self.times: Counter[tuple[int, int, int]] = Counter()  # by event, term and begin
        self.begun: set[int] = set()
        self.by_term: dict[int, list[tuple[int, int, int]]] = {}
        for i, event in enumerate(events):
            for piece in event.cover:
                end = piece.begin + piece.size
                self.by_term.setdefault(piece.term, []).append((piece.begin, end, i))

    def whole(self, event: Event) -> dict[int, float] | None:
        """The first event of which nothing has been sent, if there is one like this."""
        i = next((i for i in self.alike.get(event.cover, ()) if i not in self.begun), None)
        if i is None:
            return None
        for piece in event.cover:
            self._send(i, piece.term, piece.begin)
        return {i: 1.0}

    def parts(self, event: Event) -> dict[int, float] | None:
        """The events that an event sends, with the part that it sends of each."""
        found: dict[int, float] = {}
        begun = set(self.begun)  # by other events than this one
        for piece in event.cover:
            at, end = piece.begin, piece.begin + piece.size
            while at < end:
                owners = [
                    (
                        begin != at or stop > end or i in begun,
                        self._has_sent(i, piece.term, at),
                        i,
                        stop,
                    )
                    for begin, stop, i in self.by_term.get(piece.term, ())
                    if begin <= at < stop
                ]
                if not owners:
                    return None
                *_, i, stop = min(owners)
                stop = min(stop, end)
                self._send(i, piece.term, at)
                size = sum(p.size for p in self.events[i].cover)
                found[i] = found.get(i, 0.0) + (stop - at) / size
                at = stop
        return found

    def _send(self, i: int, term: int, at: int) -> None:
        self.times[i, term, at] += 1
        self.begun.add(i)

    def _has_sent(self, i: int, term: int, at: int) -> bool:
        pieces = (p for p in self.events[i].cover if p.term == term)
        return self.times[i, term, at] >= sum(p.begin <= at < p.begin + p.size for p in pieces)


def _effects_in_order(
    before: Sequence[Event], after: Sequence[Event], members: Sequence[tuple[int, ...]]
) -> GraphVerdict | None:
    """What may communicate keeps its place, and beside messages all collectives do."""
    order = list(dict.fromkeys(i for of in members for i in of))
    left_out = [i for i in range(len(before)) if i not in set(order)]
    kept = [i for i in range(len(before)) if i not in set(left_out)]
    position = {before[i].node.name: at for at, i in enumerate(order)}
    effects = [(before[i].node.name, before[i].effect, before[i].is_start) for i in kept]

    def fail(why: str) -> NoReturn:
        raise _Refuted(why)

    try:
        verify_order.check_effects(effects, position, fail)
    except _Refuted as error:
        names = [name for name in position if name in str(error)]
        return GraphVerdict(False, str(error), tuple(names))
    return None


def _orders(
    before: Sequence[Event], after: Sequence[Event], members: Sequence[tuple[int, ...]]
) -> Order:
    """By group: which of its calls in the first graph each call of the second one is."""
    place: dict[int, int] = {}
    counts: dict[str, int] = {}
    for i, event in enumerate(before):
        place[i] = counts[event.group] = counts.get(event.group, -1) + 1
    found: Order = {}
    for event, of in zip(after, members, strict=True):
        if event.is_start and event.group:
            found.setdefault(event.group, []).append(tuple(place[i] for i in of))
    return found


# -- all ranks ---


def _of_all_ranks(verdicts: Sequence[GraphVerdict], orders: Mapping[Any, Order]) -> GraphVerdict:
    """On each group all ranks that have it issue the same, in one order."""
    first: dict[str, Any] = {}
    for rank, order in orders.items():
        for group, calls in order.items():
            one = first.setdefault(group, rank)
            theirs = orders[one][group]
            if calls == theirs:
                continue
            pairs = zip(calls, theirs, strict=False)
            i = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(calls), len(theirs)))
            text = f"call {i} on group {group} is another one than on rank {one}"
            return GraphVerdict(False, text, rank=rank)
    return replace(verdicts[0], rank=None, reordered=())
