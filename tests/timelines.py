"""Steps and timelines made by hand, for the tests of timelines and reports."""

from __future__ import annotations

from fcoll.costs.machine import PRESETS, Machine
from fcoll.graph.issued import Issued
from fcoll.graph.steps import Step
from fcoll.scheduling.timeline import Timeline, timeline

H100 = Machine.from_toml(PRESETS / "h100.toml")


def compute(name: str, *inputs: str, out: int = 0, frees: tuple[str, ...] = (), **more) -> Step:
    return _step(name, "compute", inputs, "compute", out, frees, None, **more)


def start(name: str, id: int, *inputs: str, stream: str = "tp", out: int = 0, frees=()) -> Step:
    return _step(name, "start", inputs, stream, out, frees, id, op="all_reduce", source="m.py:3")


def wait(name: str, id: int, *inputs: str, frees: tuple[str, ...] = ()) -> Step:
    return _step(name, "wait", inputs, "compute", 0, frees, id, op="all_reduce", source="m.py:3")


def _step(name, kind, inputs, stream, out, frees, collective, **more) -> Step:
    facts = dict(op="aten::mul", source="m.py:1", module="block", phase="fwd", flops=0)
    facts |= more
    return Step(
        name=name, kind=kind, inputs=tuple(inputs), stream=stream, read_bytes=0, write_bytes=0,
        dtype="float32", out_bytes=out, last_use_of=tuple(frees), collective=collective, **facts,
    )  # fmt: skip


def issued(step: Step, wait: str | None = None, n: int = 4, source: str = "m.py:3") -> Issued:
    assert step.collective is not None
    return Issued(
        id=step.collective, op="all_reduce", target="fcoll::all_reduce", group=f"g_{step.stream}",
        axis=step.stream, ranks=tuple(range(n)), shapes=((1024, 1024),), dtypes=("float32",),
        bytes=4 << 20, args={"reduce_op": "sum"}, phase=step.phase, source=source,
        module="block", start=step.name, wait=wait,
    )  # fmt: skip


def run(steps: list[Step], costs: dict[str, float]) -> Timeline:
    """A timeline in which every step takes what ``costs`` says, 0 if nothing."""
    collectives = tuple(issued(s) for s in steps if s.kind == "start")
    return timeline((tuple(steps), collectives), H100, lambda s: costs.get(s.name, 0.0))


def overlapped() -> Timeline:
    """Two streams, a hidden and two exposed collectives.

    compute  |a 10|b 20      |c 5|.......|d 10|....|
    tp            |r 15  |       |       |    |
    dp                     |s 4|-> queue: t 16 on dp
    """
    steps = [
        compute("a", out=100, op="aten::mm", flops=10**9, source="m.py:2"),
        start("r", 0, "a", out=50),
        compute("b", "a", out=200),
        start("s", 1, "b", stream="dp", out=10),
        start("t", 2, "b", stream="dp", out=20, frees=("b",)),
        wait("wr", 0, "r"),
        compute("c", "wr", "a", out=30, frees=("a", "r")),
        wait("wt", 2, "t"),
        compute("d", "wt", "c", frees=("t", "c")),
        wait("ws", 1, "s", frees=("s",)),
    ]
    costs = dict(a=10, r=15, b=20, s=4, t=16, c=5, d=10)
    return run(steps, costs)


def serial() -> Timeline:
    """The same work as overlapped, nothing hidden."""
    steps = [
        compute("a", out=100, op="aten::mm", flops=10**9),
        start("r", 0, "a", out=50),
        wait("wr", 0, "r"),
        compute("b", "wr"),
    ]
    return run(steps, dict(a=10, r=15, b=20))


def many(layers: int) -> Timeline:
    """A step of 4 spans a layer, half of its communication hidden."""
    steps, costs, free = [], {}, ()
    for i in range(layers):
        steps += [
            compute(f"mm{i}", out=4 << 20, op="aten::mm", flops=10**9, frees=free),
            start(f"r{i}", i, f"mm{i}", stream="tp" if i % 3 else "dp", out=1 << 20),
            compute(f"mul{i}", f"mm{i}", out=2 << 20),
            compute(f"add{i}", f"mul{i}", frees=(f"mm{i}",)),
            wait(f"w{i}", i, f"r{i}"),
        ]
        free = (f"r{i}", f"mul{i}")
        costs |= {f"mm{i}": 30.0 + i % 7, f"r{i}": 25.0 + i % 5, f"mul{i}": 8.0, f"add{i}": 4.0}
    return run(steps, costs)
