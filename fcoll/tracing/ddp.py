"""torch's DistributedDataParallel in a trace: its reducer is C++ and needs data to work on.

One written in Python takes its place: fcoll.training's, looked up when a trace begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from fcoll.plugins import plugin


class Reducers(Protocol):
    """What traces need of reducers that can be traced."""

    def made(self) -> AbstractContextManager[None]:
        """Inside, modules that are wrapped get one."""

    def traced(
        self, modules: Iterable[torch.nn.Module], notes: list[str]
    ) -> AbstractContextManager[None]:
        """Inside, modules that were wrapped before have one; notes say what is in its buckets."""


def made() -> AbstractContextManager[None]:
    return _reducers().made()


def traced(modules: Iterable[torch.nn.Module], notes: list[str]) -> AbstractContextManager[None]:
    return _reducers().traced(modules, notes)


def _reducers() -> Reducers:
    return plugin("reducers")
