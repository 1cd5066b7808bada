"""The private torch names of this folder. None of them imports Inductor, which takes 1 s.

Tested with torch 2.13.0, 2.14.1 and 2.15.0, which all have these names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from fcoll._torch import COMPILER as _COMPILER
from fcoll._torch import PARTITIONER as _PARTITIONER
from fcoll.imports import say_what_is_missing

_MERGING = "torch._functorch.compile_utils"


def before_compiles(act: Callable[[], object]) -> None:
    """Call a function whenever Inductor is about to compile a graph."""
    compiler = sys.modules[_COMPILER]
    compile_fx = compiler.compile_fx

    @functools.wraps(compile_fx)
    def after_act(*args: Any, **kwargs: Any) -> Any:
        act()
        return compile_fx(*args, **kwargs)

    vars(compiler).update(compile_fx=after_act)


def patch_partitioner(
    has_effect: Callable[[Node], bool],
    is_collective: Callable[[Node], bool],
    is_start: Callable[[Node], bool],
) -> None:
    """Have the partitioner keep each node that has an effect in the one graph it belongs to, and
    each collective in the graph it was traced in, used or not; in the other one it stays only if it
    is used, as one that is computed again is. No start is merged with an equal one."""
    partitioners = sys.modules[_PARTITIONER]
    # Cuts the forward or the backward graph out of the joint one.
    extract = partitioners._extract_graph_with_inputs_outputs
    # May a node be computed again in the backward graph?
    is_not_collective = partitioners.is_not_collective
    # In which of the two graphs must a node stay?
    in_forward, in_backward = partitioners._must_be_in_forward, partitioners._must_be_in_backward
    # Merges equal calls, but not those of random ops.
    merge, random_ops = sys.modules[_MERGING].fx_graph_cse, sys.modules[_MERGING].rand_ops

    def extract_without_copies(
        joint_graph: Graph,
        inputs: Any,
        outputs: Any,
        outputs_descs: Any,
        subgraph: str | None = None,
        **kwargs: Any,
    ) -> Graph:
        graph = extract(joint_graph, inputs, outputs, outputs_descs, subgraph, **kwargs)

        def is_copy(node: Node) -> bool:
            return is_collective(node) and _is_backward(node) != (subgraph == "backward")

        if graph.eliminate_dead_code(is_impure_node=lambda node: not is_copy(node)):
            graph.eliminate_dead_code()  # what was computed for them, so that it is not saved
        return graph

    def merge_but_collectives(graph: Graph, *args: Any, **kwargs: Any) -> Graph:
        called = {node.target.overloadpacket for node in graph.nodes if is_start(node)}
        random_ops.extend(called.difference(random_ops))
        return merge(graph, *args, **kwargs)

    vars(sys.modules[_MERGING]).update(fx_graph_cse=merge_but_collectives)
    vars(partitioners).update(
        fx_graph_cse=merge_but_collectives,
        _extract_graph_with_inputs_outputs=extract_without_copies,
        is_not_collective=lambda node: is_collective(node) or is_not_collective(node),
        _must_be_in_forward=lambda node: (
            in_forward(node) or (has_effect(node) and not _is_backward(node))
        ),
        _must_be_in_backward=lambda node: (
            in_backward(node) or (is_collective(node) and _is_backward(node))
        ),
    )


def _is_backward(node: Node) -> bool:
    """Was a node of a joint graph traced in the backward pass? What an autograd.Function does there
    has no tag: it is what comes after all that has the forward pass's."""
    partitioners = sys.modules[_PARTITIONER]
    if partitioners._has_tag_is_backward(node) or partitioners._has_tag_is_forward(node):
        return partitioners._has_tag_is_backward(node)
    nodes = list(node.graph.nodes)
    is_last = not any(map(partitioners._has_tag_is_forward, nodes[nodes.index(node) :]))
    return is_last and any(map(partitioners._has_tag_is_backward, nodes))


say_what_is_missing(__name__)
