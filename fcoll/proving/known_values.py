"""What is known of certain values of a ring, found again by the value: a root's square, say."""

from __future__ import annotations

import torch
from torch import Tensor


class KnownValues:
    """A table from elements to what is known of each. By chance another value is in it with the
    number of entries over 2^48."""

    def __init__(self) -> None:
        self._added: list[tuple[Tensor, Tensor]] = []
        self._sorted: tuple[Tensor, Tensor] | None = None

    def __bool__(self) -> bool:
        return bool(self._added)

    def add(self, elements: Tensor, facts: Tensor) -> None:
        self._added.append((elements.flatten(), facts.expand(elements.shape).flatten()))
        self._sorted = None

    def find(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which elements are in it, and what is known of them (of others anything)."""
        if self._sorted is None:
            elements, facts = (torch.cat(side) for side in zip(*self._added, strict=True))
            order = elements.argsort()
            self._sorted = elements[order], facts[order]
            self._added = [self._sorted]
        elements, facts = self._sorted
        place = torch.searchsorted(elements, x.contiguous()).clamp(max=len(elements) - 1)
        return elements[place] == x, facts[place]
