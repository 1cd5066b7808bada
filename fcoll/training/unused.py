"""Parameters without a gradient: found in the autograd graph, and agreed on by all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.training import _torch
from fcoll.training.bucket_collectives import Collectives, Started


def not_reached(outputs: Iterable[Tensor], accumulators: Sequence[Any]) -> list[int]:
    """Which of the accumulators (by index) a backward pass from these outputs does not reach."""
    todo = [x.grad_fn for x in outputs if x.grad_fn is not None]
    reached: set[Any] = set(todo)  # the nodes themselves: kept alive, they stay distinct
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in reached:
                reached.add(node)
                todo.append(node)
    # an output may be a parameter itself
    reached.update(gradient_accumulator(x) for x in outputs if x.requires_grad and x.is_leaf)
    return [i for i, node in enumerate(accumulators) if node not in reached]


def gradient_accumulator(param: Tensor) -> Any:
    """The node that adds to the gradient of a leaf. It lives as long as somebody holds it."""
    return torch.autograd.graph.get_gradient_edge(param).node


_warned = False


def warn_all_used() -> None:
    """Warn, once, that looking for unused parameters costs time."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "find_unused_parameters=True was specified in DDP constructor, but did not find any "
            "unused parameters in the forward pass. The autograd graph is walked for it in every "
            "iteration: turn it off if the model always uses all its parameters.",
            stacklevel=3,
        )


class UsedMap:
    """Which parameters some rank has used: a gradient that nobody computed is left as it is.

    It is kept locally, added up at the end of a backward pass, and read only if a parameter was not
    used here.
    """

    def __init__(self, n: int, device: torch.device) -> None:
        self.local = [0] * n
        self.on_device = torch.zeros(n, dtype=torch.int32, device=device)
        self._started: Started | None = None
        self._known = False

    def start(self, group: Collectives, used: list[int]) -> None:
        """Add up over the ranks what was used here."""
        self.local = used
        self.on_device.copy_(torch.tensor(self.local, dtype=torch.int32))
        self._started = group.sum_by_group_(self.on_device)

    def unused(self, index: int) -> bool:
        """Has no rank used the parameter?"""
        if not self.local[index] and not self._known:
            self.finish()
            # without values: what holds here holds for all
            if not _torch.has_no_data(self.on_device):
                self.local = self.on_device.tolist()
            self._known = True
        return not self.local[index]

    def finish(self) -> None:
        """Wait for the sum, if nobody has."""
        if self._started is not None:
            self._started.wait()
            self._started = None

    def reset(self) -> None:
        """For the next iteration of a graph that may change."""
        self.finish()
        self.local = [0] * len(self.local)
        self._known = False
