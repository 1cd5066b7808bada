"""What is done to torch until it is undone."""

from __future__ import annotations

from collections.abc import Callable


class Acceleration:
    """In force until ``undo``; a context manager too."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo: Callable[[], object] | None = undo

    def undo(self) -> None:
        """Once: what others have put there since then is left alone."""
        undo, self._undo = self._undo, None
        if undo:
            undo()

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()
