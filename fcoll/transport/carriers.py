"""Which carrier serves a group's tensors: threads if its ranks are simulated, shared memory where
the group has it, else c10d."""

from __future__ import annotations

from typing import Any

import torch

from fcoll.groups import Group
from fcoll.transport import process_group, shared_memory, threads
from fcoll.transport.protocol import Carrier


def carrier_of(g: Group, device: torch.device) -> Carrier:
    """All ranks of a group get the same: they agreed on it at its first collective."""
    if g.simulated:
        return threads
    shared: Any = shared_memory
    return shared if device.type == "cpu" and shared_memory.handle_of(g) else process_group


def carrier_of_pairs(g: Group) -> Carrier:
    """For messages between two ranks. The others do not call, so nothing is agreed on here."""
    return threads if g.simulated else process_group
