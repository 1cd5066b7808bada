"""Times of the iterations that are sampled: the first ten, then one in so many."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

SAMPLE_RATE = 100  # of later iterations, one in so many
ALWAYS = 10  # the first iterations


@dataclass
class Times:
    """Times in ns of one iteration, -1 where it did not come to that."""

    forward_start: int = -1
    backward_start: int = -1
    backward_end: int = -1  # of computing
    comm_start: int = -1
    comm_end: int = -1


@dataclass
class Statistics:
    """A reducer's iterations so far, and the times of the current one."""

    rate: int = SAMPLE_RATE
    iteration: int = 0
    times: Times = field(default_factory=Times)

    @property
    def sampled(self) -> bool:
        """Is this iteration looked at?"""
        i = self.iteration
        return i > 0 and (i <= ALWAYS or i % self.rate == 0)

    def forward(self) -> None:
        """An iteration begins."""
        self.iteration += 1
        self.mark("forward_start")

    def mark(self, event: str) -> None:
        """Note the time of this event, a field of Times."""
        if self.sampled:
            setattr(self.times, event, time.time_ns())
