"""The nodes of an fx graph: starts and waits of collectives, origins, and which nodes may move."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from operator import getitem
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_iter

from fcoll.graph import _torch
from fcoll.graph.origin import Origin
from fcoll.source import line_in, user_frames
from fcoll.table.collectives import row_named
from fcoll.table.row import Collective

SPLITS = ("input_split_sizes", "output_split_sizes")  # of an exchange


def row_of_node(node: Any) -> Collective | None:
    """The row of a node that calls a collective or a wait, None of any other."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    target = node.target
    entry = _names.get(id(target))
    return row_named(entry[1] if entry and entry[0] is target else _op_name(target))


_names: dict[int, tuple[Any, str]] = {}  # by id: to hash an op takes as long as to name it


def _op_name(target: Any) -> str:
    """Cached, since torch builds names anew: of 10,000 nodes each name is read many times."""
    entry = _names.get(id(target))
    if entry is None or entry[0] is not target:
        entry = _names[id(target)] = (target, _torch.op_name(target))
    return entry[1]


def is_start(node: Any) -> bool:
    """Does the node issue a collective?"""
    row = row_of_node(node)
    return row is not None and not row.is_wait


def is_wait(node: Any) -> bool:
    row = row_of_node(node)
    return row is not None and row.is_wait


def collectives(graph: Graph) -> Iterator[tuple[Node, Collective]]:
    """The nodes that start a collective, with their rows. The graph may be changed meanwhile."""
    for node in list(graph.nodes):
        row = row_of_node(node)
        if row is not None and not row.is_wait:
            yield node, row


def regions_of(node: Node) -> list[GraphModule]:
    """The graphs that a call of an op on functions is given, as of a nested region or a branch."""
    owner = node.graph.owning_module
    named = [x.target for x in node.all_input_nodes if x.op == "get_attr"]
    values = [operator.attrgetter(str(name))(owner) for name in named if owner is not None]
    return [x for x in values if isinstance(x, GraphModule)]


def communicates(graph_module: GraphModule) -> bool:
    """Is there a collective in a graph, or in one that is nested in it?"""
    graphs = graphs_in(graph_module)
    return any(row_of_node(node) is not None for graph in graphs for node in graph.nodes)


def graphs_in(graph_module: GraphModule) -> list[Graph]:
    """A module's graph, and those that are nested in it."""
    return [m.graph for m in graph_module.modules() if isinstance(m, GraphModule)]


def start_of(wait: Node) -> Node | None:
    """The collective that a wait is for, through the elements of a list; None if it is outside."""
    node = wait.args[0]
    while isinstance(node, Node) and (node.target is getitem or is_wait(node)):
        node = node.args[0]
    return node if isinstance(node, Node) and is_start(node) else None


def waits_of(start: Node) -> list[Node]:
    """The waits for a collective's results, through the elements of a list."""
    waits = []
    for user in start.users:
        if is_wait(user):
            waits.append(user)
        elif user.target is getitem:
            waits.extend(waits_of(user))
    return waits


def is_used(start: Node) -> bool:
    """Does anything but waits, and parts of lists, take the result?"""
    users = list(start.users)
    while users:
        user = users.pop()
        if not is_wait(user) and user.target is not getitem:
            return True
        users.extend(user.users)
    return False


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in."""
    return _torch.call_arguments(node.target, node.args, node.kwargs)


def has_named_group(node: Node) -> bool:
    """Is a collective's group a name? A graph for all ranks gets the group as a value, because its
    name differs between them (``compile_on_one_rank`` of torch)."""
    return isinstance(arguments(node).get("group_name", ""), str)


def line_of(node: Node) -> str:
    """ "model.py:31": the user's line that led to a node; empty if none is known."""
    return line_in(user_frames(node.meta.get("stack_trace")))


def describe(node: Node) -> str:
    """A collective in a line of a log."""
    row, val = row_of_node(node), node.meta.get("val")
    shape = f" {list(val.shape)} {val.dtype}" if isinstance(val, Tensor) else ""
    where = line_of(node)
    return f"{node.name} = {row.name if row else node.target}{shape}" + (where and f" at {where}")


def origin_of(node: Node) -> Origin:
    """The origin that a trace recorded of a node; without a trace, its user's lines."""
    origin = node.meta.get("origin")
    if origin is not None:
        return origin
    return Origin(tuple(user_frames(node.meta.get("stack_trace"))), "", "fwd")


# -- what keeps a node in its place, besides the values that it reads and writes ---

#: The namespaces whose ops never communicate. An op of any other one is a barrier, unless the
#: table has a row of it: add the namespace of your own kernels here.
LOCAL_NAMESPACES = {
    "aten",
    "prims",
    "prim",
    "inductor",
    "quantized",
    "quantized_decomposed",
    "torchao",
    "torchvision",
    "torchaudio",
    "mkl",
    "mkldnn",
    "onednn",
    "flash_attn",
    "xformers",
    "fbgemm",
    "fsdp",  # copies into and out of FSDP2's buffers
    "bucketing",  # ... and into those of torch's bucketing passes
}

#: Ops on functions that are one kernel. Others may have any graph inside, collectives included.
LOCAL_HIGHER_ORDER = {
    "triton_kernel_wrapper_functional",
    "flex_attention",
    "flex_attention_backward",
    "run_with_rng_state",
}


def effect_of(node: Node) -> str:
    """Why a node may not move freely: "", "random", "ordered" or "barrier".

    "random": it draws from the generator, so random nodes keep their order among themselves.
    "ordered": a message between two ranks, or any collective beside one. Ranks run different
    programs then, so all collectives keep their order. "barrier": nothing moves past it, because
    it may communicate, or do anything else, that fcoll knows nothing of.
    """
    row = row_of_node(node)
    if row is not None:
        if row.is_p2p:
            return "ordered"
        return "barrier" if row.side_effect and not row.is_wait else ""
    if node.op in ("placeholder", "get_attr", "output"):
        return ""
    if node.op != "call_function":
        return "barrier"  # a module or a method: it may do anything
    return _effect_of_call(node)


def _effect_of_call(node: Node) -> str:
    namespace = _torch.op_namespace(node.target)
    if not namespace:  # a Python function: arithmetic on sizes, or unknown
        return "" if _is_arithmetic(node) else "barrier"
    if namespace == "higher_order":
        local = getattr(node.target, "__name__", "") in LOCAL_HIGHER_ORDER
        return "" if local else "barrier"
    if namespace not in LOCAL_NAMESPACES:
        return "barrier"
    return "random" if _torch.op_is_random(node.target) else ""


def _is_arithmetic(node: Node) -> bool:
    """Does it compute numbers only, or take an element of a list?"""
    if node.target is getitem:
        return True
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    return not any(hasattr(x, "untyped_storage") for v in values for x in tree_iter(v))


def tensors_of(node: Node) -> list[Tensor]:
    """The tensors among a node's results."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    values = value if isinstance(value, (list, tuple)) else ()
    return [x for x in values if isinstance(x, Tensor)]


def written_by(node: Node) -> list[Node]:
    """The arguments that a node writes to."""
    targets: list[Node] = []
    for i, name in _torch.op_writes(node.target):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        values = value if isinstance(value, (list, tuple)) else [value]
        targets += [x for x in values if isinstance(x, Node)]
    return targets
