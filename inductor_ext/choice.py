"""``Choice``: what the passes decided for a collective, kept with its node until it is lowered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

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

    @property
    def is_complete(self) -> bool:
        """Is the result there without a wait?"""
        return self.form in ("fused", "opaque")


def choice_of(node: Node) -> Choice | None:
    """The choice for a collective; None if the passes have not seen its graph."""
    return node.meta.get(_KEY)


def set_choice(node: Node, choice: Choice) -> None:
    node.meta[_KEY] = choice


def facts_without_choice(node: Node) -> dict[str, Any]:
    """What is known of a node, for another node that replaces it."""
    return {key: fact for key, fact in node.meta.items() if key != _KEY}
