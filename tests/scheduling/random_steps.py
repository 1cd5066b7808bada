"""Random programs as Steps, for the property tests of schedulers."""

from __future__ import annotations

from hypothesis import strategies as st

from fcoll.graph.steps import Step

GROUPS = ("dp", "tp", "cp")


def step(name: str, kind: str, inputs=(), uses=(), stream="compute", out=0, **more) -> Step:
    facts = dict(
        flops=0, read_bytes=0, write_bytes=0, dtype="float32", last_use_of=(), collective=None,
        op="aten::mm", source="m.py:1", module="", phase="fwd",
    )  # fmt: skip
    return Step(
        name=name, kind=kind, inputs=tuple(dict.fromkeys(inputs)), stream=stream,
        uses=tuple(dict.fromkeys(uses)), out_bytes=out, **{**facts, **more},
    )  # fmt: skip


class Writer:
    """Adds steps and keeps who allocated what, and who wrote it last."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.us: dict[str, float] = {}
        self.values: list[tuple[str, str]] = []  # (last writer, buffer)
        self.sent: dict[str, list[str]] = {}

    def compute(self, given, us: float, out: int, effect: str = "") -> None:
        name = f"c{len(self.steps)}"
        self.add(step(name, "compute", *zip_values(given), out=out, effect=effect), us)
        self.values.append((name, name))

    def collective(self, given, us: float, out: int, group: str, effect: str = "") -> None:
        number = len(self.steps)
        inputs, uses = zip_values(given)
        start, wait = f"s{number}", f"w{number}"
        facts = dict(collective=number, op="all_reduce", effect=effect)
        self.add(step(start, "start", inputs, uses, group, out, **facts), us)
        waits = dict(collective=number, op="all_reduce")
        self.add(step(wait, "wait", (start,), (start, *uses), **waits), 0.0)
        self.values.append((wait, start))

    def add(self, made: Step, us: float) -> None:
        self.steps.append(made)
        self.us[made.name] = us

    def finish(self, kept: set[int]) -> tuple[tuple[Step, ...], dict[str, float]]:
        """Free every buffer after its last use, but those of the values that are kept."""
        last: dict[str, int] = {}
        for i, made in enumerate(self.steps):
            for name in (made.name, *made.uses):
                last[name] = i
        pinned = {self.values[k % len(self.values)][1] for k in kept}
        frees: dict[int, list[str]] = {}
        for made in self.steps:
            if made.out_bytes and made.name not in pinned:
                frees.setdefault(last[made.name], []).append(made.name)
        steps = [
            Step(**{**vars(made), "last_use_of": tuple(frees.get(i, ()))})
            for i, made in enumerate(self.steps)
        ]
        return tuple(steps), self.us


def zip_values(given) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(w for w, _ in given), tuple(b for _, b in given)


@st.composite
def programs(draw, most: int = 24, effects: bool = True):
    """(steps, prices) of a random program: a DAG of compute and collectives on up to 3 groups."""
    writer = Writer()
    for _ in range(draw(st.integers(1, most))):
        known = len(writer.values)
        picks = draw(st.lists(st.integers(0, max(known - 1, 0)), max_size=3)) if known else []
        given = [writer.values[i] for i in picks]
        us, out = draw(st.integers(0, 20)), draw(st.integers(0, 8)) * 1024
        kind = draw(st.integers(0, 9))
        if kind >= 6:
            group = draw(st.sampled_from(GROUPS))
            p2p = "ordered" if effects and kind == 9 and draw(st.integers(0, 9)) == 0 else ""
            writer.collective(given, us, out, group, p2p)
        else:
            rare = draw(st.integers(0, 19)) if effects else 19
            writer.compute(given, us, out, {0: "random", 1: "random", 2: "barrier"}.get(rare, ""))
    return writer.finish(draw(st.sets(st.integers(0, 30), max_size=3)))
