"""The private torch names of this folder. None of them imports Inductor, which takes 1 s.

Tested with torch 2.13.0, 2.14.1 and 2.15.0, which all have these names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from fcoll.imports import say_what_is_missing

_COMPILER = "torch._inductor.compile_fx"
_PARTITIONER = "torch._functorch.partitioners"


def inductor_is_loaded() -> bool:
    """Has anybody imported Inductor's compiler? Only then is there anything to teach it."""
    return _COMPILER in sys.modules


def partitioner_is_loaded() -> bool:
    """Has anybody imported AOTAutograd's partitioner?"""
    return _PARTITIONER in sys.modules


def patch_partitioner(
    has_effect: Callable[[Node], bool], is_removable: Callable[[Node], bool]
) -> None:
    """Have the partitioner keep each node that has an effect in the one graph it belongs to, and
    remove each node that is removable and that nobody uses."""
    partitioners = sys.modules[_PARTITIONER]
    # Cuts the forward or the backward graph out of the joint one.
    extract = partitioners._extract_graph_with_inputs_outputs
    # May a node be computed again in the backward graph?
    is_not_collective = partitioners.is_not_collective
    # In which of the two graphs must a node stay, and in which was it traced?
    in_forward, in_backward = partitioners._must_be_in_forward, partitioners._must_be_in_backward
    is_backward = partitioners._has_tag_is_backward

    def extract_without_unused(*args: Any, **kwargs: Any) -> Graph:
        graph = extract(*args, **kwargs)
        graph.eliminate_dead_code(is_impure_node=lambda node: not is_removable(node))
        return graph

    vars(partitioners).update(
        _extract_graph_with_inputs_outputs=extract_without_unused,
        is_not_collective=lambda node: has_effect(node) or is_not_collective(node),
        _must_be_in_forward=lambda node: (
            in_forward(node) or (has_effect(node) and not is_backward(node))
        ),
        _must_be_in_backward=lambda node: (
            in_backward(node) or (has_effect(node) and is_backward(node))
        ),
    )


say_what_is_missing(__name__)
