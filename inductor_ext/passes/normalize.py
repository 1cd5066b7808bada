"""``normalize``: one name for each collective, whatever op a program called."""

from __future__ import annotations

from dataclasses import replace
from operator import getitem

from torch.fx import Graph, Node

from fcoll.eager.ops import op_of
from fcoll.graph.nodes import collectives, is_wait
from inductor_ext._torch import is_wait_for_list, wait_tensor
from inductor_ext.choice import Choice, choice_of, set_choice, why_torchs


def normalize(graph: Graph) -> list[str]:
    """Every collective by its name in ``torch.ops.fcoll``, every wait by torch's name for it; what
    is torch's to lower keeps its own."""
    for node in list(graph.nodes):
        if is_wait_for_list(node.target):
            _wait_for_each(graph, node)
    for node, row in collectives(graph):
        if not row.mutates and not why_torchs(node) and node.target is not op_of(row):
            set_choice(node, replace(choice_of(node) or Choice(), was=node.target))
            node.target = op_of(row)
    for node in graph.nodes:
        if is_wait(node):
            node.target = wait_tensor
    return []


def _wait_for_each(graph: Graph, node: Node) -> None:
    """A wait for a list becomes one for each of its tensors."""
    tensors = node.args[0]
    values = node.meta.get("val")
    if not isinstance(tensors, (list, tuple)) or any(
        user.target is not getitem for user in node.users
    ):
        return
    waits = []
    with graph.inserting_before(node):
        for i, tensor in enumerate(tensors):
            wait = graph.call_function(wait_tensor, (tensor,))
            wait.meta = {**node.meta, **({"val": values[i]} if values is not None else {})}
            waits.append(wait)
    for user in list(node.users):
        user.replace_all_uses_with(waits[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
