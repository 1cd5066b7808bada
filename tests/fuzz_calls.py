"""Random calls on shared memory that agree between the ranks, or differ in one thing.

    python tests/fuzz_calls.py --seconds 600 --seed 3 --ranks 4

A trial is two or three calls. Where all ranks make the same ones, results equal the oracle's. Where
one rank's call differs in one thing, every rank raises, each later call on the group raises
GroupClosed, and a new group works. Calls are eager, several in flight, torch's own (accelerated) or
compiled. A trial follows from the seed and its number alone: a failure prints the command that
repeats it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

import cases
import compare
import torch
import torch.distributed as dist
from cases import Case
from ranks import RankError, RankPool

import fcoll
from fcoll.errors import FcollError, from_native

SHAPES = [(2, 3), (3, 2), (6,), (1, 6), (4,), (2, 2), (1,), (0, 3), (2, 1, 3), (130, 70)]
DTYPES = (*cases.FLOATS, *cases.INTS, torch.uint8, torch.uint16, torch.bool, torch.complex64)
OPS = [op for op in cases.ROWS if op not in (*cases.P2P, "wait_tensor", "barrier")]
TORCHS = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]
TORCHS += ["broadcast"]
TORCHS_DTYPES = (*cases.FLOATS, torch.int32, torch.int64)
WAYS = {"eager": 50, "in flight": 30, "accelerated": 19, "compiled": 1}  # of 100 trials
GRAPHS = 6
GROUP_S = 20.0


@dataclass(frozen=True)
class Trial:
    """``changed`` is what one rank, the victim, calls in the place of ``calls[at]``."""

    number: int
    way: str
    calls: tuple[Case, ...]
    at: int = -1
    victim: int = -1
    what: str = ""
    changed: Case | None = None
    backend: str = "aot_eager"  # of a compiled one

    def call(self, i: int, rank: int) -> Case:
        differs = self.changed is not None and (i, rank) == (self.at, self.victim)
        return self.changed if differs and self.changed else self.calls[i]

    def __str__(self) -> str:
        calls = ", ".join(map(shown, self.calls))
        if self.changed is None:
            return f"{self.way}: {calls}"
        instead = f"rank {self.victim} makes call {self.at} {shown(self.changed)}"
        return f"{self.way}: {calls}; {instead}"


def shown(case: Case) -> str:
    dtypes = ", ".join(str(d).removeprefix("torch.") for d in case.dtypes)
    return f"{case.op}({dtypes} {list(case.shapes)}, {case.args})"


# -- random trials ---


def trial(number: int, seed: int, n: int, ways: dict[str, int] = WAYS) -> Trial:
    random = Random(f"{seed}/{n}/{number}")
    way = random.choices(list(ways), list(ways.values()))[0]
    ops = TORCHS if way == "accelerated" else OPS
    if way in ("in flight", "compiled"):
        ops = [op for op in OPS if not cases.COLLECTIVES[op].mutates]
    calls = tuple(
        random_case(random, random.choice(ops), n, way) for _ in range(random.choice((2, 3)))
    )
    if random.random() < 0.5:
        return Trial(number, way, calls)
    at, victim = random.randrange(len(calls)), random.randrange(n)
    changes = list(changes_of(random, calls[at], n, way, ops))
    what, changed = random.choice(changes)
    return Trial(number, way, calls, at, victim, what, changed)


def random_case(random: Random, op: str, n: int, way: str) -> Case:
    args = cases.default_args(op, n)
    dtypes = dtypes_of(way)
    if op in cases.REDUCING:
        args["reduce_op"] = random.choice(cases.REDUCE_OPS)
        dtypes = [d for d in dtypes if cases.has_meaning(args["reduce_op"], d)]
    for name in {"src", "dst"} & args.keys():
        args[name] = random.randrange(n) if op != "permute" else random.sample(range(n), n)
    count = random.choice((1, 2, 3)) if op in cases.LISTS else 1
    known = [s for s in SHAPES if len(s) > 1] if op == "shard_dim_alltoall" else SHAPES
    shapes = tuple(random.choice(known) for _ in range(count))
    made = Case(op, shapes, tuple(random.choice(dtypes) for _ in range(count)), args)
    if way == "accelerated":  # torch's ops have neither dims nor sizes
        return made
    return dataclasses.replace(made, args=args | parts(random, made, n))


def dtypes_of(way: str) -> list[torch.dtype]:
    return list(TORCHS_DTYPES if way == "accelerated" else DTYPES)


def parts(random: Random, case: Case, n: int) -> dict[str, Any]:
    """Along which dims, and into what parts."""
    taken = {a.name for a in getattr(torch.ops.fcoll, case.op).default._schema.arguments}
    ndims = [len(shape) for shape in case.shapes]
    if case.op == "shard_dim_alltoall":  # the same dim twice sends nothing
        gather, shard = random.sample(range(ndims[0]), 2)
        return {"gather_dim": gather, "shard_dim": shard}
    if "dims" in taken:
        return {"dims": [random.randrange(d) for d in ndims]}
    some = [random.randrange(4) for _ in range(n)]
    if case.op == "all_to_all_single" and random.random() < 0.5:
        return {"splits": [[random.randrange(3) for _ in range(n)] for _ in range(n)]}
    found: dict[str, Any] = {"dim": random.randrange(ndims[0])} if "dim" in taken else {}
    return found | ({"sizes": some} if "sizes" in taken and random.random() < 0.3 else {})


def changes_of(
    random: Random, case: Case, n: int, way: str, ops: Sequence[str]
) -> Iterator[tuple[str, Case]]:
    """Calls that differ from this one in one thing, and which: all kinds that it has."""
    args = case.args

    def with_args(**new: Any) -> Case:
        return dataclasses.replace(case, args=args | new)

    others = [op for op in ops if message(op) != message(case.op)]
    yield "collective", random_case(random, random.choice(others), n, way)
    reduce_op = args.get("reduce_op", "max" if case.op not in cases.REDUCING else "")
    dtypes = [d for d in dtypes_of(way) if d != case.dtypes[0]]
    if case.op in cases.REDUCING:
        dtypes = [d for d in dtypes if cases.has_meaning(reduce_op, d)]
    # of equal size if there is one: all else is easier to notice
    dtypes.sort(key=lambda d: d.itemsize != case.dtypes[0].itemsize)
    if dtypes:
        yield "dtype", dataclasses.replace(case, dtypes=(dtypes[0], *case.dtypes[1:]))
    if shapes := other_shapes(case):
        first = random.choice(shapes)
        yield "shape", dataclasses.replace(case, shapes=(first, *case.shapes[1:]))
    if case.op in cases.REDUCING:
        known = [op for op in cases.REDUCE_OPS if op != reduce_op]
        known = [op for op in known if all(cases.has_meaning(op, d) for d in case.dtypes)]
        if known:
            yield "op", with_args(reduce_op=random.choice(known))
    for name in ("src", "dst"):
        if isinstance(args.get(name), int):
            yield "root", with_args(**{name: (args[name] + 1) % n})
        elif name in args:
            yield "permutation", with_args(**{name: [*args[name][1:], args[name][0]]})
    if "dim" in args and len(case.shapes[0]) > 1:
        yield "dim", with_args(dim=(args["dim"] + 1) % len(case.shapes[0]))
    if "sizes" in args and len(set(args["sizes"])) > 1:
        yield "sizes", with_args(sizes=[*args["sizes"][1:], args["sizes"][0]])
    if "splits" in args:
        splits = [[x + 1 for x in row] for row in args["splits"]]
        yield "splits", with_args(splits=splits)
        upper = [[x + (i < j) for j, x in enumerate(row)] for i, row in enumerate(args["splits"])]
        yield "splits of one direction", with_args(splits=upper)  # the first rank only sends more
    if len(case.shapes) > 1 and case.op in cases.LISTS:
        dims = {"dims": args["dims"][:-1]} if "dims" in args else {}
        shorter = dataclasses.replace(case, shapes=case.shapes[:-1], dtypes=case.dtypes[:-1])
        yield "list", dataclasses.replace(shorter, args=args | dims)


def message(op: str) -> str:
    return cases.COLLECTIVES[op].message


def other_shapes(case: Case) -> list[cases.Shape]:
    """Shapes of the same number of dims, which dims and sizes still fit."""
    if "sizes" in case.args or "splits" in case.args:
        return []
    mine = case.shapes[0]
    return [s for s in SHAPES if len(s) == len(mine) and s != mine]


# -- on the ranks ---


@dataclass
class Played:
    """What one rank saw of a trial."""

    outcomes: list[compare.Outcome]
    error: str = ""  # the class
    said: str = ""
    later: str = ""  # the class of what a later call on the group raises


def play(rank: int, trials: Sequence[Trial]) -> list[Played]:
    """Trials that agree share the world's group; every other has one of its own."""
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    common = dist.group.WORLD
    seen = []
    with fcoll.symm_mem.accelerate_c10d():
        for t in trials:
            group = common if t.changed is None else new_group()
            seen.append(play_one(rank, t, group))
            if group is not common:
                dist.destroy_process_group(group)
    return seen


