"""What runs at the same time slows down: kernels beside collectives, collectives on one link.

What a machine says of it, by which the clock (fcoll/scheduling/clock.py) runs:

- while a collective is in flight, compute takes ``slowdown`` times as long;
- k collectives in flight on a link that groups share get a k-th of its rate each; one that uses two
  links has the lower of its rates;
- the host takes ``host_us`` to issue a kernel or a collective, in the order of the program, and
  never waits: nothing begins before it is issued.

Nothing here makes anything faster, so a bound on times without contention is a bound on those with
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fcoll.costs.machine import LINKS, Machine
from fcoll.graph.steps import Step


@dataclass(frozen=True)
class Contention:
    """A machine's, for a program. ``links`` are the shared links that each collective uses, by its
    id, a bit for each."""

    slowdown: float = 1.0
    host_us: float = 0.0
    links: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def of(machine: Machine, collectives: Iterable[Any]) -> Contention | None:
        """None if nothing slows down anything: there are faster ways then."""
        if machine.slowdown == 1 and not machine.host_us and not machine.shared_links:
            return None
        bits = {link: 1 << i for i, link in enumerate(LINKS)}
        shared = {link: bits[link] for link in machine.shared_links}
        links = {
            c.id: sum(shared.get(link, 0) for link in machine.links_of(c.ranks))
            for c in collectives
        }
        return Contention(machine.slowdown, machine.host_us, links)


def launches(step: Step, us: float) -> int:
    """How many kernels the host issues for a step: one for a kernel's first, one for a start."""
    if step.kind == "start" and step.collective is not None:
        return 1
    return int(step.kind != "wait" and us > 0 and step.fused_with in (None, step.name))
