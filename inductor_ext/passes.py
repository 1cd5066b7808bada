"""What is done to the collectives of a graph before Inductor lowers it: ``PASSES``, in order.

A pass takes the graph, changes it, and returns what it did, a line for each collective it touched.
Between two passes ``verify`` looks whether the graph still is one.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from fcoll import symm_mem
from fcoll._torch import size_hint
from fcoll.collectives import Collective, row_of
from fcoll.groups import by_name
from fcoll.native import build
from inductor_ext import one_shot
from inductor_ext._torch import (
    CustomGraphPass,
    get_hash_for_files,
    is_pure,
    is_view,
    wait_tensor,
)
from inductor_ext.config import config
from inductor_ext.places import users_line
from inductor_ext.registry import op_of

aten = torch.ops.aten

log = logging.getLogger("inductor_ext")


# -- looking at a graph ---


def collectives(graph: Graph) -> Iterator[tuple[Node, Collective]]:
    """The nodes that start a collective, with their rows."""
    for node in list(graph.nodes):
        row = row_of(node.target) if node.op == "call_function" else None
        if row is not None and row.name != "wait_tensor":
            yield node, row


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update(zip((a.name for a in schema), node.args, strict=False))
    return named | node.kwargs


def is_wait(node: Any) -> bool:
    return isinstance(node, Node) and node.target is wait_tensor


def started_by(node: Any) -> Node | None:
    """The collective whose result, once waited for, a node is."""
    return node.args[0] if is_wait(node) else None


def describe(node: Node) -> str:
    """A collective in a line of the log."""
    row, val = row_of(node.target), node.meta.get("val")
    shape = f" {list(val.shape)} {val.dtype}" if isinstance(val, torch.Tensor) else ""
    where = users_line(node)
    return f"{node.name} = {row.name if row else node.target}{shape}" + (where and f" at {where}")


# -- passes ---


def normalize(graph: Graph) -> list[str]:
    """Every collective by its name in ``torch.ops.fcoll``."""
    for node, row in collectives(graph):
        if not row.mutates and node.target is not op_of(row.name):
            node.meta["fcoll_was"] = node.target
            node.target = op_of(row.name)
    return []


def simplify(graph: Graph) -> list[str]:
    """Leave out what is known to change nothing."""
    return [*_waits_twice(graph), *_of_replicated(graph), *_scatter_then_gather(graph)]


def _waits_twice(graph: Graph) -> Iterable[str]:
    for node in list(graph.nodes):
        if is_wait(node) and is_wait(node.args[0]):
            yield f"{node.name}: waited for already"
            _replace(node, node.args[0])


def _of_replicated(graph: Graph) -> Iterable[str]:
    """A min, max or mean over equal values is that value; a gather of them is copies of it."""
    equal: dict[Node, set[str]] = {}  # -> the groups on all of whose ranks the value is the same
    for node in list(graph.nodes):
        row = row_of(node.target) if node.op == "call_function" else None
        if row is None:
            equal[node] = _equal_on(node, equal)
            continue
        if is_wait(node):
            equal[node] = equal.get(node.args[0], set())
            continue
        args = arguments(node)
        group = args.get("group_name", "")
        equal[node] = {group} if row.name in _REPLICATE else set()
        waits = [user for user in node.users if is_wait(user)]
        if group not in equal.get(args.get("input"), ()) or len(waits) != len(node.users):
            continue
        same = _without(graph, node, row, args)
        if same is not None:
            yield f"{describe(node)}: all ranks of {group} have the same"
            equal[same] = {group}
            for wait in waits:
                _replace(wait, same)
            graph.erase_node(node)


_REPLICATE = ("all_reduce", "all_gather_into_tensor", "broadcast")


# Besides tensors their arguments are of shape and dtype. Any other number may be a rank's own.
_KEEP_EQUAL = (
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.clone.default,
    torch.ops.prims.convert_element_type.default,
)


def _equal_on(node: Node, equal: dict[Node, set[str]]) -> set[str]:
    values = node.all_input_nodes
    only_values = len(values) == len(node.args) and not node.kwargs
    if not (only_values and is_pure(node.target)) and node.target not in _KEEP_EQUAL:
        return set()
    return set.intersection(*(equal.get(x, set()) for x in values)) if values else set()


def _without(graph: Graph, node: Node, row: Collective, args: dict[str, Any]) -> Node | None:
    """What a collective of equal values gives, computed locally."""
    x = args["input"]
    if row.name == "all_reduce" and args["reduce_op"] in ("min", "max", "avg"):
        return x
    plain = row.name == "all_gather_into_tensor" and args["sizes"] is None and x.meta["val"].dim()
    if not plain:
        return None
    repeats = [1] * x.meta["val"].dim()
    repeats[args["dim"]] = args["group_size"]
    with graph.inserting_before(node):
        made = graph.call_function(aten.repeat.default, (x, repeats))
    made.meta.update(val=node.meta["val"])
    return made


def _scatter_then_gather(graph: Graph) -> Iterable[str]:
    """A reduce-scatter whose result is only gathered again is an all-reduce, which takes one
    meeting of the ranks instead of two; from the limit of one-shot on, it is the same work."""
    for gather, row in collectives(graph):
        if row.name != "all_gather_into_tensor":
            continue
        wait = gather.args[0]
        scatter = started_by(wait)
        source = row_of(scatter.target) if scatter is not None else None
        if scatter is None or source is None or source.name != "reduce_scatter_tensor":
            continue
        a, b = arguments(scatter), arguments(gather)
        same = all(a[key] == b[key] for key in ("group_name", "dim", "sizes", "group_size"))
        if not same or len(wait.users) != 1 or len(scatter.users) != 1:
            continue
        group = by_name(a["group_name"])
        whole = {"input": a["input"], "reduce_op": a["reduce_op"]}
        if one_shot.why_not("all_reduce", whole, group, config):
            continue
        yield f"{describe(scatter)} and {gather.name}: one all_reduce"
        with graph.inserting_before(gather):
            call = (a["input"], a["reduce_op"], a["group_name"])
            made = graph.call_function(op_of("all_reduce"), call)
        made.meta.update(gather.meta)
        _replace(gather, made)
        graph.erase_node(wait)
        graph.erase_node(scatter)


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
        row = row_of(node.target) if node.op == "call_function" else None
        starts = row is not None and row.name != "wait_tensor"
        small = starts and row.name == "all_reduce" and _is_small(node)  # type: ignore[union-attr]
        needs = any(started_by(x) in batch for x in node.all_input_nodes)
        if needs or (starts and not (small and batch and _key(node) == _key(batch[0]))):
            if len(batch) > 1:
                yield batch
            batch = []
        if small:
            batch.append(node)


def _is_small(node: Node) -> bool:
    val = node.meta["val"]
    return (
        all(isinstance(s, int) for s in val.shape)
        and val.numel() > 0
        and val.is_contiguous()
        and val.numel() * val.element_size() <= config.merge_bytes
        and all(is_wait(user) for user in node.users)
    )


def _key(node: Node) -> Any:
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
                _replace(wait, shaped)
    for node in batch:
        graph.erase_node(node)


def place(graph: Graph) -> list[str]:
    """Starts early and waits late: a start right after what it sends, but after all starts before
    it, and a wait right before its first use. What a collective sends is freed no later for that
    if it is read in place, since its memory is the arena's: others stay where they are."""
    if not config.overlap:
        return []
    return [*_starts_early(graph), *_waits_late(graph)]


