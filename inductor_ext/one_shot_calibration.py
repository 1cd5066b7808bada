"""Measure up to which size reading every peer's part in place beats the kernel of eager."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fcoll
from fcoll.eager.launch import launch
from inductor_ext.config import config, measured_path

SIZES = tuple(4096 << k for k in range(12))  # 4 KiB to 8 MiB, all that a comm buffer may have
ROUNDS = 9  # of each way, in turns; the median counts


def calibrate_one_shot(ranks: int = 2) -> int:
    """Measure with this many local ranks, keep the result for ``inductor_ext.config``, return it.

    The limit is the size up to which one-shot wins at every size; 0 if it never does.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        launch(_measure, str(file), world_size=ranks)
        times = json.loads(file.read_text())
    limit = 0
    for size, (in_place, kernel) in zip(SIZES, times, strict=True):
        if in_place > kernel:
            break
        limit = size
    path = measured_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, str(ranks): limit}))
    config.one_shot_bytes[ranks] = limit
    return limit


def _measure(path: str) -> None:
    """Runs on every rank."""
    fcoll.all_reduce(torch.ones(1))  # connects the group
    times = [_compare(size) for size in SIZES] if fcoll.symm_mem.status().shared else []
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(times or [(1, 0)] * len(SIZES)))


def _compare(nbytes: int) -> tuple[float, float]:
    """The time of a call in us: read in place, and by the kernel. The part itself is there."""
    group, x = dist.group.WORLD.group_name, torch.ones(nbytes // 4)  # type: ignore[union-attr]
    native = torch.ops.fcoll_native

    def in_place() -> Any:
        own = native.claim(group, 0, x.shape, x.stride(), x.dtype, x.device)
        return native.meet_and_reduce(own, "all_reduce", "sum", group, -1)

    def kernel() -> Any:
        return fcoll.wait_tensor(fcoll.all_reduce(x))

    calls = max(3, min(200, (4 << 20) // nbytes))
    samples = [(_each_us(in_place, calls), _each_us(kernel, calls)) for _ in range(ROUNDS)]
    medians = torch.tensor([statistics.median(way) for way in zip(*samples, strict=True)])
    dist.all_reduce(medians)  # the same decision on all ranks
    return float(medians[0]), float(medians[1])


def _each_us(call: Callable[[], Any], calls: int) -> float:
    fcoll.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6
