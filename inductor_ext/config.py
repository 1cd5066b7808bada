"""Thresholds and switches of the compiler: ``inductor_ext.config``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fcoll.costs.machine import Machine, machine_dir
from fcoll.scheduling.planner import cap_bytes, split_switch
from fcoll.scheduling.scheduler_registry import scheduler_key, scheduler_of
from inductor_ext.errors import UnknownForm, UnknownSetting

#: How a collective on shared memory may be lowered: fused with what follows, one extern call that
#: also reduces, or the kernel that eager runs.
FORMS = ("fused", "opaque", "kernel")

# Up to here reading every peer's part beats the two passes of the eager kernel. Ranks -> bytes of
# a rank's part; for other numbers of ranks the entry of the next smaller one.
_ONE_SHOT_BYTES = {2: 2 << 20, 4: 256 << 10, 8: 64 << 10, 16: 16 << 10}

# The same on GPUs that are joined by NVLink, for one-shot and for two-shot; from 9 ranks on there
# is neither. Guesses: the kernels have run on no GPU.
_CUDA_ONE_SHOT_BYTES = {2: 8 << 20, 3: 512 << 10, 5: 256 << 10, 9: 0}
_CUDA_TWO_SHOT_BYTES = {2: 8 << 20, 9: 0}


def _schedule_from_environment() -> str | None:
    named = os.environ.get("INDUCTOR_EXT_SCHEDULE", "safe")
    return None if named.lower() == "none" else named


def measured_path() -> Path:
    """Where ``fcoll calibrate`` keeps what it has measured of one-shot on this machine."""
    return machine_dir() / "one_shot.json"


def _one_shot_bytes() -> dict[int, int]:
    path = measured_path()
    measured = json.loads(path.read_text()) if path.is_file() else {}
    return _ONE_SHOT_BYTES | {int(ranks): limit for ranks, limit in measured.items()}


@dataclass
class Config:
    """What ``inductor_ext`` does to collectives; read when a graph is compiled.

    >>> with inductor_ext.config.patch(form="opaque"):
    ...     inductor_ext.config.form
    'opaque'
    """

    #: The most that is done: "fused", "opaque" or "kernel".
    form: str = field(default_factory=lambda: os.environ.get("INDUCTOR_EXT_FORM", "fused"))
    #: Ranks -> the largest part in bytes that is read in place by every peer. Defaults, or what
    #: ``fcoll calibrate`` has measured.
    one_shot_bytes: dict[int, int] = field(default_factory=_one_shot_bytes)
    #: The same for all-reduces of CUDA tensors by Triton kernels (``inductor_ext.cuda``): what is
    #: read by every peer, and what is reduced in shares. ``fcoll calibrate`` measures CPUs only.
    cuda_one_shot_bytes: dict[int, int] = field(default_factory=_CUDA_ONE_SHOT_BYTES.copy)
    cuda_two_shot_bytes: dict[int, int] = field(default_factory=_CUDA_TWO_SHOT_BYTES.copy)
    #: The order of compute and communication: the name of a scheduler of fcoll's ("safe",
    #: "overlap", one of your own), a function (Steps in, names out), or None for the order that
    #: the program has. INDUCTOR_EXT_SCHEDULE, "none" for None.
    schedule: Any = field(default_factory=_schedule_from_environment)
    #: The memory that a plan may hold: bytes, relative to the program's own order, or None. "safe"
    #: never holds more than that order, whatever this is.
    memory_cap: int | str | None = "+5%"
    #: May "overlap" and "search" run large collectives, and the products around them, in chunks?
    #: "sums": and add products over rows (gradients of weights) up by chunks, which rounds more.
    splits: bool | str = False
    #: Whose prices plans are made with: a Machine, its name, a TOML file. None: what ``fcoll
    #: calibrate`` measured, else a preset. All ranks must have the same.
    machine: Any = None
    #: The same for collectives of CPU tensors that process groups carry; None: as ``machine`` if
    #: that is given, else what ``fcoll calibrate --gloo`` measured, or a preset.
    network: Any = None
    #: All-reduces that are next to each other and not larger than this are sent as one by a
    #: schedule that does not price buckets ("overlap" and "search" do).
    merge_bytes: int = 32 << 10
    #: Work between a start and its wait that is worth a call of its own for each: a matmul, or
    #: a result of this many bytes.
    split_bytes: int = 256 << 10
    #: Compare what the ranks of a group are about to issue when a graph first runs.
    compare: bool = True
    #: Say on stderr what was done to each collective, and why not more. INDUCTOR_EXT_LOG=1.
    log: bool = field(default_factory=lambda: os.environ.get("INDUCTOR_EXT_LOG", "0") == "1")

    def __setattr__(self, name: str, value: Any) -> None:
        _check(name, value)
        super().__setattr__(name, value)

    @property
    def overlap(self) -> bool:
        """Is there a schedule? Setting it to False is ``schedule = None``, to True "safe"."""
        return self.schedule is not None

    @overlap.setter
    def overlap(self, on: bool) -> None:
        if on != self.overlap:
            self.schedule = "safe" if on else None

    def one_shot_limit(self, n: int) -> int:
        """The largest part in bytes that n ranks read from each other in place."""
        return _limit(self.one_shot_bytes, n)

    def cuda_limits(self, n: int) -> tuple[int, int]:
        """The largest parts of n ranks in bytes that are reduced by one-shot and by two-shot."""
        return _limit(self.cuda_one_shot_bytes, n), _limit(self.cuda_two_shot_bytes, n)

    def key(self) -> str | None:
        """The settings that decide what is generated, for caches; None if that is unknown."""
        from inductor_ext import graph_prices
        from inductor_ext.lower.cuda import enabled_groups

        apart = ("log", "schedule", "machine", "network")
        settings = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in apart]
        planned = scheduler_key(self.schedule)
        if planned is None:
            return None
        return repr((settings, enabled_groups(), planned, graph_prices.key()))

    @contextmanager
    def patch(self, **changes: Any) -> Iterator[None]:
        """With some settings changed, and put back at the end."""
        for name, value in changes.items():
            _check(name, value)
        before = {name: getattr(self, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)


def _check(name: str, value: Any) -> None:
    """Raise unless there is such a setting, and the value is one of those it may have."""
    names = [f.name for f in fields(Config)]
    if name not in (*names, "overlap"):
        raise UnknownSetting(name=name, known=", ".join(names))
    if name == "form" and value not in FORMS:
        raise UnknownForm(form=value, known=", ".join(FORMS))
    if name == "schedule" and value is not None:
        scheduler_of(value)
    if name in ("machine", "network") and value is not None:
        Machine.of(value)
    if name == "memory_cap":
        cap_bytes(value, 1)
    if name == "splits":
        split_switch(value)


def _limit(sizes: dict[int, int], n: int) -> int:
    """The size of n ranks: that of the largest number of ranks in the table up to n."""
    limits = [size for ranks, size in sorted(sizes.items()) if ranks <= n]
    return limits[-1] if limits else 0


config = Config()
