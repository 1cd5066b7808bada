"""Prices of the collectives and the compute of a compiled graph, for the scheduler.

All ranks of a group must find the same prices, or their plans differ. They come from files and
settings, nothing is measured at compile time: the machine that ``fcoll calibrate`` measured, else
the preset "cpu"; of groups that go through a process group "local-gloo", else "cpu-gloo".
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from fcoll.costs.machine import Machine, machine_dir
from fcoll.costs.model import collective_us
from fcoll.graph.issued import Issued
from inductor_ext.config import config

GPUS = ("b200", "h100", "a100", "mi300x")


def machine_for(devices: Iterable[torch.device]) -> Machine:
    """Whose prices compute has: ``config.machine``, or that of the devices of a graph."""
    if config.machine is not None:
        return Machine.of(config.machine)
    if any(device.type == "cuda" for device in devices):
        return Machine.preset(_gpu())
    return _read("local" if _is_measured("local") else "cpu")


def network() -> Machine:
    """Whose prices collectives have that a process group carries on CPU tensors."""
    machine = config.network if config.network is not None else config.machine
    if machine is not None:
        return Machine.of(machine)
    return _read("local-gloo" if _is_measured("local-gloo") else "cpu-gloo")


def us_over(machine: Machine, call: Issued, nbytes: float) -> float:
    return float(collective_us(call.op, call.n, nbytes, machine, call.ranks))


def key() -> str:
    """All that prices are read from, for caches: figures, not the names of files."""
    cuda = Machine.preset(_gpu()) if torch.cuda.is_available() else None
    return repr((machine_for(()), network(), cuda))


def _is_measured(name: str) -> bool:
    return (machine_dir() / f"{name}.toml").is_file()


def _gpu() -> str:
    """The preset of this GPU by its name, the first of them if it has none."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((gpu for gpu in GPUS if gpu in name), GPUS[1])


def _read(name: str) -> Machine:
    path = machine_dir() / f"{name}.toml"
    return _cached(name, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=16)
def _cached(name: str, _changed: Any) -> Machine:
    return Machine.preset(name)
