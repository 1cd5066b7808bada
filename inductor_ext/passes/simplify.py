"""``simplify``: leave out the collectives and waits that are known to change nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from fcoll.eager.ops import op_of
from fcoll.graph.nodes import (
    arguments,
    collectives,
    describe,
    is_wait,
    row_of_node,
    start_of,
)
from fcoll.groups import by_name
from fcoll.table.gather import ALL_GATHER_INTO_TENSOR
from fcoll.table.reduce import ALL_REDUCE, REDUCE_SCATTER_TENSOR
from fcoll.table.row import Collective
from inductor_ext._torch import is_pure
from inductor_ext.choice import Choice, calls_of, facts_without_choice, set_choice, why_torchs
from inductor_ext.config import config
from inductor_ext.lower import one_shot

aten = torch.ops.aten


def simplify(graph: Graph) -> list[str]:
    """Leave out what is known to change nothing; without a schedule all of the program's calls
    stay, since other ranks may have other uses for theirs."""
    if config.schedule is None:
        return [*_waits_twice(graph)]
    return [*_waits_twice(graph), *_of_replicated(graph), *_scatter_then_gather(graph)]


def substitute(node: Node, by: Node) -> None:
    """Use one value wherever another one was, and remove the node of that."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _waits_twice(graph: Graph) -> Iterable[str]:
    """Whatever uses a result after its first wait uses what that gives: a second wait, which is
    left out, or the graph's own results. From torch 2.15 on, a result that the backward pass needs
    has a wait there too, and is returned as it was started, although the forward pass waits."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not is_wait(node) or row_of_node(node.args[0]) is None:
            continue
        value = node.args[0]
        if is_wait(value):
            yield f"{node.name}: waited for already"
            substitute(node, value)
            continue
        for user in list(value.users):
            if place[user] > place[node]:
                user.replace_input_with(value, node)


# -- collectives of values that all ranks have ---


def _of_replicated(graph: Graph) -> Iterable[str]:
    """A min, max or mean over equal values is that value; a gather of them is copies of it."""
    replicated_on: dict[Node, set[str]] = {}  # groups whose ranks all hold this value
    for node in list(graph.nodes):
        row = row_of_node(node)
        if row is None or row.is_wait or why_torchs(node):
            replicated_on[node] = _replicated(node, replicated_on)
            continue
        args = arguments(node)
        group = args.get("group_name") or ""
        # What is written in place may be written again, by this rank alone.
        replicated_on[node] = {group} if row.replicates and not row.mutates else set()
        waits = [user for user in node.users if is_wait(user)]
        if group not in replicated_on.get(args.get("input"), ()) or len(waits) != len(node.users):
            continue
        same = _computed_locally(graph, node, row, args)
        if same is not None:
            yield f"{describe(node)}: all ranks of {group} have the same"
            replicated_on[same] = {group}
            for wait in waits:
                substitute(wait, same)
            graph.erase_node(node)


# Besides tensors their arguments are of shape and dtype. Any other number may be a rank's own.
_KEEP_EQUAL = (
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.clone.default,
    torch.ops.prims.convert_element_type.default,
)


def _replicated(node: Node, replicated_on: dict[Node, set[str]]) -> set[str]:
    """The groups on which a node that is no collective gives the same value to all ranks."""
    values = node.all_input_nodes
    only_values = len(values) == len(node.args) and not node.kwargs
    pure = is_wait(node) or (only_values and is_pure(node.target)) or node.target in _KEEP_EQUAL
    if not pure or not values:
        return set()
    return set.intersection(*(replicated_on.get(x, set()) for x in values))


def _computed_locally(
    graph: Graph, node: Node, row: Collective, args: dict[str, Any]
) -> Node | None:
    """The result of a collective of equal values, without the collective."""
    x = args["input"]
    if row is ALL_REDUCE and args["reduce_op"] in ("min", "max", "avg"):
        return x
    plain = row is ALL_GATHER_INTO_TENSOR and args["sizes"] is None and x.meta["val"].dim()
    if not plain:
        return None
    repeats = [1] * x.meta["val"].dim()
    repeats[args["dim"]] = args["group_size"]
    with graph.inserting_before(node):
        repeated = graph.call_function(aten.repeat.default, (x, repeats))
    repeated.meta.update(val=node.meta["val"])
    return repeated


# -- a reduce-scatter that is gathered again ---


def _scatter_then_gather(graph: Graph) -> Iterable[str]:
    """A reduce-scatter whose result is only gathered again is an all-reduce, which takes one
    meeting of the ranks instead of two; from the limit of one-shot on, it is the same work."""
    for gather, row in collectives(graph):
        scatter = _gathered_scatter(gather) if row is ALL_GATHER_INTO_TENSOR else None
        if scatter is None:
            continue
        yield f"{describe(scatter)} and {gather.name}: one all_reduce"
        wait, args = gather.args[0], arguments(scatter)
        with graph.inserting_before(gather):
            call = (args["input"], args["reduce_op"], args["group_name"])
            reduced = graph.call_function(op_of(ALL_REDUCE), call)
        reduced.meta.update(facts_without_choice(gather))  # that is of another op
        set_choice(reduced, Choice(calls=(*calls_of(scatter), *calls_of(gather))))
        substitute(gather, reduced)
        graph.erase_node(wait)
        graph.erase_node(scatter)


def _gathered_scatter(gather: Node) -> Node | None:
    """The reduce-scatter whose result is gathered and used for nothing else; None otherwise."""
    wait: Any = gather.args[0]
    scatter = start_of(wait) if is_wait(wait) else None
    if scatter is None or row_of_node(scatter) is not REDUCE_SCATTER_TENSOR:
        return None
    if why_torchs(scatter) or why_torchs(gather):
        return None
    a, b = arguments(scatter), arguments(gather)
    same = all(a[key] == b[key] for key in ("group_name", "dim", "sizes", "group_size"))
    if not same or len(wait.users) != 1 or len(scatter.users) != 1:
        return None
    whole = {"input": a["input"], "reduce_op": a["reduce_op"]}
    why = one_shot.why_not(ALL_REDUCE, whole, by_name(a["group_name"]), config)
    return None if why else scatter
