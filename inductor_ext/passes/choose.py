"""``choose``: the form in which each collective is lowered."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph, Node

from fcoll._torch import size_hint
from fcoll.graph._torch import flop_formula
from fcoll.graph.nodes import arguments, collectives, describe, is_wait, row_of_node
from fcoll.groups import by_name
from fcoll.table.row import Collective
from fcoll.transport import shared_memory
from inductor_ext._torch import is_view
from inductor_ext.choice import Choice, choice_of, set_choice, why_torchs
from inductor_ext.config import config
from inductor_ext.lower import one_shot
from inductor_ext.passes.simplify import substitute


def choose(graph: Graph) -> list[str]:
    """Give every collective its form. What is complete without a wait loses its waits, and what is
    left to stock Inductor gets back the op that the program called."""
    lines = []
    for node, row in collectives(graph):
        form, why = _form_of(node, row)
        choice = replace(choice_of(node) or Choice(), form=form, why=why)
        set_choice(node, choice)
        lines.append(f"{describe(node)}: {form}" + (f" ({why})" if why else ""))
        if choice.is_complete:
            for user in list(node.users):
                substitute(user, node)
        elif form == "stock" and choice.was is not None:
            node.target = choice.was
    return lines


def carrier_of(node: Node) -> str:
    """How a collective travels: "in place", "kernel" (of shared memory, complete when it returns),
    "process group", or "device" for what is not on CPUs."""
    row, val = row_of_node(node), node.meta.get("val")
    assert row is not None
    if isinstance(val, torch.Tensor) and val.device.type != "cpu":
        return "device"
    if why_torchs(node) or "group_name" not in arguments(node):
        return "process group"
    status = shared_memory.known_status(by_name(arguments(node)["group_name"]))
    if status is None or not status.shared:
        return "process group"
    return "kernel" if row.mutates or _why_kernel(node, row) else "in place"


def _form_of(node: Node, row: Collective) -> tuple[str, str]:
    """The form of a collective, and why it is not a better one."""
    if why := why_torchs(node):
        return "stock", why
    args = arguments(node)
    if row.mutates or "group_name" not in args:
        return "kernel", "it writes to its argument" if row.mutates else ""
    status = shared_memory.known_status(by_name(args["group_name"]))
    if status is None:  # not to be found out here: other ranks may have this graph in their caches
        return "kernel", "whether its group has shared memory is not known yet"
    if not status.shared:
        return "kernel" if status.islands else "stock", str(status)
    if why := _why_kernel(node, row):
        return "kernel", why
    between = _work_between(node)
    if between:
        return "split", f"{between} can be computed meanwhile"
    if config.form == "opaque" and "reduce_op" in args:
        return "opaque", 'inductor_ext.config.form = "opaque"'
    return "fused", ""


def _why_kernel(node: Node, row: Collective) -> str:
    """Why a collective on shared memory is not read in place; empty if it is."""
    if config.form == "kernel":
        return 'inductor_ext.config.form = "kernel"'
    args = arguments(node)
    why = one_shot.why_not(row, args, by_name(args["group_name"]), config)
    if not why and not all(is_wait(user) for user in node.users):
        why = "it is used before its wait"
    return why


def _work_between(start: Node) -> str:
    """The first node with work of its own between a start and its wait; empty if there is none."""
    node = start.next
    while node.op != "output":
        if is_wait(node) and node.args[0] is start:
            return ""
        if node.op == "call_function" and _is_work(node):
            return node.name
        node = node.next
    return ""


def _is_work(node: Node) -> bool:
    """Does it take long enough for a second call of the arena (1 us) to pay?"""
    if flop_formula(node.target) is not None:
        return True
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or is_view(node.target) or row_of_node(node):
        return False
    count = size_hint(val.numel())
    return isinstance(count, int) and count * val.element_size() >= config.split_bytes
