"""Ranks whose compiled graphs differ: all of them are told, also when one ends at once."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import launch

import fcoll
from fcoll import lobby
from fcoll.errors import PlanMismatch

LATE_S = 1.5  # how much later one rank reads what the others have written, if they are still there


def compares_late(rank: int, port: int) -> None:
    """Rank 0 serves the store, as in a program without a launcher, and ends by its error."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        read = lobby.Lobby._without

        def read_late(self: Any, keys: list[str], look: bool) -> list[int]:
            if self.rounds == 1:
                first, until = lobby.process_of(pids[0]), time.monotonic() + LATE_S
                while lobby.alive(first) and time.monotonic() < until:
                    time.sleep(0.01)
            return read(self, keys, look)

        lobby.Lobby._without = read_late  # type: ignore[method-assign]
    op = ("sum", "max")[rank]
    torch.compile(lambda x: fcoll.all_reduce(x @ x, op) + 1, backend="fcoll")(torch.ones(4, 4))


def test_all_ranks_are_told_before_the_store_ends(compiled):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = launch(compares_late, 2, port, timeout=170, init=False, env={"FCOLL_NATIVE": "0"})
    assert [type(error) for error in done.errors] == [PlanMismatch] * 2, done.stderr
