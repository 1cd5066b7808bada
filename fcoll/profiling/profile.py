"""How long the collectives of a real run took on this rank, beside what was predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from fcoll.costs.machine import Machine
from fcoll.costs.model import collective_us
from fcoll.errors import NotCalibrated
from fcoll.profiling.timers import TimedCall, timers
from fcoll.simulation.baton import this_rank
from fcoll.units import show_bytes, table

__all__ = ["AlikeCalls", "Profile", "profile"]


@dataclass(frozen=True)
class AlikeCalls:
    """The calls that are alike: from the same line, on the same group, of the same size.

    Times are in microseconds, of one call in the middle of them (the median); ``sum_us`` is of all.
    ``way`` says how they went: by eager's "fast" path, as an "op" (of fcoll's or
    ``_c10d_functional``), as torch.distributed's own "c10d", or read in place by a graph that the
    fcoll backend "compiled".
    """

    op: str
    group: str
    n: int
    bytes: int  # the larger of what goes in and what comes out
    dtype: str
    phase: str  # "fwd" or "bwd"
    way: str
    calls: int
    start_us: float
    wait_us: float
    total_us: float
    sum_us: float
    predicted_us: float | None
    source: str
    part: str = ""  # of the program, beside its line: "bucket_0: head.weight, head.bias"


class Profile:
    """What was measured between the entry and the exit of a block; ``print(p)`` is a table.

    ``calls`` has every call in order, ``collectives`` a record for those that are alike. The times
    are of this rank's thread: of the call that starts a collective, and of the wait for it. What
    the rank computes between the two is in neither.
    """

    def __init__(self, machine: Machine | str | Path | None = None) -> None:
        self.calls: list[TimedCall] = []
        self.wall_us = 0.0
        self.machine, self._machine_note = _machine(machine)
        self.note = self._machine_note
        self._entered: float | None = None

    def __enter__(self) -> Profile:
        if self._entered is not None:
            raise RuntimeError("this profile is in use: make another with fcoll.profile()")
        timers.listen(self.calls)
        if this_rank() is not None:
            self.note = f"simulated ranks take turns, which are in the times; {self._machine_note}"
        self._entered = perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._entered is not None
        self.wall_us += 1e6 * (perf_counter() - self._entered)
        self._entered = None
        timers.leave(self.calls)
        # an outer profile goes on timing the waits for what was started here
        self.calls = [replace(call) for call in self.calls]

    @property
    def collectives(self) -> tuple[AlikeCalls, ...]:
        """A record for all calls that are alike, in the order of their first."""
        alike: dict[Any, list[TimedCall]] = {}
        for c in self.calls:
            key = (c.op, c.group.name, c.bytes, c.dtype, c.phase, c.way, c.source, c.part)
            alike.setdefault(key, []).append(c)
        return tuple(self._measured(calls) for calls in alike.values())

    def _measured(self, calls: Sequence[TimedCall]) -> AlikeCalls:
        c = calls[0]
        return AlikeCalls(
            op=c.op,
            group=c.group.label,
            n=c.group.n,
            bytes=c.bytes,
            dtype=c.dtype,
            phase=c.phase,
            way=c.way,
            calls=len(calls),
            start_us=median(x.start_us for x in calls),
            wait_us=median(x.wait_us for x in calls),
            total_us=median(x.total_us for x in calls),
            sum_us=sum(x.total_us for x in calls),
            predicted_us=self._predicted(c),
            source=c.source,
            part=c.part,
        )

    def _predicted(self, c: TimedCall) -> float | None:
        if self.machine is None:
            return None
        return float(collective_us(c.op, c.group.n, c.bytes, self.machine, c.group.ranks))

    @property
    def sum_us(self) -> float:
        """The time that the rank spent in calls of collectives and in waits for them."""
        return sum(c.total_us for c in self.calls)

    @property
    def share(self) -> float:
        """The part of the block's time that was spent in collectives."""
        return self.sum_us / self.wall_us if self.wall_us else 0.0

    def to_json(self) -> str:
        """The records as text, with the block's time and the machine of the predictions."""
        facts = {
            "wall_us": self.wall_us,
            "sum_us": self.sum_us,
            "share": self.share,
            "machine": self.machine.name if self.machine else None,
            "collectives": [asdict(c) for c in self.collectives],
        }
        return json.dumps(facts)

    def __str__(self) -> str:
        count = len(self.calls)
        head = (
            f"{count} collective{'s' * (count != 1)}, {self.sum_us / 1e3:.3f} ms of "
            f"{self.wall_us / 1e3:.3f} ms ({self.share:.1%}) on this rank"
        )
        return "\n".join([head, *_table(self.collectives), self.note])

    def __repr__(self) -> str:
        return f"Profile({len(self.calls)} calls, share={self.share:.3f})"


def profile(machine: Machine | str | Path | None = None) -> Profile:
    """Measure the collectives of a block on this rank: fcoll's, torch's, DTensor's, eager or
    compiled.

    Predictions are for ``machine``, or for this one if ``fcoll calibrate`` has measured it. Outside
    the block nothing is timed and nothing costs more. In it a call takes about 10 us longer and a
    wait 2, which are not in its times; an op on a process group and its wait about 70, of which
    some are. A reducer's buckets are told apart, with their parameters if it is fcoll's; of torch's
    DDP the wait is that at the end of the backward pass. On CUDA the times are those of the host.

    >>> with fcoll.profile() as p:
    ...     y = fcoll.wait_tensor(fcoll.all_reduce(torch.ones(256)))
    >>> [(c.op, c.n == n, c.bytes, c.calls) for c in p.collectives]
    [('all_reduce', True, 1024, 1)]
    >>> 0 < p.share <= 1
    True
    """
    return Profile(machine)


def _machine(machine: Machine | str | Path | None) -> tuple[Machine | None, str]:
    """The machine to predict for, and a note on it."""
    try:
        resolved = Machine.of(machine if machine is not None else "local")
    except NotCalibrated:
        if machine is not None:
            raise
        return None, "no predictions: run `fcoll calibrate` once, or pass machine="
    return resolved, f"predicted for {resolved.name}: {resolved.note}"


_HEAD = (
    *("calls", "collective", "group", "n", "each", "dtype", "phase", "way"),
    *("start us", "wait us", "total us", "all us", "predicted us", "source"),
)
_ALIGN = "><<>><<<>>>>><"


def _table(records: Sequence[AlikeCalls]) -> list[str]:
    return table([_HEAD, *map(_cells, records)], _ALIGN)


def _cells(c: AlikeCalls) -> tuple[str, ...]:
    predicted = "" if c.predicted_us is None else f"{c.predicted_us:.1f}"
    times = [f"{us:.1f}" for us in (c.start_us, c.wait_us, c.total_us, c.sum_us)]
    what = (str(c.calls), c.op, c.group, str(c.n), show_bytes(c.bytes), c.dtype, c.phase, c.way)
    return (*what, *times, predicted, f"{c.source} {c.part}".strip())
