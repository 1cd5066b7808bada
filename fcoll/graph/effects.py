"""What keeps a node in its place besides the values that it reads and writes.

``"random"``: it draws from the generator, so random nodes keep their order among themselves.
``"ordered"``: a message between two ranks, or any collective beside one. Ranks run different
programs then, so all collectives keep their order. ``"barrier"``: nothing moves past it, because it
may communicate, or do anything else, that fcoll knows nothing of.
"""

from __future__ import annotations

import operator

from torch.fx import Node
from torch.utils._pytree import tree_iter

from fcoll.graph import _torch
from fcoll.graph.nodes import row_of_node

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
}

#: Ops on functions that are one kernel. Others may have any graph inside, collectives included.
LOCAL_HIGHER_ORDER = {
    "triton_kernel_wrapper_functional",
    "flex_attention",
    "flex_attention_backward",
    "run_with_rng_state",
}


def effect_of(node: Node) -> str:
    """ "", "random", "ordered" or "barrier"."""
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
    """Of numbers, or an element of a list: no tensor is computed."""
    if node.target is operator.getitem:
        return True
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    return not any(hasattr(x, "untyped_storage") for v in values for x in tree_iter(v))
