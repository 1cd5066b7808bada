"""What a rank on one of two hosts runs: ``python -m transport.host_ranks RANK WHAT``."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import fcoll
from fcoll.errors import FcollError


def say(text: str) -> None:
    print(json.dumps(text), flush=True)


def values(rank: int) -> None:
    say(str(fcoll.symm_mem.status()))
    n = dist.get_world_size()
    for size in (3, 20_000, 1_000_003):
        parts = [(torch.arange(size) % 89 + r) / 7 for r in range(n)]
        torch.testing.assert_close(fcoll.all_reduce(parts[rank]) + 0, torch.stack(parts).sum(0))
        assert torch.equal(fcoll.all_gather_into_tensor(parts[rank]), torch.cat(parts))
    say("right")


def until_an_error(rank: int) -> None:
    """Calls without end, small and large."""
    fcoll.all_reduce(torch.ones(4))
    say("running")
    try:
        while True:
            fcoll.wait_tensor(fcoll.all_reduce(torch.ones(4)))
            fcoll.wait_tensor(fcoll.all_reduce(torch.ones(400_000)))
    except FcollError as error:
        say(f"{type(error).__name__}: {error}")
    time.sleep(0.5)  # rank 0 holds the store
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    timeout = timedelta(seconds=float(os.environ["TIMEOUT_S"]))
    dist.init_process_group("gloo", rank=rank, timeout=timeout)
    globals()[sys.argv[2]](rank)
    dist.destroy_process_group()
