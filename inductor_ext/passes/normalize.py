"""``normalize``: one name for each collective, whatever op a program called."""

from __future__ import annotations

from torch.fx import Graph

from fcoll.eager.ops import op_of
from fcoll.graph.nodes import collectives, is_wait
from inductor_ext._torch import wait_tensor
from inductor_ext.choice import Choice, set_choice
from inductor_ext.passes.torchs import why_torchs


def normalize(graph: Graph) -> list[str]:
    """Every collective by its name in ``torch.ops.fcoll``, every wait by torch's name for it; what
    is torch's to lower keeps its own."""
    for node, row in collectives(graph):
        if not row.mutates and not why_torchs(node) and node.target is not op_of(row):
            set_choice(node, Choice(was=node.target))
            node.target = op_of(row)
    for node in graph.nodes:
        if is_wait(node):
            node.target = wait_tensor
    return []
