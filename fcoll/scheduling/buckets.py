"""Collectives that are sent as one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """Collectives of one kind, group and dtype that become one message.

    ``members`` are the names of the starts in the order of their parts, ``waits`` their waits,
    ``numels`` the elements that each sends.
    """

    name: str
    op: str
    group: str
    dtype: str
    members: tuple[str, ...]
    waits: tuple[str, ...]
    numels: tuple[int, ...]
    bytes: int
