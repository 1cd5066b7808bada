"""torch's DistributedDataParallel in a trace: its reducer is C++ and needs data to work on.

One written in Python takes its place where there is one: fcoll.training puts it here.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Reducers(Protocol):
    """What traces need of reducers that can be traced."""

    def made(self) -> AbstractContextManager[None]:
        """Inside, modules that are wrapped get one."""

    def traced(
        self, modules: Iterable[torch.nn.Module], notes: list[str]
    ) -> AbstractContextManager[None]:
        """Inside, modules that were wrapped before have one; notes say what is in its buckets."""


class _None:
    """Nobody put one here."""

    def made(self) -> AbstractContextManager[None]:
        return nullcontext()

    def traced(
        self, modules: Iterable[torch.nn.Module], notes: list[str]
    ) -> AbstractContextManager[None]:
        return nullcontext()


_reducers: Reducers = _None()


def serve(reducers: Reducers) -> None:
    """Have DistributedDataParallel run on these in traces and fake worlds."""
    global _reducers
    _reducers = reducers


def made() -> AbstractContextManager[None]:
    return _reducers.made()


def traced(modules: Iterable[torch.nn.Module], notes: list[str]) -> AbstractContextManager[None]:
    return _reducers.traced(modules, notes)
