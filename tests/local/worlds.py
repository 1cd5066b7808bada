"""A fake process group for tests in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """torch's fake group of ``size`` ranks, this process being rank 0."""
    dist.init_process_group("fake", rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
