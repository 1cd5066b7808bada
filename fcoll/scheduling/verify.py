"""Is a plan right? Asked of every plan, by code that shares nothing with the schedulers.

Of a graph: every node comes behind those it takes, and sees the same *version* of each storage as
it did before. A write makes a new version, and so does a wait, which turns a result that is under
way into one that is there. So a read that moved past a write, a use that moved before a wait and a
write to what is still being sent are all one mistake: another version.

Of steps: each is there once and behind its inputs, effects are in order, and the memory held, by
the first and the last use of each buffer, is what the plan says and under the cap.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node

from fcoll.graph.effects import effect_of
from fcoll.graph.nodes import row_of_node
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
    _check_effects([(s.name, s.effect, s.kind == "start") for s in before], position, fail)


def _check_effects(
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
    found = _peak(steps, held_bytes)
    if found > peak_bytes:
        fail(f"it holds {show_bytes(found)}, more than the {show_bytes(peak_bytes)} it speaks of")
    if peak_bytes > cap:
        fail(f"it holds {show_bytes(peak_bytes)}, the cap is {show_bytes(int(cap))}")


def _peak(steps: Sequence[Step], held_bytes: int) -> int:
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


def check_nodes(graph_module: GraphModule, order: Sequence[str], fail: Fail) -> None:
    """Every node of the graph once, behind what it takes, and with the values that it had."""
    nodes = list(graph_module.graph.nodes)
    by_name = {node.name: node for node in nodes}
    if sorted(by_name) != sorted(order):
        wrong = set(by_name) ^ set(order)
        fail(f"the nodes are not those of the graph: {min(wrong, default='one is there twice')}")
    planned = [by_name[name] for name in order]
    done: set[Node] = set()
    for node in planned:
        for needed in node.all_input_nodes:
            if needed not in done:
                fail(f"{node.name} comes before {needed.name}, which it takes")
        done.add(node)
    roots = _storages(nodes)
    if _versions(nodes, roots) != (seen := _versions(planned, roots)):
        _name_the_first(_versions(nodes, roots), seen, fail)
    position = {name: i for i, name in enumerate(n for n in order if _has_effect(by_name[n]))}
    effects = [(n.name, effect_of(n), _starts(n)) for n in nodes if _has_effect(n)]
    _check_effects([e for e in effects if e[1] != "barrier"], position, fail)


def _has_effect(node: Node) -> bool:
    return bool(effect_of(node)) or _starts(node)


def _starts(node: Node) -> bool:
    row = row_of_node(node)
    return row is not None and not row.is_wait


def _name_the_first(before: dict[Any, int], after: dict[Any, int], fail: Fail) -> NoReturn:
    for key, version in before.items():
        if after.get(key) != version:
            node, root = key
            when = "before a write or a wait" if after.get(key, 0) < version else "after a write"
            fail(f"{node.name} uses {root.name} {when} that it came {_OTHER[when]}")
    fail("a node uses a storage that it did not use")


_OTHER = {"before a write or a wait": "after", "after a write": "before"}


def _storages(nodes: Sequence[Node]) -> dict[Node, frozenset[Node]]:
    """The nodes whose memory a node's value lies in."""
    found: dict[Node, frozenset[Node]] = {}
    for node in nodes:
        shared = [x for x in _shared(node) if x in found]
        found[node] = _all(found[x] for x in shared) if shared else frozenset({node})
    return found


def _shared(node: Node) -> Iterator[Node]:
    """The arguments whose memory the result is."""
    row = row_of_node(node)
    if node.target is operator.getitem or (row is not None and row.is_wait):
        yield from node.all_input_nodes
    elif node.op == "call_function":
        for i, name in _facts(node.target)[0]:
            yield from _nodes_in(_argument(node, i, name))


def _versions(order: Sequence[Node], roots: dict[Node, frozenset[Node]]) -> dict[Any, int]:
    """(node, storage) -> how often the storage had been written to when the node used it."""
    version: dict[Node, int] = {}
    sent: dict[Node, frozenset[Node]] = {}  # what a collective under way reads, by its result
    seen: dict[Any, int] = {}
    for node in order:
        uses, writes = _uses(node, roots)
        row = row_of_node(node)
        if row is not None and row.is_wait:
            writes = uses
            uses = uses.union(*(sent[r] for r in writes if r in sent))
        elif row is not None:
            sent.update((r, uses) for r in roots[node])
        for root in uses:
            seen[node, root] = version.get(root, 0)
        for root in writes:
            version[root] = version.get(root, 0) + 1
    return seen


def _uses(
    node: Node, roots: dict[Node, frozenset[Node]]
) -> tuple[frozenset[Node], frozenset[Node]]:
    """The storages that a node reads or writes, and of them those it writes. A view uses none."""
    if node.op != "call_function" or node.target is operator.getitem:
        return frozenset(), frozenset()
    _, written, is_view = _facts(node.target)
    if is_view:
        return frozenset(), frozenset()
    uses = _all(roots[x] for x in node.all_input_nodes)
    targets = [x for i, name in written for x in _nodes_in(_argument(node, i, name))]
    return uses, _all(roots[x] for x in targets)


def _all(sets: Iterable[frozenset[Node]]) -> frozenset[Node]:
    return frozenset().union(*sets)


Places = tuple[tuple[int, str], ...]

#: These have a view's schema but may copy: it matters when they run.
_MAY_COPY = ("aten::reshape", "aten::contiguous", "aten::to", "aten::flatten")


@functools.cache
def _facts(op: Any) -> tuple[Places, Places, bool]:
    """Of an op: the arguments that its result shares memory with, those it writes to, and whether
    it is a view."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return (), (), False
    named = list(enumerate(schema.arguments))
    aliased = [r.alias_info for r in schema.returns if r.alias_info]
    sets = set().union(*(a.before_set | a.after_set for a in aliased)) if aliased else set()
    shared = tuple(
        (i, a.name) for i, a in named if a.alias_info and (a.alias_info.before_set & sets)
    )
    if op is torch.ops.aten._unsafe_view.default:
        shared = ((0, "self"),)
    written = tuple((i, a.name) for i, a in named if a.alias_info and a.alias_info.is_write)
    is_view = bool(shared) and not written and schema.name not in _MAY_COPY
    return shared, written, is_view


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _nodes_in(value: Any) -> list[Node]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in values if isinstance(x, Node)]
