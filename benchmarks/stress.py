"""Stress shared memory: random collectives on 4 ranks, every result checked; then ranks that die.

python benchmarks/stress.py [--calls 1000000] [--kills 200]

Calls differ in kind, dtype, size (0 to 1 MiB, mostly small), sub-group and in when they are waited
for; ranks now and then dawdle. Kills: in a new world of 3, one rank is killed at a random moment
and the others must raise PeerDied, naming it, within 0.5 s, and have no file of the dead group's
memory left once they destroy it. Calls may not leave files open either.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import fcoll

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
GROUPS = ((0, 1, 2, 3), (0, 1), (2, 3), (1, 3), (0, 2), (3, 1, 0))
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "coalesced")


PERIOD = 7
MOST = 4 * 2**17 + PERIOD
_WHOLE = {dtype: (torch.arange(MOST) % PERIOD).to(dtype) for dtype in DTYPES}


def part(rank: int, count: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    """What a rank brings: small whole numbers, so that every dtype adds them exactly."""
    begin = (rank * 3 + salt) % PERIOD
    return _WHOLE[dtype][begin : begin + count]


@functools.cache
def _folded(fold: str, ranks: tuple, dtype: torch.dtype, salt: int) -> torch.Tensor:
    """Two hundred periods of what the ranks' parts reduce to."""
    stacked = torch.stack([part(r, PERIOD, torch.int64, salt) for r in ranks])
    return getattr(torch, fold)(stacked, 0).to(dtype).repeat(200)


def folded(fold: str, ranks: tuple, begin: int, count: int, dtype: torch.dtype, salt: int):  # type: ignore
    """Elements [begin, begin + count) of the ranks' parts reduced."""
    begin %= PERIOD
    whole = _folded(fold, ranks, dtype, salt % PERIOD)
    if begin + count > len(whole):
        whole = whole.repeat(-(-(begin + count) // len(whole)))
    return whole[begin : begin + count]


def call(kind: str, ranks: tuple, me: int, count: int, dtype: torch.dtype, salt: int):  # type: ignore
    """(the result, what it must be) of one collective on this rank."""
    n, group, i = len(ranks), list(ranks), ranks.index(me)
    mine = part(me, count * n, dtype, salt)
    if kind == "all_reduce":
        want = folded("sum", ranks, 0, count * n, dtype, salt)
        return fcoll.all_reduce(mine, "sum", group), want
    if kind == "all_gather":
        parts = [part(r, count * n, dtype, salt) for r in ranks]
        return fcoll.all_gather_into_tensor(mine, group), torch.cat(parts)
    if kind == "reduce_scatter":
        want = folded("amax", ranks, i * count, count, dtype, salt)
        return fcoll.reduce_scatter_tensor(mine, "max", group), want
    if kind == "all_to_all":
        parts = [part(r, count * n, dtype, salt)[i * count : (i + 1) * count] for r in ranks]
        return fcoll.all_to_all_single(mine, group), torch.cat(parts)
    if kind == "broadcast":
        return fcoll.broadcast(mine, salt % n, group), part(ranks[salt % n], count * n, dtype, salt)
    a, b = fcoll.all_reduce_coalesced([mine, mine[:count]], "min", group)
    return b + a[:count] * 0, folded("amin", ranks, 0, count, dtype, salt)


def open_files() -> list[str]:
    """What this process has open: memory of groups, processes it watches, sockets, files."""
    kept = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            kept.append(os.readlink(f"/proc/self/fd/{fd}"))
    return kept


def calls(total: int, seed: int) -> None:
    me, waiting = dist.get_rank(), []
    shared = random.Random(seed)  # the same choices on every rank
    own = random.Random(seed + 1 + me)
    start, settled_files = time.monotonic(), 0

    def settle() -> None:
        for i, got, want in waiting:
            assert torch.equal(fcoll.wait_tensor(got), want), f"call {i} is wrong on rank {me}"
        waiting.clear()

    for i in range(total):
        kind, ranks = shared.choice(KINDS), shared.choice(GROUPS)
        dtype, salt = shared.choice(DTYPES), shared.randrange(1000)
        exponent = shared.random() ** 4 * 17
        count = int(2**exponent) - 1 if shared.random() > 0.001 else 65_536
        if me in ranks:
            waiting.append((i, *call(kind, ranks, me, count, dtype, salt)))
        if own.random() < 0.001:
            time.sleep(own.random() * 0.002)
        if shared.random() < 0.3:
            settle()
        if i == total // 10:  # every group and every thread has been used by now
            settled_files = len(open_files())
        if me == 0 and i % 20_000 == 19_999:
            rate = (i + 1) / (time.monotonic() - start)
            print(f"\r{i + 1} of {total} calls, {rate:.0f}/s ", end="", file=sys.stderr, flush=True)
    settle()
    assert len(open_files()) <= settled_files, f"files left open on rank {me}: {open_files()}"
    if me == 0:
        took = time.monotonic() - start
        print(f"{total} calls on 4 ranks, all results right, in {took:.0f} s", flush=True)


# -- ranks that die ---


def mortal(rank: int, store: str, pipe) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    x = torch.ones(300)
    fcoll.wait_tensor(fcoll.all_reduce(x))
    pipe.send("ready")
    try:
        while True:
            for times in (1, 700, 1400):  # in a slot, in many, through the window
                fcoll.wait_tensor(fcoll.all_reduce(x.repeat(times)))
                fcoll.wait_tensor(fcoll.all_gather_into_tensor(x.repeat(times)))
    except fcoll.errors.PeerDied as error:
        raised = time.monotonic()
        dist.destroy_process_group()
        left = [f for f in open_files() if "memfd" in f or "pidfd" in f]
        pipe.send((raised, error.rank, left))
    os._exit(0)


def kill_one(choice: random.Random) -> tuple[float, bool]:
    """Kill a rank of a new world; (the slowest survivor's delay, did all name the right rank)."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(3)]
        made = [
            context.Process(target=mortal, args=(r, f"{folder}/s", pipes[r][1])) for r in range(3)
        ]
        for process in made:
            process.start()
        for pipe, _ in pipes:
            assert pipe.poll(60) and pipe.recv() == "ready"
        time.sleep(choice.random() * 0.05)
        victim = choice.randrange(3)
        killed = time.monotonic()
        os.kill(made[victim].pid, signal.SIGKILL)
        delays, right = [], True
        for rank, (pipe, _) in enumerate(pipes):
            if rank != victim:
                if not pipe.poll(10):
                    return 10.0, False
                raised, named, files = pipe.recv()
                assert not files, f"rank {rank} has files of the dead group open: {files}"
                delays.append(raised - killed)
                right &= named == victim
        for process in made:
            process.join(10)
        return max(delays), right


def kills(total: int, seed: int) -> None:
    choice, slowest = random.Random(seed), 0.0
    before = set(os.listdir("/dev/shm"))
    for i in range(total):
        delay, right = kill_one(choice)
        assert right and delay < 0.5, f"kill {i}: {delay:.3f} s, right rank named: {right}"
        slowest = max(slowest, delay)
        print(f"\r{i + 1} of {total} kills ", end="", file=sys.stderr, flush=True)
    left = sorted(set(os.listdir("/dev/shm")) - before)
    print(f"{total} kills: survivors raised in at most {slowest * 1e3:.0f} ms; in /dev/shm: {left}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.calls:
        fcoll.launch(calls, args.calls, args.seed, world_size=4)
    torch.set_num_threads(1)
    if args.kills:
        kills(args.kills, args.seed)
