"""The collectives of an fx graph: which nodes start one, which wait, with which arguments."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from fcoll.graph import _torch
from fcoll.source import show, user_frames
from fcoll.table.collectives import row_of
from fcoll.table.row import Collective


def row_of_node(node: Any) -> Collective | None:
    """The row of a node that calls a collective or a wait, None of any other."""
    is_call = isinstance(node, Node) and node.op == "call_function"
    return row_of(_op_name(node.target)) if is_call else None


_names: dict[int, tuple[Any, str]] = {}  # by id: to hash an op takes as long as to name it


def _op_name(target: Any) -> str:
    """Kept, since torch puts names together anew: 10,000 nodes are asked for theirs many times."""
    known = _names.get(id(target))
    if known is None or known[0] is not target:
        known = _names[id(target)] = (target, _torch.op_name(target))
    return known[1]


def is_start(node: Any) -> bool:
    """Does the node issue a collective?"""
    row = row_of_node(node)
    return row is not None and not row.is_wait


def is_wait(node: Any) -> bool:
    row = row_of_node(node)
    return row is not None and row.is_wait


def collectives(graph: Graph) -> Iterator[tuple[Node, Collective]]:
    """The nodes that start a collective, with their rows. The graph may be changed meanwhile."""
    for node in list(graph.nodes):
        row = row_of_node(node)
        if row is not None and not row.is_wait:
            yield node, row


def start_of(wait: Node) -> Node | None:
    """The collective that a wait is for, through the elements of a list; None if it is outside."""
    node = wait.args[0]
    while isinstance(node, Node) and (node.target is getitem or is_wait(node)):
        node = node.args[0]
    return node if isinstance(node, Node) and is_start(node) else None


def waits_of(start: Node) -> list[Node]:
    """The waits for a collective's results, through the elements of a list."""
    found = []
    for user in start.users:
        if is_wait(user):
            found.append(user)
        elif user.target is getitem:
            found.extend(waits_of(user))
    return found


def is_used(start: Node) -> bool:
    """Does anything but waits, and parts of lists, take the result?"""
    users = list(start.users)
    while users:
        user = users.pop()
        if not is_wait(user) and user.target is not getitem:
            return True
        users.extend(user.users)
    return False


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in."""
    return _torch.call_arguments(node.target, node.args, node.kwargs)


def has_named_group(node: Node) -> bool:
    """Is a collective's group a name? A graph for all ranks gets the group as a value, because its
    name differs between them (``torch.distributed.config.compile_on_one_rank``)."""
    return isinstance(arguments(node).get("group_name", ""), str)


def line_of(node: Node) -> str:
    """ "model.py:31": the user's line that led to a node; empty if none is known."""
    frames = user_frames(node.meta.get("stack_trace"))
    return show(frames[-1]) if frames else ""


def describe(node: Node) -> str:
    """A collective in a line of a log."""
    row, val = row_of_node(node), node.meta.get("val")
    shape = f" {list(val.shape)} {val.dtype}" if isinstance(val, Tensor) else ""
    where = line_of(node)
    return f"{node.name} = {row.name if row else node.target}{shape}" + (where and f" at {where}")
