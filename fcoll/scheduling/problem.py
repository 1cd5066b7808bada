"""Steps -> a problem in integers: what schedulers order, what it takes, what must come before.

The things to order are *units*: a step, or all steps of a kernel (a fusion group). Units are
numbered in the order of the graph, so that 0, 1, 2, ... is the order that came in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fcoll.graph.steps import Step
from fcoll.scheduling.clock import COMPUTE as COMPUTE
from fcoll.scheduling.clock import KINDS, START, Units
from fcoll.scheduling.clock import WAIT as WAIT
from fcoll.scheduling.contention import Contention, launches


@dataclass(slots=True, kw_only=True)
class Problem(Units):
    """Units that may be ordered anew.

    A *buffer* is the memory that one unit allocates. It is held from the first unit that touches it
    to the last one, or to the end if it is ``pinned``.
    """

    before: list[list[int]]  # the units that must come before
    after: list[list[int]]
    touches: list[list[int]]  # buffers
    names: list[str]
    members: list[tuple[int, ...]]  # positions of the unit's steps
    size: list[int]  # of each buffer, in bytes
    pinned: list[bool]  # of each buffer: is it held to the end?
    held_bytes: int = 0  # the graph's inputs
    steps: tuple[Step, ...] = ()
    live_first: list[bool] = field(default_factory=list)  # buffers held from the beginning
    counts: list[int] = field(default_factory=list)  # of touches, see touch_counts

    @property
    def n(self) -> int:
        return len(self.us)

    def touch_counts(self) -> list[int]:
        """How many units touch each buffer; a list of the caller's own."""
        if not self.counts:
            self.counts = [0] * len(self.size)
            for buffers in self.touches:
                for b in buffers:
                    self.counts[b] += 1
        return list(self.counts)


def problem_of(
    steps: Sequence[Step],
    price: Callable[[Step], float],
    held_bytes: int = 0,
    contention: Contention | None = None,
) -> Problem:
    """The problem of steps in their order; ``price`` gives each its time."""
    made = _problem(steps, price, held_bytes, _kernels(steps))
    if any(needs and needs[-1] > u for u, needs in enumerate(made.before)):
        # Something between the steps of a kernel must come after one and before another.
        made = _problem(steps, price, held_bytes, [(i,) for i in range(len(steps))])
    if contention is not None:
        _contend(made, price, contention)
    return made


def _contend(problem: Problem, price: Callable[[Step], float], contention: Contention) -> None:
    """Fill in what contention asks of each unit."""
    steps, links = problem.steps, contention.links
    problem.contention = contention
    for positions in problem.members:
        last = steps[positions[-1]]
        carried = last.collective if last.kind == "start" else None
        problem.links.append(0 if carried is None else links.get(carried, 0))
        problem.launches.append(sum(launches(steps[i], price(steps[i])) for i in positions))


def _problem(
    steps: Sequence[Step],
    price: Callable[[Step], float],
    held_bytes: int,
    members: list[tuple[int, ...]],
) -> Problem:
    unit_of = {steps[i].name: u for u, positions in enumerate(members) for i in positions}
    n = len(members)
    streams = list(dict.fromkeys(s.stream for s in steps if s.kind == "start"))
    number = {name: i for i, name in enumerate(streams)}
    last = [steps[positions[-1]] for positions in members]
    found = Problem(
        kind=[KINDS[step.kind] for step in last],
        us=[sum([price(steps[i]) for i in positions]) for positions in members],
        stream=[number[step.stream] if step.kind == "start" else -1 for step in last],
        before=[],
        after=[[] for _ in range(n)],
        flights=[],
        touches=[],
        names=[step.name for step in last],
        members=members,
        size=[],
        pinned=[],
        streams=streams,
        held_bytes=held_bytes,
        steps=tuple(steps),
    )
    _link(found, unit_of)
    _allocate(found, unit_of)
    return found


def _kernels(steps: Sequence[Step]) -> list[tuple[int, ...]]:
    """The steps of each unit. A kernel stands where its last step does: nothing outside has used
    any of its results by then. One with an effect in it is no unit: its steps have places of their
    own. No kernel reaches across a barrier."""
    kernels: dict[tuple[str, int], list[int]] = {}
    barriers = 0
    for i, step in enumerate(steps):
        barriers += step.effect == "barrier"
        kernels.setdefault((step.fused_with or step.name, barriers), []).append(i)
    members: list[tuple[int, ...]] = []
    for positions in kernels.values():
        if any(steps[i].effect for i in positions):
            members.extend((i,) for i in positions)
        else:
            members.append(tuple(positions))
    members.sort(key=lambda positions: positions[-1])
    return members


def _link(problem: Problem, unit_of: dict[str, int]) -> None:
    """Fill in ``before``, ``after`` and ``flights``: data and writes are the steps' inputs, the
    rest follows from their effects."""
    steps, kind = problem.steps, problem.kind
    keep_issue_order = any(s.effect == "ordered" for s in steps)
    barrier = last_random = last_start = -1
    since_barrier: list[int] = []
    for u, positions in enumerate(problem.members):
        needed = {unit_of[name] for i in positions for name in steps[i].inputs if name in unit_of}
        problem.flights.append(sorted([v for v in needed if kind[v] == START and v != u]))
        effects = {steps[i].effect for i in positions}
        if barrier >= 0:
            needed.add(barrier)
        if "random" in effects:
            if last_random >= 0:
                needed.add(last_random)
            last_random = u
        if kind[u] == START and keep_issue_order:
            if last_start >= 0:
                needed.add(last_start)
            last_start = u
        if "barrier" in effects:
            needed.update(since_barrier)
            barrier, since_barrier = u, []
        else:
            since_barrier.append(u)
        needed.discard(u)
        problem.before.append(sorted(needed))
        for v in problem.before[u]:
            problem.after[v].append(u)


def _allocate(problem: Problem, unit_of: dict[str, int]) -> None:
    """Number the buffers and say who touches them."""
    steps = problem.steps
    freed = {name for step in steps for name in step.last_use_of}
    buffer_of: dict[str, int] = {}
    for step in steps:
        if step.out_bytes:
            buffer_of[step.name] = len(problem.size)
            problem.size.append(step.out_bytes)
            problem.pinned.append(step.name not in freed)
    problem.live_first = [False] * len(problem.size)
    started = {s.collective: s for s in steps if s.kind == "start"}
    for positions in problem.members:
        touched: set[int] = set()
        for i in positions:
            step = steps[i]
            for name in (step.name, *(step.uses or _uses(step, started.get(step.collective)))):
                if (buffer := buffer_of.get(name)) is not None:
                    touched.add(buffer)
        problem.touches.append(sorted(touched))


def _uses(step: Step, start: Step | None) -> tuple[str, ...]:
    """Of a step that does not say what memory it uses: that of its inputs, and a wait also what
    its collective sends."""
    return step.inputs + (start.inputs if step.kind == "wait" and start else ())
