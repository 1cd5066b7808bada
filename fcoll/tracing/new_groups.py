"""The groups that a program makes while it is traced: dist.new_group, new_subgroups, meshes.

The members of a group find one another by its name. torch makes that of how many groups the rank
has made before, also those that it is not in; with ``use_local_synchronization=True``, where only
members call, of the group's ranks and how many groups the rank is in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fcoll.tracing import _torch
from fcoll.tracing.values import user_line


@dataclass(frozen=True)
class NewGroup:
    """A call that makes a group; ``local``: only its members make it."""

    ranks: tuple[int, ...]
    local: bool
    source: str

    def __str__(self) -> str:
        local = ", use_local_synchronization=True" * self.local
        return f"new_group({list(self.ranks)}{local}) at {self.source}"


@contextmanager
def noted() -> Iterator[list[NewGroup]]:
    """Inside, what makes groups is written down."""
    made: list[NewGroup] = []

    def note(ranks: Sequence[int], local: bool) -> None:
        made.append(NewGroup(tuple(map(int, ranks)), local, user_line()))

    with _torch.around_new_groups(note):
        yield made


def names(rank: int, made: Sequence[NewGroup]) -> Iterator[tuple[Any, NewGroup]]:
    """The groups with what stands for their names."""
    calls = inside = 0
    for group in made:
        if group.local:
            yield ("local", group.ranks, inside), group
        else:
            yield ("number", calls), group
            calls += 1
        inside += rank in group.ranks