def new_group() -> dist.ProcessGroup:
    return dist.new_group(range(dist.get_world_size()), timeout=timedelta(seconds=GROUP_S))


def play_one(rank: int, t: Trial, group: dist.ProcessGroup) -> Played:
    members = list(range(dist.get_world_size()))
    calls = [t.call(i, rank) for i in range(len(t.calls))]
    inputs = [cases.inputs_of(case, rank, members) for case in calls]
    played = Played([])
    try:
        if t.way == "in flight":
            started = [start(c, xs, group) for c, xs in zip(calls, inputs, strict=True)]
            for outs in started:
                played.outcomes.append(packed([fcoll.wait_tensor(y) for y in outs]))
        else:
            for case, xs in zip(calls, inputs, strict=True):
                make = MAKE.get(t.way) or functools.partial(compiled, t.backend)
                played.outcomes.append(make(case, xs, group))
    except Exception as error:
        played.error, played.said = class_of(error), str(error)
        played.later = later(group)
    return played


def later(group: dist.ProcessGroup) -> str:
    try:
        fcoll.wait_tensor(fcoll.all_reduce(torch.ones(3), "sum", group))
    except Exception as error:
        return class_of(error)
    return ""


def class_of(error: Exception) -> str:
    """Of torch's ops, errors are RuntimeErrors that name the class."""
    found = from_native(error)
    return type(found).__name__ if isinstance(found, FcollError) else repr(error)


