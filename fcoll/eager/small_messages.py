"""What ranks tell one another beside a program's tensors: numbers and small Python objects.

Collectives carry it, not the group's store: a rank that makes another call instead is an error that
names both calls, and it works on simulated ranks and in fake worlds.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.eager import dispatch
from fcoll.groups import Group


def gather_numbers(group: Group, numbers: Sequence[int], device: Any) -> list[list[int]]:
    """Every rank's numbers, in rank order."""
    if group.n == 1:
        return [list(numbers)]
    everyone = gathered(torch.tensor([list(numbers)], device=device), group)
    return [list(numbers)] * group.n if is_fake(group) else everyone.tolist()


def gather_objects(obj: Any, group: Group) -> list[Any]:
    """Every rank's small Python object, in rank order; the same list on each."""
    if group.n == 1 or is_fake(group):
        return [obj] * group.n
    pickled = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    lengths = [n for (n,) in gather_numbers(group, [pickled.numel()], device_of(group))]
    parts = gathered(pickled.to(device_of(group)), group, lengths).cpu().split(lengths)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def gathered(x: Tensor, group: Group, sizes: list[int] | None = None) -> Tensor:
    """The ranks' tensors one behind the other."""
    return dispatch.call("all_gather_into_tensor", x, group.n, group.name, 0, sizes)


def device_of(group: Group) -> str:
    """Where messages of a group are."""
    return "cpu" if not group.serves or "cpu" in group.serves else group.serves[0]


def is_fake(group: Group) -> bool:
    """Is it of a fake world, so that nothing is sent?"""
    return not group.serves
