"""Run a function on local ranks: as one of torchrun's, or on new ones."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def launch(
    main: Callable[..., Any], *args: Any, world_size: int = 2, backend: str = "gloo"
) -> None:
    """Call ``main(*args)`` on every rank of a world with a process group.

    Started by torchrun, this process is one rank and torchrun says how many there are. Started by
    plain Python, ``world_size`` processes are spawned and waited for; if one fails, its traceback
    is raised and the others are ended. ``main`` must be importable: a function of a module.

    The cores are shared out: each local rank gets its part of them as threads.
    """
    if dist.is_torchelastic_launched():
        _rank(int(os.environ["RANK"]), main, args, int(os.environ["WORLD_SIZE"]), backend, "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/store"
        torch.multiprocessing.spawn(
            _rank, (main, args, world_size, backend, meet), nprocs=world_size
        )


def _rank(
    rank: int, main: Callable[..., Any], args: Any, world_size: int, backend: str, meet: str
) -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=world_size)
    try:
        main(*args)
    finally:
        dist.destroy_process_group()
