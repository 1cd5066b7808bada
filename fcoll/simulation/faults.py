"""What can go wrong in a simulation: a rank dies or is late, a message is lost or overtaken.

    fcoll.simulate_ranks(train, 4, faults=[fcoll.faults.Kill(rank=2, at=10)])

All are deterministic: the same faults give the same run. Calls and messages are counted from 1.
"""

from __future__ import annotations

import random as _random
from dataclasses import dataclass


@dataclass(frozen=True)
class Kill:
    """The rank dies when it is about to make its ``at``-th communicating call.

    Ranks that wait for it, or call a collective with it later, get PeerDied. The rank's result is
    this object. (Its ``finally`` blocks run, as those of a killed process would not.)
    """

    rank: int
    at: int = 1


@dataclass(frozen=True)
class Delay:
    """The rank makes its ``at``-th communicating call this many seconds late, on a virtual clock.

    Ranks that are earlier go first, so messages from any rank may be received in another order, and
    waits that take longer than their group's timeout are a CollectiveTimeout. Nothing sleeps.
    """

    rank: int
    seconds: float
    at: int = 1


@dataclass(frozen=True)
class Drop:
    """The ``at``-th message from one rank to another is lost; its sender does not notice."""

    src: int
    dst: int
    at: int = 1


@dataclass(frozen=True)
class Reorder:
    """The ``at``-th message from one rank to another is overtaken by the next, if both are under
    way at once. It shows if they have the same tag."""

    src: int
    dst: int
    at: int = 1


Fault = Kill | Delay | Drop | Reorder


def random(world_size: int, seed: int, count: int = 1, calls: int = 20) -> tuple[Fault, ...]:
    """Some faults, the same for the same seed: each at one of the first ``calls`` calls.

    >>> from fcoll import faults
    >>> faults.random(4, seed=3) == faults.random(4, seed=3)
    True
    """
    chosen = _random.Random(seed)
    faults: list[Fault] = []
    for _ in range(count):
        rank, at = chosen.randrange(world_size), chosen.randint(1, calls)
        other = (rank + chosen.randint(1, max(1, world_size - 1))) % world_size
        seconds = round(chosen.uniform(0.0, 10.0), 3)
        kinds = Kill(rank, at), Delay(rank, seconds, at), Drop(rank, other, at)
        faults.append(chosen.choice((*kinds, Reorder(rank, other, at))))
    return tuple(faults)
