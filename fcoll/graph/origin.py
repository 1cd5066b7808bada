"""Where a recorded node is from: the user's lines, the module and the phase."""

from __future__ import annotations

from dataclasses import dataclass

from fcoll.source import Frames, line_in

PHASES = ("fwd", "bwd", "opt")


@dataclass(frozen=True)
class Origin:
    """The user's frames (innermost last), the module and the phase that an op belongs to."""

    frames: Frames
    module: str
    phase: str

    @property
    def source(self) -> str:
        """The user's line, "model.py:31"."""
        return line_in(self.frames)