def packed(outputs: Sequence[torch.Tensor]) -> compare.Outcome:
    made = [(tuple(y.shape), y.dtype, compare.bits(y).numpy().tobytes()) for y in outputs]
    return compare.Outcome(made, [])


def start(case: Case, xs: list[torch.Tensor], group: Any) -> list[torch.Tensor]:
    outs = cases._bound(case.op, cases.arguments(case, xs, group), case.op_level)(*xs)
    return outs if case.op in cases.LISTS else [outs]


def by_torch(case: Case, xs: list[torch.Tensor], group: Any) -> compare.Outcome:
    overload = getattr(torch.ops._c10d_functional, case.op).default
    names = [a.name for a in overload._schema.arguments]
    given = cases.keywords(case.op, names, xs, cases.arguments(case, xs, group))
    outs = overload(**given)
    outs = outs if case.op in cases.LISTS else [outs]
    return packed([torch.ops._c10d_functional.wait_tensor(y) for y in outs])


_graphs: dict[tuple[str, str, str], Callable[..., Any]] = {}


def compiled(backend: str, case: Case, xs: list[torch.Tensor], group: Any) -> compare.Outcome:
    key = backend, shown(case), group.group_name
    if key not in _graphs:
        fn = cases.prepared(case, cases.arguments(case, xs, group))
        _graphs[key] = torch.compile(fn, fullgraph=True, backend=backend)
    return packed(_graphs[key](*xs))


MAKE: dict[str, Callable[..., compare.Outcome]] = {
    "eager": compare.outcome,
    "accelerated": by_torch,
}

# -- the verdict ---