def _starts_early(graph: Graph) -> Iterator[str]:
    last: Node | None = None  # the ranks of a group start collectives in one order
    for node, row in collectives(graph):
        after = [*node.all_input_nodes, *([last] if last is not None else [])]
        last = node
        if row.name not in one_shot.READS or not after:
            continue
        place = max(after)
        if place.op == "call_function" and place.next is not node:
            yield f"{node.name}: right after {place.name}"
            place.append(node)


def _waits_late(graph: Graph) -> Iterator[str]:
    for node in list(graph.nodes):
        if is_wait(node) and node.users and _is_read_in_place(node.args[0]):
            first = min(node.users)
            if node.next is not first:
                yield f"{node.name}: right before {first.name}"
                first.prepend(node)


def _is_read_in_place(node: Node) -> bool:
    row = row_of(node.target)
    return row is not None and row.name in one_shot.READS


def choose(graph: Graph) -> list[str]:
    """The form in which each collective is lowered."""
    said = []
    for node, row in collectives(graph):
        form, why = _form_of(node, row)
        node.meta.update(fcoll_form=form, fcoll_why=why)
        said.append(f"{describe(node)}: {form}" + (f" ({why})" if why else ""))
        if form in ("fused", "opaque"):
            for user in list(node.users):
                _replace(user, node)
        elif form == "stock" and "fcoll_was" in node.meta:
            node.target = node.meta["fcoll_was"]
    return said


