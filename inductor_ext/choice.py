"""``Choice``: what the passes decided for a collective, kept with its node until it is lowered; and
which collectives are torch's to lower from the first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fcoll.graph.nodes import arguments, collectives, has_named_group
from inductor_ext._torch import all_reduce, all_reduce_, selects_one_shot

_KEY = "fcoll"  # in node.meta


@dataclass(frozen=True)
class Choice:
    """How a collective is lowered.

    ``form`` is "fused", "split" or "opaque" if the ranks' parts are read in place, "kernel" for
    the kernel that eager runs, "stock" for what stock Inductor does, or the name of a Triton
    kernel. ``why`` says why it is not a better one.
    """

    form: str = "kernel"
    why: str = ""
    #: The op that the node called before it was renamed to fcoll's; None if it was not.
    was: Any = None
    #: What the schedule did to it; empty if it is where it was.
    plan: str = ""
    #: The program's own calls that it makes: their places among those of the group in the graph,
    #: in the order of their parts. Ranks compare them: calls that look alike may be others.
    calls: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Is the result there without a wait?"""
        return self.form in ("fused", "opaque")


def choice_of(node: Node) -> Choice | None:
    """The choice for a collective; None if the passes have not seen its graph."""
    return node.meta.get(_KEY)


def set_choice(node: Node, choice: Choice) -> None:
    node.meta[_KEY] = choice


def number(graph: Graph) -> None:
    """Write down which of the program's calls each collective is, before anything is changed."""
    counts: Counter[str] = Counter()
    for node, row in collectives(graph):
        group = str(arguments(node).get("group_name")) if has_named_group(node) else ""
        counts[group] += not row.is_p2p  # those are of two ranks only
        set_choice(node, Choice(calls=(str(counts[group]),)))


def calls_of(node: Node) -> tuple[str, ...]:
    """The program's own calls that a collective makes; none where nobody has numbered them."""
    return (choice_of(node) or Choice()).calls


def facts_without_choice(node: Node) -> dict[str, Any]:
    """The meta of a node but for its choice, for another node that replaces it."""
    return {key: fact for key, fact in node.meta.items() if key != _KEY}


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
