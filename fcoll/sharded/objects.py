"""Small Python objects from every rank of a group, over fcoll's collectives."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from fcoll import functions
from fcoll.groups import Group
from fcoll.sharded.asking import is_fake


def all_gather_objects(obj: Any, group: Group) -> list[Any]:
    """Every rank's object, in rank order; the same list on each."""
    if group.n == 1 or is_fake(group):
        return [obj] * group.n
    device = "cpu" if not group.serves or "cpu" in group.serves else group.serves[0]
    card = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(device)
    length = torch.tensor([card.numel()], device=device)
    lengths = functions.wait_tensor(functions.all_gather_into_tensor(length, group.name)).tolist()
    cards = functions.wait_tensor(functions.all_gather_into_tensor(card, group.name, sizes=lengths))
    return [pickle.loads(part.numpy().tobytes()) for part in cards.cpu().split(lengths)]
