"""All that chance may do to a small program: every order in which messages from any rank arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fcoll.simulation.faults import Fault
from fcoll.simulation.ranks import run
from fcoll.simulation.schedules import Choices, Schedule
from fcoll.simulation.session import Session


@dataclass(frozen=True)
class Failure:
    """A run that failed: ``simulate_ranks(fn, n, schedule=failure.schedule)`` repeats it."""

    schedule: Schedule
    error: BaseException


@dataclass(frozen=True)
class Exploration:
    """What ``explore`` saw: how many runs, whether those were all, which failed, and the results of
    the others by schedule."""

    runs: int
    complete: bool
    failures: tuple[Failure, ...]
    results: dict[Schedule, list[Any]]

    def __str__(self) -> str:
        all_of = "all" if self.complete else "the first"
        shown = f"{all_of} {self.runs} schedules run, {len(self.failures)} failed"
        return "\n".join([shown, *(f"  {f.schedule}: {f.error}" for f in self.failures[:10])])


def explore(
    fn: Callable[[int], Any],
    world_size: int,
    *,
    max_runs: int = 1000,
    keep_going: bool = False,
    timeout: float | None = 300.0,
    faults: Sequence[Fault] = (),
    generators: bool = False,
    isolate: Iterable[str] | None = None,
) -> Exploration:
    """Run ``fn`` on simulated ranks once for each way that things can come, and raise if one fails.

    >>> def first(rank):
    ...     x = torch.tensor([float(rank)])
    ...     if rank:
    ...         dist.send(x, 0)
    ...         return None
    ...     return [dist.recv(x) for _ in range(2)]
    >>> sorted(r[0] for r in fcoll.explore(first, 3).results.values())
    [[1, 2], [2, 1]]

    What real ranks leave to chance is tried: which of the messages that could reach it a receive
    from any rank takes; whether a handle that ``is_completed()`` asks about is (each is said not to
    be once); who of two ranks comes first to ``add``, ``compare_set`` or ``check`` of a store.
    Everything else has one outcome, whatever the order. The first error is raised, its schedule in
    ``error.schedule`` and in a note; with ``keep_going`` all are collected.

    ``fn`` must do the same each time that the same happens: no clocks, no random seeds of its own.
    """
    failures: list[Failure] = []
    results: dict[Schedule, list[Any]] = {}
    schedule: Schedule | None = ()
    runs = 0
    while schedule is not None and runs < max_runs:
        choices = Choices(schedule)
        runs += 1
        try:
            session = Session(world_size, faults, choices)
            results_of_run = run(session, fn, timeout, generators=generators, isolate=isolate)
            results[tuple(choices.taken)] = results_of_run
        except Exception as error:
            taken = tuple(choices.taken)
            error.schedule = taken  # type: ignore[attr-defined]
            error.add_note(f"in run {runs}; simulate_ranks(..., schedule={taken}) repeats it")
            if not keep_going:
                raise
            failures.append(Failure(taken, error))
        schedule = choices.following()
    return Exploration(runs, schedule is None, tuple(failures), results)
