"""Collectives that the passes leave to torch's own lowering from the first."""

from __future__ import annotations

import torch
from torch.fx import Node

from fcoll.graph.nodes import arguments, has_named_group
from inductor_ext._torch import all_reduce, all_reduce_, selects_one_shot


def why_torchs(node: Node) -> str:
    """Why a collective is torch's to lower; empty if it is ours."""
    if not has_named_group(node):
        return "its group is a value of the graph"
    if node.target in (all_reduce, all_reduce_) and _is_one_shot(node):
        return "torch._inductor.config._collective.auto_select takes it"
    return ""


def _is_one_shot(node: Node) -> bool:
    x, args = node.args[0].meta.get("val"), arguments(node)  # type: ignore[union-attr]
    if not isinstance(x, torch.Tensor) or not isinstance(x.numel(), int):
        return False
    return selects_one_shot(x.nbytes, args["reduce_op"], args["group_name"])
