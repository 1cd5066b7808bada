"""Schedulers by name. A scheduler is a function: a ``Job`` in, names of steps in their order out.

>>> @scheduler("as it was")
... def as_it_was(steps):
...     return [step.name for step in steps]
>>> "as it was" in SCHEDULERS
True
>>> del SCHEDULERS["as it was"]
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fcoll.errors import UnknownScheduler
from fcoll.graph.steps import Step
from fcoll.scheduling.bounds import Outcome, lower_bound_us, run
from fcoll.scheduling.problem import Problem

#: Steps in, their names (or the steps themselves) out.
Scheduler = Callable[["Job"], Iterable[Any]]


class Job(tuple[Step, ...]):
    """The steps to order, as a tuple, with all that a scheduler may want to know.

    ``us`` are the prices by name, ``cap_bytes`` is the memory cap (infinite if there is none),
    ``try_order(names)`` says how long an order takes and how much memory it holds, and ``problem``
    has the same in integers, with what must come before what. ``seeds`` are orders of its units
    that the plan shall not be slower than.
    """

    problem: Problem
    us: dict[str, float]
    cap_bytes: float
    graph_module: Any
    seeds: Sequence[Sequence[int]] = ()

    @staticmethod
    def of(
        problem: Problem, us: dict[str, float], cap_bytes: float, graph_module: Any = None
    ) -> Job:
        made = Job(problem.steps)
        made.problem, made.us, made.cap_bytes = problem, us, cap_bytes
        made.graph_module = graph_module
        return made

    @cached_property
    def lower_bound_us(self) -> float:
        return lower_bound_us(self.problem)

    @cached_property
    def original(self) -> Outcome:
        """The order that came in."""
        return run(self.problem, range(self.problem.n))

    def try_order(self, names: Iterable[Any]) -> Outcome:
        """Time and peak memory of an order of steps; it is not checked."""
        return run(self.problem, self.units(names))

    def units(self, names: Iterable[Any]) -> list[int]:
        """An order of steps as one of units. A kernel stands where its last step does."""
        last: dict[int, None] = {}
        for name in names:
            unit = self._unit_of[name if isinstance(name, str) else name.name]
            last.pop(unit, None)
            last[unit] = None
        return list(last)

    def names(self, units: Sequence[int]) -> list[str]:
        """An order of units as one of steps."""
        members = self.problem.members
        return [self[i].name for u in units for i in members[u]]

    @cached_property
    def _unit_of(self) -> dict[str, int]:
        members = self.problem.members
        return {self[i].name: u for u, positions in enumerate(members) for i in positions}


@dataclass(frozen=True)
class Entry:
    """A scheduler, whether it stays under a memory cap by itself, and whether buckets are made
    for it."""

    name: str
    run: Scheduler
    keeps_cap: bool = True
    buckets: bool = False


SCHEDULERS: dict[str, Entry] = {}


def scheduler(
    name: str, *, keeps_cap: bool = True, buckets: bool = False
) -> Callable[[Scheduler], Scheduler]:
    """Register a scheduler: ``fcoll.schedule(trace, scheduler=name)``.

    A plan over the memory cap is an error; one whose scheduler does not keep caps has none. With
    ``buckets`` it also plans graphs in which small collectives are sent as one, and the faster plan
    is taken.
    """

    def keep(fn: Scheduler) -> Scheduler:
        SCHEDULERS[name] = Entry(name, fn, keeps_cap, buckets)
        return fn

    return keep


def scheduler_of(given: str | Scheduler) -> Entry:
    """By its name, or a function as it is."""
    if callable(given):
        return Entry(getattr(given, "__name__", "scheduler"), given)
    if given not in SCHEDULERS:
        raise UnknownScheduler(scheduler=given, known=", ".join(SCHEDULERS))
    return SCHEDULERS[given]


def scheduler_key(given: str | Scheduler | None) -> str | None:
    """The same for schedulers that give the same orders: of a function its code and that of its
    module, or what its ``uuid()`` says. None of a function that depends on more than its code:
    one with a closure or defaults, a method, an object."""
    if given is None:
        return "none"
    entry = scheduler_of(given)
    uuid = getattr(entry.run, "uuid", None)
    if uuid is not None:
        return str(uuid())
    fn = inspect.unwrap(entry.run)
    plain = inspect.isfunction(fn) and not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__)
    try:
        file = inspect.getsourcefile(fn) if plain else None
        source = Path(file).read_bytes() if file else b""
    except (OSError, TypeError):
        source = b""
    if not source:
        return None
    own = (fn.__module__, fn.__qualname__, fn.__code__.co_firstlineno, fn.__code__.co_names)
    code = hashlib.sha256(source + fn.__code__.co_code).hexdigest()
    return repr((entry.name, entry.keeps_cap, entry.buckets, own, code))
