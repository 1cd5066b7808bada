"""Is a plan right? Asked of every plan, by code that shares nothing with the schedulers.

Of a graph: every node comes behind those it takes, and sees the same *version* of each storage as
it did before. A write makes a new version, and so does a wait, which turns a result that is under
way into one that is there. So a read that moved past a write, a use that moved before a wait and a
write to what is still being sent are all one mistake: another version.

Of steps: each is there once and behind its inputs, effects are in order, and the memory held, by
the first and the last use of each buffer, is what the plan says and under the cap.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch.fx import GraphModule, Node

from fcoll.graph.nodes import effect_of, row_of_node
from fcoll.graph.steps import Step
from fcoll.units import show_bytes

Fail = Callable[[str], NoReturn]


# -- steps ---


def check_steps(before: Sequence[Step], after: Sequence[Step], fail: Fail) -> None:
    """``after`` has the steps of ``before``, in an order that keeps all they depend on."""
    position = {step.name: i for i, step in enumerate(after)}
    if len(position) != len(after):
        fail(f"{len(after) - len(position)} steps are there twice")
    if missing := [step.name for step in before if step.name not in position]:
        fail(f"{missing[0]} is missing, and {len(missing) - 1} more steps")
    if len(after) != len(before):
        known = {step.name for step in before}
        fail(f"{next(s.name for s in after if s.name not in known)} is no step of the graph")
    for step in before:
        for needed in step.inputs:
            if position.get(needed, -1) >= position[step.name]:
                fail(f"{step.name} comes before {needed}, which it needs")
    check_effects([(s.name, s.effect, s.kind == "start") for s in before], position, fail)


def check_effects(
    before: Sequence[tuple[str, str, bool]], position: Mapping[str, int], fail: Fail
) -> None:
    """``before`` are (name, effect, is it a start) in the order that came in."""
    ordered = any(effect == "ordered" for _, effect, _ in before)
    chains = {
        "draws random numbers": [n for n, effect, _ in before if effect == "random"],
        "is issued": [n for n, _, start in before if start] if ordered else [],
    }
    for what, names in chains.items():
        for one, other in pairwise(names):
            if position[one] > position[other]:
                fail(f"{other} {what} before {one}")
    _check_barriers(before, position, fail)


def _check_barriers(
    before: Sequence[tuple[str, str, bool]], position: Mapping[str, int], fail: Fail
) -> None:
    """All that was before a barrier still is, and nothing else."""
    places = [position[name] for name, _, _ in before]
    latest = list(accumulate(places, max))
    for i, (name, effect, _) in enumerate(before):
        if effect == "barrier" and (latest[i] > places[i] or places[i] != i):
            fail(f"something moved past {name}, which may communicate")


def check_memory(
    steps: Sequence[Step], held_bytes: int, peak_bytes: int, cap: float, fail: Fail
) -> None:
    """The peak of an order is at most what the plan says, and that is under the cap."""
    found = peak_of(steps, held_bytes)
    if found > peak_bytes:
        fail(f"it holds {show_bytes(found)}, more than the {show_bytes(peak_bytes)} it speaks of")
    if peak_bytes > cap:
        fail(f"it holds {show_bytes(peak_bytes)}, the cap is {show_bytes(int(cap))}")


def peak_of(steps: Sequence[Step], held_bytes: int) -> int:
    """By the first and the last step that uses each buffer."""
    freed = {name for step in steps for name in step.last_use_of}
    starts = {step.collective: step for step in steps if step.kind == "start"}
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        sent = starts[step.collective].inputs if _is_wait_of(step, starts) else ()
        for name in (step.name, *(step.uses or (*step.inputs, *sent))):
            last[name] = i
    change = [0] * (len(steps) + 1)
    for i, step in enumerate(steps):
        change[i] += step.out_bytes
        if step.name in freed:
            change[last[step.name] + 1] -= step.out_bytes
    return held_bytes + max(accumulate(change))


def _is_wait_of(step: Step, starts: Mapping[Any, Step]) -> bool:
    return step.kind == "wait" and step.collective in starts


# -- graphs ---


def nodes_in(graph_module: GraphModule, order: Sequence[str], fail: Fail) -> list[Node]:
    """Every node of the graph once, in this order."""
    by_name = {node.name: node for node in graph_module.graph.nodes}
    if len(order) != len(by_name) or set(order) != by_name.keys():
        wrong = set(by_name) ^ set(order)
        fail(f"the nodes are not those of the graph: {min(wrong, default='one is there twice')}")
    return [by_name[name] for name in order]


def check_nodes(graph_module: GraphModule, order: Sequence[str], fail: Fail) -> None:
    """Every node of the graph once, behind what it takes, and with the values that it had."""
    nodes = list(graph_module.graph.nodes)
    planned = nodes_in(graph_module, order, fail)
    uses = _Uses(nodes)
    done: set[Node] = set()
    for node in planned:
        for needed in uses.inputs[node]:
            if needed not in done:
                fail(f"{node.name} comes before {needed.name}, which it takes")
        done.add(node)
    before, after = uses.versions(nodes), uses.versions(planned)
    if before != after:
        _name_the_first(before, after, fail)
    effects = [(n.name, effect_of(n), uses.op(n).starts) for n in nodes if uses.op(n).has_effect]
    known = {name for name, _, _ in effects}
    position = {name: i for i, name in enumerate(name for name in order if name in known)}
    check_effects([e for e in effects if e[1] != "barrier"], position, fail)


def _name_the_first(
    before: dict[Node, Versions], after: dict[Node, Versions], fail: Fail
) -> NoReturn:
    for node, versions in before.items():
        for root, version in versions.items():
            now = after.get(node, {}).get(root)
            if now != version:
                when = "before a write or a wait" if (now or 0) < version else "after a write"
                fail(f"{node.name} uses {root.name} {when} that it came {_OTHER[when]}")
    fail("a node uses a storage that it did not use")


_OTHER = {"before a write or a wait": "after", "after a write": "before"}
Places = tuple[tuple[int, str], ...]
Roots = frozenset[Node]
Versions = dict[Node, int]  # of a storage: how often it had been written to

#: These have a view's schema but may copy: it matters when they run.
_MAY_COPY = ("aten::reshape", "aten::contiguous", "aten::to", "aten::flatten")


class _Op(NamedTuple):
    """What a call does: the arguments whose memory its result is, those it writes to, ..."""

    shared: Places = ()
    written: Places = ()
    is_view: bool = True  # it uses no value
    waits: bool = False
    starts: bool = False
    has_effect: bool = False


class _Uses:
    """Which storages the nodes of a graph lie in, read and write."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.ops: dict[int, _Op] = {}
        self.used: dict[Node, Roots] = {}  # the storages of a node's inputs
        self.inputs = {node: node.all_input_nodes for node in nodes}
        self.roots: dict[Node, Roots] = {}  # the nodes whose memory a node's value lies in
        for node in nodes:
            shared = self.shared(node)
            self.roots[node] = self.union(shared) if shared else frozenset({node})
            self.used[node] = self.union(self.inputs[node])

    def op(self, node: Node) -> _Op:
        if node.op != "call_function":
            return _Op(has_effect=bool(effect_of(node)), is_view=node.op != "call_module")
        target = id(node.target)  # hashing an op is slow
        return self.ops.get(target) or self.ops.setdefault(target, _op(node))

    def shared(self, node: Node) -> list[Node]:
        op = self.op(node)
        found = self.inputs[node] if op.waits or node.target is operator.getitem else []
        for i, name in op.shared:
            found = [*found, *_nodes_in(_argument(node, i, name))]
        return found

    def union(self, nodes: Sequence[Node]) -> Roots:
        if len(nodes) == 1:
            return self.roots[nodes[0]]
        return frozenset().union(*[self.roots[x] for x in nodes])

    def versions(self, order: Sequence[Node]) -> dict[Node, Versions]:
        """Of each node: how often each storage had been written to when the node used it."""
        version: Versions = {}
        sent: dict[Node, Roots] = {}  # what a collective under way reads, by its result
        seen: dict[Node, Versions] = {}
        for node in order:
            op = self.op(node)
            if op.is_view:
                continue
            used = self.used[node]
            writes = used if op.waits else self.written(node, op) if op.written else ()
            if op.waits:
                used = used.union(*(sent[root] for root in used if root in sent))
            elif op.starts:
                sent.update((root, used) for root in self.roots[node])
            seen[node] = {root: version.get(root, 0) for root in used}
            for root in writes:
                version[root] = version.get(root, 0) + 1
        return seen

    def written(self, node: Node, op: _Op) -> Roots:
        return self.union([x for i, n in op.written for x in _nodes_in(_argument(node, i, n))])


def _op(node: Node) -> _Op:
    """By the op's schema and its row."""
    row = row_of_node(node)
    waits = row is not None and row.is_wait
    starts = row is not None and not row.is_wait
    has_effect = starts or bool(effect_of(node))
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        is_view = node.target is operator.getitem or not has_effect
        return _Op(is_view=is_view, has_effect=has_effect)
    named = list(enumerate(schema.arguments))
    aliased = [r.alias_info for r in schema.returns if r.alias_info]
    sets = set().union(*(a.before_set | a.after_set for a in aliased)) if aliased else set()
    shared = tuple((i, a.name) for i, a in named if a.alias_info and a.alias_info.before_set & sets)
    if node.target is torch.ops.aten._unsafe_view.default:
        shared = ((0, "self"),)
    written = tuple((i, a.name) for i, a in named if a.alias_info and a.alias_info.is_write)
    is_view = bool(shared) and not written and schema.name not in _MAY_COPY and not waits
    return _Op(shared, written, is_view, waits, starts, has_effect)


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _nodes_in(value: Any) -> list[Node]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in values if isinstance(x, Node)]
