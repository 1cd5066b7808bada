"""``merge``: one message instead of several small ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fcoll.graph.nodes import is_start, is_wait, row_of_node, start_of
from fcoll.table.reduce import ALL_REDUCE
from inductor_ext._torch import wait_tensor
from inductor_ext.config import config
from inductor_ext.passes.edit import replace
from inductor_ext.passes.torchs import why_torchs

aten = torch.ops.aten


def merge(graph: Graph) -> list[str]:
    """Small all-reduces that do not depend on each other, as one."""
    said = []
    for batch in list(_batches(graph)):
        said.append(f"{', '.join(node.name for node in batch)}: one all_reduce")
        _merge(graph, batch)
    return said


def _batches(graph: Graph) -> Iterator[list[Node]]:
    """Runs of small all-reduces with equal arguments, with no other collective among them and
    nothing that needs the result of one before the last has started."""
    batch: list[Node] = []
    for node in list(graph.nodes):
        starts, small = is_start(node), _is_small(node)
        needs = any(is_wait(x) and start_of(x) in batch for x in node.all_input_nodes)
        if needs or (starts and not (small and batch and _key(node) == _key(batch[0]))):
            if len(batch) > 1:
                yield batch
            batch = []
        if small:
            batch.append(node)


def _is_small(node: Node) -> bool:
    """Is it an all-reduce that may be sent together with others?"""
    if row_of_node(node) is not ALL_REDUCE or why_torchs(node):
        return False
    val = node.meta["val"]
    return (
        all(isinstance(s, int) for s in val.shape)
        and val.numel() > 0
        and val.is_contiguous()
        and val.numel() * val.element_size() <= config.merge_bytes
        and all(is_wait(user) for user in node.users)
    )


def _key(node: Node) -> Any:
    """What must be equal in all-reduces that are sent together."""
    val = node.meta["val"]
    return (*node.args[1:], val.dtype, val.device)


def _merge(graph: Graph, batch: Sequence[Node]) -> None:
    """Flatten, concatenate, reduce once, and cut up again, where the last of them is."""
    vals = [node.meta["val"] for node in batch]
    counts = [val.numel() for val in vals]

    def call(op: Any, *args: Any) -> Node:
        node = graph.call_function(op, args)
        node.meta["stack_trace"] = batch[-1].meta.get("stack_trace")
        with vals[0].fake_mode:
            node.meta["val"] = op(*torch.fx.map_arg(args, lambda x: x.meta["val"]))
        return node

    with graph.inserting_before(batch[-1]):
        flat = [call(aten.reshape.default, node.args[0], [-1]) for node in batch]
        whole = call(aten.cat.default, flat)
        total = graph.call_function(batch[0].target, (whole, *batch[0].args[1:]))
        total.meta.update(batch[-1].meta)
        total.meta["val"] = whole.meta["val"]
        waited = graph.call_function(wait_tensor, (total,))
        waited.meta["val"] = whole.meta["val"]
        ends = list(itertools.accumulate(counts))
        for node, val, end, count in zip(batch, vals, ends, counts, strict=True):
            part = call(aten.slice.Tensor, waited, 0, end - count, end)
            shaped = call(aten.reshape.default, part, list(val.shape))
            for wait in list(node.users):
                replace(wait, shaped)
    for node in batch:
        graph.erase_node(node)