def faults(t: Trial, seen: Sequence[Played]) -> list[str]:
    """What is wrong with a trial."""
    found = []
    members = list(range(len(seen)))
    agreed = len(t.calls) if t.changed is None else t.at
    for i in range(agreed):
        if all(len(played.outcomes) > i for played in seen):
            outcomes = {r: played.outcomes[i] for r, played in enumerate(seen)}
            found += [f"call {i}, {d}" for d in compare.differences(t.calls[i], members, outcomes)]
        elif t.way != "in flight" or t.changed is None:
            errors = {r: p.said[:300] for r, p in enumerate(seen) if p.error}
            return [f"call {i} of all ranks alike raised {errors}"]
    if t.changed is None:
        return found
    raised = [played.error for played in seen]
    if not all(error == "CollectiveMismatch" for error in raised):
        found.append(f"another {t.what} on rank {t.victim}: the ranks raised {raised}")
    for r, played in enumerate(seen):
        if played.error and played.later != "GroupClosed":
            found.append(f"rank {r}: a later call raised {played.later!r}, not GroupClosed")
    return found


# -- many of them ---


class Fuzzer:
    """Trials of one seed, in batches: a batch is one request to the ranks."""

    def __init__(
        self,
        pool: RankPool,
        seed: int,
        ways: dict[str, int] = WAYS,
        backend: str = "aot_eager",
    ) -> None:
        self.pool, self.seed, self.ways, self.backend = pool, seed, ways, backend
        self.done: Counter[str] = Counter()

    def run(self, numbers: Sequence[int]) -> str:
        """The first fault of these trials, with the command that repeats it; or empty."""
        trials = [trial(i, self.seed, self.pool.world_size, self.ways) for i in numbers]
        trials = [dataclasses.replace(t, backend=self.backend) for t in trials]
        try:
            seconds = sum(60 if t.way == "compiled" else 2 for t in trials)
            by_rank = self.pool.run(play, trials, timeout=seconds + 2 * GROUP_S)
        except RankError as error:
            if len(numbers) == 1:
                return self.told(trials[0], [str(error)])
            return next(filter(None, (self.run([i]) for i in numbers)), f"not again: {error}")
        for t, seen in zip(trials, zip(*by_rank, strict=True), strict=True):
            if found := faults(t, seen):
                return self.told(t, found)
            self.done[t.way if t.changed is None else f"{t.way}, another {t.what}"] += 1
        return ""

    def told(self, t: Trial, found: list[str]) -> str:
        again = f"--seed {self.seed} --ranks {self.pool.world_size} --only {t.number}"
        again += f" --compiled {self.ways['compiled']} --backend {self.backend}"
        lines = [str(t), *found, f"again: python tests/fuzz_calls.py {again}"]
        return "\n".join(lines)

    def run_for(self, seconds: float, batch: int, say: Callable[[str], Any] | None = None) -> str:
        """Trials until the time is over or one fails."""
        start, first = time.monotonic(), 0
        while time.monotonic() - start < seconds:
            if fault := self.run(range(first, first + batch)):
                return fault
            first += batch
            if say:
                seconds_so_far = time.monotonic() - start
                differing = sum(v for k, v in self.done.items() if "another" in k)
                say(f"{seconds_so_far:6.0f} s  {first} trials, {differing} of them differ")
        return ""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 5))
    parser.add_argument("--only", type=int, help="the number of one trial")
    help = "of 100 trials, how many are compiled"
    parser.add_argument("--compiled", type=int, default=WAYS["compiled"], help=help)
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile: fcoll, inductor")
    args = parser.parse_args(argv)
    ways = WAYS | {"compiled": args.compiled}
    with RankPool(args.ranks, {"FCOLL_NATIVE": "1"}) as pool:
        fuzzer = Fuzzer(pool, args.seed, ways, args.backend)
        if args.only is not None:
            print(trial(args.only, args.seed, args.ranks, ways))
            fault = fuzzer.run([args.only])
        else:
            fault = fuzzer.run_for(args.seconds, 25, lambda text: print(text, flush=True))
    for kind, count in sorted(fuzzer.done.items()):
        print(f"{count:6}  {kind}")
    print(fault or "nothing found")
    return int(bool(fault))


if __name__ == "__main__":
    import fuzz_calls  # by this name, so that the ranks find what is pickled

    sys.exit(fuzz_calls.main(sys.argv[1:]))
