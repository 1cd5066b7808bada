"""What is known of certain values of a ring, found again by the value: a root's square, say."""

from __future__ import annotations

import torch
from torch import Tensor

Table = tuple[Tensor, Tensor]  # elements and facts


class KnownValues:
    """A table from elements to what is known of each. By chance another value is in it with the
    number of entries over 2^48."""

    def __init__(self) -> None:
        self._sorted: list[Table] = []  # each no more than half as long as the one before
        self._added: list[Table] = []

    def __bool__(self) -> bool:
        return bool(self._added or self._sorted)

    def add(self, elements: Tensor, facts: Tensor) -> None:
        if elements.numel():
            self._added.append((elements.flatten(), facts.expand(elements.shape).flatten()))

    def find(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which elements are in it, and what is known of them (of others anything)."""
        if self._added:
            self._merge()
        is_known, known = _found_in(self._sorted[0], x)
        for table in self._sorted[1:]:
            here, facts = _found_in(table, x)
            is_known, known = is_known | here, torch.where(here, facts, known)
        return is_known, known

    def _merge(self) -> None:
        """Sort what was added, with the tables that are not much longer."""
        tables, self._added = self._added, []
        count = sum(len(elements) for elements, _ in tables)
        while self._sorted and len(self._sorted[-1][0]) < 2 * count:
            tables.append(self._sorted.pop())
            count += len(tables[-1][0])
        elements, facts = (torch.cat(side) for side in zip(*tables, strict=True))
        order = elements.argsort()
        self._sorted.append((elements[order], facts[order]))


def _found_in(table: Table, x: Tensor) -> tuple[Tensor, Tensor]:
    elements, facts = table
    place = torch.searchsorted(elements, x.contiguous()).clamp(max=len(elements) - 1)
    return elements[place] == x, facts[place]
