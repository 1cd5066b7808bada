"""Who asked for a node of a recorded graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from fcoll.source import Site, show, user_frames

PHASES = ("fwd", "bwd", "opt")
Frames = tuple[Site, ...]


@dataclass(frozen=True)
class Origin:
    """The user's frames (innermost last), the module and the phase that an op belongs to."""

    frames: Frames
    module: str
    phase: str

    @property
    def source(self) -> str:
        """The user's line, "model.py:31"."""
        return show(self.frames[-1]) if self.frames else ""


def origin_of(node: Node) -> Origin:
    """What a trace wrote down of a node; of a graph that no trace made, its user's lines."""
    found = node.meta.get("origin")
    if found is not None:
        return found
    return Origin(tuple(user_frames(node.meta.get("stack_trace"))), "", "fwd")
