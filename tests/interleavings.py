"""All orders in which the steps of several ranks can come, for small models of a protocol.

A model has a state that can be hashed, and says which states can follow it. ``explore`` visits all
of them, and raises for the first that is wrong, or in which nobody can go on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Protocol


class Stuck(Exception):
    """Nobody can go on, and the program has not ended."""


class Model(Protocol):
    def start(self) -> Hashable:
        """The state at the beginning."""

    def after(self, state: Any) -> Iterator[Hashable]:
        """The states that one step of one rank makes. It raises for a step that is wrong."""

    def ended(self, state: Any) -> bool:
        """Is this where the program should end?"""


def explore(model: Model) -> int:
    """Visit all states; how many there are."""
    seen = {model.start()}
    front: list[Any] = [model.start()]
    while front:
        state = front.pop()
        reached = list(model.after(state))
        if not reached and not model.ended(state):
            raise Stuck(str(state))
        new = set(reached) - seen
        seen |= new
        front.extend(new)
    return len(seen)


def replaced(items: tuple, at: int, item: Any) -> tuple:
    return (*items[:at], item, *items[at + 1 :])
