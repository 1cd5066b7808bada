"""Steps with their prices, where each stands and could stand, and edits of them.

A graph is not needed: a trace from a file has none, and what writes into given tensors (FSDP2) or
sends messages is changed as well. Such changes are not carried out; ``fcoll.advice`` tells what
they would be worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from fcoll.costs.machine import Machine
from fcoll.graph.issued import Issued
from fcoll.graph.steps import Step
from fcoll.scheduling.clock import START
from fcoll.scheduling.streams import freed_in_order
from fcoll.scheduling.timeline import Prices, StepUnits, Timeline, timeline


@dataclass(frozen=True)
class StepProgram:
    """A step's steps and what each takes. ``nodes`` are the graph's, where there is one."""

    steps: tuple[Step, ...]
    collectives: tuple[Issued, ...]
    us: Mapping[str, float]
    machine: Machine
    waits: str = "first use"
    mesh: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def line(self) -> Timeline:
        return timeline((self.steps, self.collectives), self.machine, self.us, waits=self.waits)

    @cached_property
    def at(self) -> dict[str, int]:
        return {step.name: i for i, step in enumerate(self.steps)}

    @cached_property
    def compute_before_us(self) -> list[float]:
        """How much compute comes before each step; at the end, all of it."""
        each = (0.0 if s.kind == "start" else self.us[s.name] for s in self.steps)
        return list(accumulate(each, initial=0.0))

    @cached_property
    def used_at(self) -> dict[str, int]:
        """Of each start, where compute has to have its result: as the clock reads the steps."""
        results = {c.id: len(c.shapes) for c in self.collectives}
        read = StepUnits(self.steps, lambda step: 0.0, self.waits == "first use", results, None)
        found: dict[str, int] = {}
        for u, flights in enumerate(read.units.flights):
            starts = read.units.kind[u] == START
            for v in read.waits_first.get(u, ()) if starts else flights:
                found.setdefault(self.steps[v].name, u)
        return found

    def use_of(self, call: Issued) -> int:
        return self.used_at.get(call.start, len(self.steps))

    @cached_property
    def freed(self) -> set[str]:
        """Whose memory is freed before the end."""
        return {name for s in self.steps for name in s.last_use_of}

    @cached_property
    def free(self) -> set[str]:
        """Steps that need nothing but the graph's inputs, such as a cast of a parameter."""
        found: set[str] = set()
        for s in self.steps:
            plain = s.kind == "compute" and not s.effect and s.flops == 0
            if plain and found.issuperset(s.inputs):
                found.add(s.name)
        return found

    @cached_property
    def fences(self) -> list[int]:
        """The first position that each step may go to, whatever it needs: nothing moves past a
        barrier, and where ranks send messages no collective past another."""
        ordered, last, found = any(s.effect == "ordered" for s in self.steps), 0, []
        for i, s in enumerate(self.steps):
            found.append(last)
            if s.effect == "barrier" or (ordered and s.kind == "start"):
                last = i + 1
        return found

    def moves_with(self, start: str) -> list[str]:
        """A start, and the free steps that it needs."""
        found, todo = [], [start]
        while todo:
            found.append(name := todo.pop())
            todo += [x for x in self.steps[self.at[name]].inputs if x in self.free]
        return found

    def earliest(self, start: str) -> int:
        """The first position that a start can have, if what is free moves with it."""
        low = self.fences[self.at[start]]
        for name in self.moves_with(start):
            inputs = self.steps[self.at[name]].inputs
            low = max([low, *(self.at[x] + 1 for x in inputs if x not in self.free)])
        return low

    @cached_property
    def model(self) -> Prices:
        """The machine's prices, of steps and calls that are made, too."""
        return Prices(self.collectives, self.machine, None, None)

    def price_call(self, call: Issued, like: Sequence[Issued]) -> float:
        """The machine's price of a call; where those it is made of took longer or shorter than
        theirs, because they were measured, it does so, too."""
        took = sum(self.us[c.start] for c in like)
        priced = sum(map(self.model.collective, like))
        return self.model.collective(call) * (took / priced if priced else 1.0)


@dataclass
class Edits:
    """Changes of a program, made all at once. Positions and names are those before."""

    program: StepProgram
    moved: dict[str, int] = field(default_factory=dict)  # step -> before which position it goes
    added: dict[int, list[Step]] = field(default_factory=dict)  # before which position -> steps
    steps: dict[str, Step | None] = field(default_factory=dict)  # instead of it; None: it goes
    inputs: dict[str, str] = field(default_factory=dict)  # the new name of what is needed,
    memory: dict[str, str] = field(default_factory=dict)  # and of whose memory is used
    us: dict[str, float] = field(default_factory=dict)
    calls: dict[int, Issued | None] = field(default_factory=dict)  # by id; None: it goes

    def add(self, position: int, step: Step, us: float) -> None:
        self.added.setdefault(position, []).append(step)
        self.us[step.name] = us

    def move(self, start: str, position: int) -> None:
        """A start, and what is free, to before a position."""
        for name in self.program.moves_with(start):
            if self.program.at[name] >= position:
                self.moved[name] = min(position, self.moved.get(name, position))

    def made(self) -> StepProgram:
        old = self.program
        placed: list[tuple[tuple[int, int, int], Step]] = []
        for i, step in enumerate(old.steps):
            place, first = self.moved.get(step.name, i), step.name not in self.moved
            kept = self.steps.get(step.name, step)
            if kept is not None:
                placed.append(((place, 2 * first, i), self.renamed(kept)))
        for position, steps in self.added.items():
            placed += [((position, 1, k), step) for k, step in enumerate(steps)]
        placed.sort(key=lambda x: x[0])
        known = {c.id for c in old.collectives}
        calls = [self.calls.get(c.id, c) for c in old.collectives]
        calls += [c for i, c in self.calls.items() if i not in known]
        return replace(
            old,
            steps=freed_in_order(tuple(step for _, step in placed)),
            collectives=tuple(c for c in calls if c is not None),
            us={**old.us, **self.us},
        )

    def renamed(self, step: Step) -> Step:
        """The step with new names for what it needs."""
        same = not self.inputs or self.inputs.keys().isdisjoint(step.inputs)
        if same and (not self.memory or self.memory.keys().isdisjoint(step.uses)):
            return step
        return replace(
            step,
            inputs=_renamed(step.inputs, self.inputs),
            uses=_renamed(step.uses, self.memory),
            last_use_of=tuple(n for n in _renamed(step.last_use_of, self.memory) if n),
        )


def _renamed(names: tuple[str, ...], new: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(new.get(name, name) for name in names))
