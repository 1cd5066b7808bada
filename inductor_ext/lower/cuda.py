"""All-reduces of CUDA tensors in torch's symmetric memory: which groups have it, what is worth it,
and what they are lowered to.

The kernel that computes a rank's part writes it into a comm buffer of Inductor's, which the peers
have mapped, and an op of ``triton_ops.py`` reduces it there. None of this has run on a GPU: a
group's all-reduces stay stock Inductor's until ``enable`` has been called for it.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any

import sympy
import torch

from fcoll.eager.small_messages import gather_objects
from fcoll.groups import Group, GroupLike, by_name, resolve
from inductor_ext._torch import V, ir, realize_in_symmetric_memory, symmetric_empty
from inductor_ext.choice import Choice, choice_of, set_choice
from inductor_ext.config import config
from inductor_ext.lower import triton_ops
from inductor_ext.lower.ir import can_realize_as_comm_buffer

log = logging.getLogger("inductor_ext")

# name -> weak reference to the process group: names are given again (see fcoll/groups.py)
_enabled: dict[str, weakref.ref] = {}


def enable(group: GroupLike = None) -> str:
    """Have the compiler reduce this group's CUDA tensors in symmetric memory from now on.

    All ranks of the group must call it, each with its own GPU as the current one. They try it:
    if it fails on one, nothing changes on any. Gives the reason why not; empty if it works.
    """
    g = resolve(group)
    why = _agreed(g, _lacks(g)) or _agreed(g, _fails(g, torch.device("cuda")))
    if not why:
        _enabled[g.name] = weakref.ref(g.pg)
    return why


def disable(group: GroupLike = None) -> None:
    """Undo ``enable``, for what is compiled from now on. All ranks of the group must call it."""
    _enabled.pop(resolve(group).name, None)


def is_enabled(g: Group) -> bool:
    reference = _enabled.get(g.name)
    return reference is not None and reference() is g.pg


def enabled_groups() -> list[str]:
    """Their names, for the keys of caches."""
    return sorted(name for name, pg in _enabled.items() if pg())


def _lacks(g: Group) -> str:
    """What this rank lacks; empty if nothing."""
    if not triton_ops.has_triton():
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "there is no GPU"
    if not 1 < g.n <= triton_ops.MAX_RANKS:
        return f"it has {g.n} ranks; the kernels serve 2 to {triton_ops.MAX_RANKS}"
    return ""


def _fails(g: Group, device: torch.device) -> str:
    """The failure of an all-reduce in symmetric memory; empty if it works."""
    try:
        x = symmetric_empty(1, dtype=torch.float32, device=device).fill_(g.rank + 1)
        total = int(triton_ops.one_shot_all_reduce(x, "sum", g.name).item())
    except (RuntimeError, ValueError) as error:
        return f"an all-reduce in symmetric memory failed: {error}"
    right = g.n * (g.n + 1) // 2
    return "" if total == right else f"an all-reduce in symmetric memory gave {total}, not {right}"


def _agreed(g: Group, why: str) -> str:
    """The first reason that a rank has; empty if none has any."""
    reasons = enumerate(gather_objects(why, g))
    return next((f"rank {r}: {reason}" for r, reason in reasons if reason), "")


# -- lowering ---

_OPS = {
    "triton one-shot": torch.ops.fcoll_triton.one_shot_all_reduce.default,
    "triton two-shot": torch.ops.fcoll_triton.two_shot_all_reduce.default,
}


def all_reduce(x: Any, reduce_op: str, group_name: str) -> Any:
    """An all-reduce of a CUDA tensor in symmetric memory, complete when its kernel is; None if it
    is left to others. Which it is, and why, is said of the node that is being lowered."""
    node = V.graph.current_node
    form, why = _form(x, reduce_op, by_name(group_name))
    before = choice_of(node) or Choice()
    set_choice(node, replace(before, form=form or before.form, why=why))
    log.info("lower: %s: %s", node.name, form or f"{before.form} ({why})")
    if not form:
        return None
    if not can_realize_as_comm_buffer(x, node.args[0]):
        x = ir.ExternKernel.copy_input(x)
    realize_in_symmetric_memory(x, group_name)
    return ir.TensorBox.create(ir.FallbackKernel.create(_OPS[form], x, reduce_op, group_name))


def _form(x: Any, reduce_op: str, g: Group) -> tuple[str, str]:
    """The form of an all-reduce, and why it has none in symmetric memory."""
    why = _why_not(x, reduce_op, g)
    if why:
        return "", why
    size = int(x.get_numel()) * x.get_dtype().itemsize
    one_shot, two_shot = config.cuda_limits(g.n)
    if size <= one_shot:
        return "triton one-shot", ""
    if size <= two_shot:
        return "triton two-shot", f"{size} bytes are more than the {one_shot} of one-shot"
    return "", f"{size} bytes are more than the {max(one_shot, two_shot)} of {g.n} ranks"


def _why_not(x: Any, reduce_op: str, g: Group) -> str:
    if not is_enabled(g):
        return "its group has no symmetric memory on CUDA: see inductor_ext.cuda.enable"
    if config.form == "kernel":
        return 'inductor_ext.config.form = "kernel"'
    if V.graph.cpp_wrapper:
        return "cpp_wrapper has no comm buffers on CUDA"
    if not isinstance(x.get_numel(), (int, sympy.Integer)):
        return "its size is not known when the graph is compiled"
    if x.get_numel() == 0:
        return "it is empty"
    return triton_ops.why_not(x.get_dtype(), reduce_op, g.n)
