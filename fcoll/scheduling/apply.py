"""A plan -> a new graph module in its order."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fcoll.graph.nodes import row_of_node


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


def apply_in_place(graph: Graph, planned: Graph, order: Sequence[str]) -> None:
    """Give a graph the nodes and the order of a plan. ``planned`` is the plan's graph: the same
    one, or one that was made of it, with nodes by other names where something was added and
    others by the same name where something was replaced. Nodes that are in both stay."""
    here = {node.name: node for node in graph.nodes}
    if planned is not graph:
        here = _transplanted(graph, here, _in_order(planned, order))
    cursor = graph._root
    for name in order:
        if cursor.next is not here[name]:
            cursor.append(here[name])
        cursor = here[name]
    kept = {id(node) for node in here.values()}
    for node in reversed(list(graph.nodes)):
        if id(node) not in kept:
            graph.erase_node(node)
    graph.lint()


def _transplanted(
    graph: Graph, before: dict[str, Node], planned: Sequence[Node]
) -> dict[str, Node]:
    """By the names of planned nodes: the nodes of the graph that stay, or copies of new ones."""
    made: dict[Node, Node] = {}
    for node in planned:
        old = before.get(node.name)
        if old is not None and _is_same(old, node, made):
            made[node] = old
            continue
        made[node] = copied = graph.node_copy(node, made.__getitem__)
        _give_own_value(copied)
        if old is not None:
            old.replace_all_uses_with(copied)
    return {node.name: x for node, x in made.items()}


def _give_own_value(node: Node) -> None:
    """A fake value of the node's own: equal ones are shared between the nodes of a plan, but a
    compiler takes values on one storage for views of each other."""
    val = node.meta.get("val")
    if not isinstance(val, Tensor) or not hasattr(val, "fake_mode"):
        return
    with val.fake_mode:
        if row_of_node(node) is not None:
            node.meta["val"] = val.new_empty(val.shape)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _is_same(old: Node, new: Node, made: dict[Node, Node]) -> bool:
    if (old.op, old.target) != (new.op, new.target):
        return False
    args, kwargs = map_arg((new.args, new.kwargs), made.__getitem__)
    return (args, kwargs) == (old.args, dict(old.kwargs))


def _in_order(graph: Graph, order: Sequence[str]) -> list[Node]:
    by_name = {node.name: node for node in graph.nodes}
    return [by_name[name] for name in order]