def _form_of(node: Node, row: Collective) -> tuple[str, str]:
    """The form of a collective, and why it is not a better one."""
    args = arguments(node)
    if row.mutates or "group_name" not in args:
        return "kernel", "it writes to its argument" if row.mutates else ""
    status = symm_mem.known_status(by_name(args["group_name"]))
    if status is None:  # not to be found out here: other ranks may have this graph in their caches
        return "kernel", "whether its group has shared memory is not known yet"
    if not status.shared:
        return "stock", str(status)
    if config.form == "kernel":
        return "kernel", 'inductor_ext.config.form = "kernel"'
    why = one_shot.why_not(row.name, args, by_name(args["group_name"]), config)
    if not why and not all(is_wait(user) for user in node.users):
        why = "it is used before its wait"
    if why:
        return "kernel", why
    between = _work_between(node)
    if between:
        return "split", f"{between} can be computed meanwhile"
    if config.form == "opaque" and "reduce_op" in args:
        return "opaque", 'inductor_ext.config.form = "opaque"'
    return "fused", ""


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
    if (
        node.target in flop_registry
        or getattr(node.target, "overloadpacket", None) in flop_registry
    ):
        return True
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or is_view(node.target) or row_of(node.target):
        return False
    count = size_hint(val.numel())
    return isinstance(count, int) and count * val.element_size() >= config.split_bytes


def _replace(node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


PASSES: tuple[Callable[[Graph], list[str]], ...] = (normalize, simplify, merge, place, choose)


def verify(graph: Graph) -> None:
    """Is every value defined before it is used, and everything that is in flight waited for?"""
    graph.lint()
    for node, row in collectives(graph):
        form = node.meta.get("fcoll_form")
        group = arguments(node).get("group_name")
        complete = form in ("fused", "opaque") or row.mutates or row.on_lists or row.side_effect
        if complete or not node.users or group is None or by_name(group).n == 1:
            continue
        if not any(is_wait(user) for user in node.users):
            raise AssertionError(f"inductor_ext: nothing waits for {describe(node)}")


class Passes(CustomGraphPass):
    """All passes, as one of Inductor's own; its uuid is part of the key of Inductor's caches."""

    def __call__(self, graph: Graph) -> None:
        if not any(True for _ in collectives(graph)):
            return
        for p in PASSES:
            for line in p(graph):
                log.info("%s: %s", p.__name__, line)
            verify(graph)

    def uuid(self) -> Any:
        files = sorted(str(f) for f in Path(__file__).parent.glob("*.py"))
        found = symm_mem.load(), build.has_short_way(), symm_mem.known_groups()
        return get_hash_for_files(tuple(files), config.key() + repr(found))
