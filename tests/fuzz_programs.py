"""Random programs on shared memory whose calls are under way side by side, against an oracle.

    python tests/fuzz_programs.py --seconds 600 --seed 3 --ranks 4

All ranks of a program make the same calls in the same order: collectives on two groups that start
now and are waited for later, sums in place of the buckets of two reducers, calls that are complete
on return; some of them in a second thread. When it waits for a result, and whether it ever does, is
each rank's own. A compiled program is a step whose ranks use different results, and one of which
recompiles alone. Values are small integers, so that the oracle is exact. A program follows from the
seed and its number alone: a failure prints the command that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from ranks import RankError, RankPool

import fcoll
from fcoll.groups import resolve
from fcoll.transport import shared_memory
from fcoll.transport.native import build

KINDS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "sum"]
SIZES = (1, 7, 64, 1000, 20_000, 100_000)  # elements of a rank's part
PLACES, PAGE = 3, 4096  # of a reducer's buckets
GROUP_S = 20.0
Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """``waits[r]``: rank r waits for it after the call of that number; None if it never does."""

    kind: str
    group: int
    size: int
    now: bool  # waited for at once by all
    thread: int
    place: int  # of a sum: the reducer's number and the bucket's
    waits: tuple[int | None, ...]


# -- random programs ---


def program(number: int, seed: int, n: int) -> list[Call]:
    random = Random(f"{seed}/{n}/{number}")
    length = random.choice((3, 8, 20, 60))
    threads = random.random() < 0.3
    calls = []
    for i in range(length):
        now = random.random() < 0.2
        calls.append(
            Call(
                kind=random.choice(KINDS),
                group=random.randrange(2),
                size=random.choice(SIZES[: random.choice((3, 4, 6))]),
                now=now,
                thread=random.randrange(2) if threads else 0,
                place=random.randrange(2 * PLACES),
                waits=tuple(i if now else when(random, i, length) for _ in range(n)),
            )
        )
    return calls


def when(random: Random, i: int, length: int) -> int | None:
    return None if random.random() < 0.2 else random.randrange(i, min(length, i + 12))


# -- the oracle ---


def part(rank: int, call: int, size: int) -> Tensor:
    return torch.arange(size).remainder(5).add(10.0 * (rank + 1) + call % 7)


def given(c: Call, i: int, rank: int, n: int) -> Tensor:
    if c.kind in ("reduce_scatter", "all_to_all"):
        return torch.cat([part(rank, i + to, c.size) for to in range(n)])
    return part(rank, i, c.size)


def expected(c: Call, i: int, rank: int, n: int) -> Tensor:
    match c.kind:
        case "all_reduce" | "sum":
            return sum_of(part(r, i, c.size) for r in range(n))
        case "reduce_scatter":
            return sum_of(part(r, i + rank, c.size) for r in range(n))
        case "all_gather":
            return torch.cat([part(r, i, c.size) for r in range(n)])
        case "all_to_all":
            return torch.cat([part(r, i + rank, c.size) for r in range(n)])
        case _:
            return part(i % n, i, c.size)


def sum_of(parts: Any) -> Tensor:
    return torch.stack(list(parts)).sum(0)


# -- on the ranks ---


class Player:
    """One rank's groups and reducers, for many programs."""

    def __init__(self, rank: int) -> None:
        self.rank, self.n = rank, dist.get_world_size()
        self.groups = [
            dist.new_group(range(self.n), timeout=timedelta(seconds=GROUP_S)) for _ in range(2)
        ]
        self.bytes = -(-4 * max(SIZES) // PAGE) * PAGE
        self.buckets = []
        for group in self.groups:
            fcoll.barrier(group)
            handle = shared_memory.handle_of(resolve(group))
            made = [build.fast.SharedBuckets(handle, PLACES * self.bytes) for _ in range(2)]
            self.buckets.append(made)

    def play(self, calls: Sequence[Call]) -> list[str]:
        """What came out wrong."""
        self.wrong: list[str] = []
        self.started: dict[int, tuple[Call, Tensor]] = {}
        self.summing: dict[tuple[int, int], int] = {}  # group and place -> the call that is there
        with ThreadPoolExecutor(1) as other:
            for i, c in enumerate(calls):
                if c.thread:
                    other.submit(self.step, i, c, calls).result()
                else:
                    self.step(i, c, calls)
        for i in [i for i, (c, _) in self.started.items() if c.kind == "sum"]:
            self.wait(i)  # buckets are a reducer's: nobody drops them
        for group in self.groups:
            fcoll.barrier(group)
        return self.wrong

    def step(self, i: int, c: Call, calls: Sequence[Call]) -> None:
        x = given(c, i, self.rank, self.n)
        self.started[i] = c, self.start(c, i, x)
        x.fill_(-1)  # the argument is the caller's again
        for k in [k for k in self.started if calls[k].waits[self.rank] == i]:
            self.wait(k)
        for k in [k for k in self.started if calls[k].waits[self.rank] is None]:
            if calls[k].kind != "sum" and k + 3 < i:
                del self.started[k]  # nobody ever looks at it

    def start(self, c: Call, i: int, x: Tensor) -> Tensor:
        group = self.groups[c.group]
        match c.kind:
            case "all_reduce":
                return fcoll.all_reduce(x, "sum", group)
            case "all_gather":
                return fcoll.all_gather_into_tensor(x, group)
            case "reduce_scatter":
                return fcoll.reduce_scatter_tensor(x, "sum", group)
            case "all_to_all":
                return fcoll.all_to_all_single(x, group)
            case "broadcast":
                return fcoll.broadcast(x, i % self.n, group)
        return self.sum(c, i, x)

    def sum(self, c: Call, i: int, x: Tensor) -> Tensor:
        reducer, bucket = divmod(c.place, PLACES)
        busy = self.summing.get((c.group, c.place))
        if busy in self.started:
            self.wait(busy)
        self.summing[c.group, c.place] = i
        memory, at = self.buckets[c.group][reducer], bucket * self.bytes
        y = memory.tensor(at, c.size, x)
        y.copy_(x)
        name = self.groups[c.group].group_name
        return build.fast.sum_in_place(memory, at, y, name, c.place)

    def wait(self, i: int) -> None:
        c, y = self.started.pop(i)
        found, right = fcoll.wait_tensor(y), expected(c, i, self.rank, self.n)
        if not torch.equal(found, right):
            k = int((found != right).nonzero()[0])
            self.wrong.append(f"call {i}, {c}: [{k}] is {found[k]}, not {right[k]}")


def play(rank: int, programs: Sequence[Sequence[Call]]) -> list[list[str]]:
    player = Player(rank)
    try:
        return [player.play(calls) for calls in programs]
    finally:
        for group in player.groups:
            dist.destroy_process_group(group)


# -- compiled ---


def play_compiled(rank: int, number: int, seed: int) -> list[str]:
    """A step whose ranks use different results; one rank recompiles between its calls."""
    n = dist.get_world_size()
    random = Random(f"{seed}/{n}/{number}/compiled")
    count, size = random.choice((2, 3, 5)), random.choice((4, 130, 1000))
    uses = [[j for j in range(count) if random.random() < 0.5] for _ in range(n)]
    other = random.randrange(n)

    def step(x: Tensor, scale: int) -> Tensor:
        h, ys = x, []
        for j in range(count):
            y = fcoll.all_reduce(h * (j + 1))
            ys.append(y)
            h = x + y * 0 if j % 2 else x * 1
        total = x * scale
        for j in uses[rank]:
            total = total + ys[j]
        return total

    torch._dynamo.reset()
    made = torch.compile(step, backend="fcoll", dynamic=False)
    wrong = []
    for k, scale in enumerate((1, 1, 2 if rank == other else 1, 1)):
        x = part(rank, k, size)
        every = sum_of(part(r, k, size) for r in range(n))
        right = x * scale + sum(every * (j + 1) for j in uses[rank])
        found = made(x, scale)
        if not torch.equal(found, right):
            wrong.append(f"call {k}, uses {uses}, rank {other} recompiles: {found[0]}, {right[0]}")
    return wrong


# -- many of them ---


class Fuzzer:
    """Programs of one seed, in batches: a batch is one request to the ranks."""

    def __init__(self, pool: RankPool, seed: int) -> None:
        self.pool, self.seed, self.done, self.compiled = pool, seed, 0, 0

    def run(self, numbers: Sequence[int]) -> str:
        """The first fault of these programs, with the command that repeats it; or empty."""
        programs = [program(i, self.seed, self.pool.world_size) for i in numbers]
        try:
            by_rank = self.pool.run(play, programs, timeout=2 * GROUP_S + len(programs))
        except RankError as error:
            if len(numbers) == 1:
                return self.told(numbers[0], [str(error)])
            return next(filter(None, (self.run([i]) for i in numbers)), f"not again: {error}")
        for number, wrong in zip(numbers, zip(*by_rank, strict=True), strict=True):
            if any(wrong):
                return self.told(
                    number, [f"rank {r}: {w}" for r, ws in enumerate(wrong) for w in ws]
                )
            self.done += 1
        return ""

    def run_compiled(self, number: int) -> str:
        try:
            by_rank = self.pool.run(play_compiled, number, self.seed, timeout=170)
        except RankError as error:
            return self.told(number, [str(error)], " --compiled")
        self.compiled += 1
        wrong = [f"rank {r}: {w}" for r, ws in enumerate(by_rank) for w in ws]
        return self.told(number, wrong, " --compiled") if wrong else ""

    def told(self, number: int, found: list[str], more: str = "") -> str:
        ranks = self.pool.world_size
        again = f"--seed {self.seed} --ranks {ranks} --only {number}{more}"
        return "\n".join([*found[:20], f"again: python tests/fuzz_programs.py {again}"])

    def run_for(
        self, seconds: float, batch: int, compiled: bool, say: Callable[[str], Any] | None = None
    ) -> str:
        start, first = time.monotonic(), 0
        while time.monotonic() - start < seconds:
            fault = self.run_compiled(first) if compiled else self.run(range(first, first + batch))
            if fault:
                return fault
            first += 1 if compiled else batch
            if say:
                say(f"{time.monotonic() - start:6.0f} s  {first} programs")
        return ""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 5))
    parser.add_argument("--only", type=int, help="the number of one program")
    parser.add_argument("--compiled", action="store_true", help="compiled steps instead")
    args = parser.parse_args(argv)
    with RankPool(args.ranks, {"FCOLL_NATIVE": "1"}) as pool:
        fuzzer = Fuzzer(pool, args.seed)
        if args.only is not None:
            for call in program(args.only, args.seed, args.ranks):
                print(call)
            fault = fuzzer.run_compiled(args.only) if args.compiled else fuzzer.run([args.only])
        else:
            say = lambda text: print(text, flush=True)  # noqa: E731
            fault = fuzzer.run_for(args.seconds, 50, args.compiled, say)
    print(fault or "nothing found")
    return int(bool(fault))


if __name__ == "__main__":
    import fuzz_programs  # by this name, so that the ranks find what is pickled

    sys.exit(fuzz_programs.main(sys.argv[1:]))
