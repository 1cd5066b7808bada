"""A plan -> a new graph module in its order."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch.fx import Graph, GraphModule, Node


def apply(graph_module: GraphModule, order: Sequence[str]) -> GraphModule:
    """The same nodes, by the same names, in another order. The given module is not changed."""
    by_name = {node.name: node for node in graph_module.graph.nodes}
    graph = Graph()
    made: dict[Node, Node] = {}
    for name in order:
        node = by_name[name]
        made[node] = graph.node_copy(node, made.__getitem__)
    graph._codegen = copy.deepcopy(graph_module.graph._codegen)
    graph.lint()
    module = GraphModule(graph_module, graph)
    module.meta.update(graph_module.meta)
    return module
