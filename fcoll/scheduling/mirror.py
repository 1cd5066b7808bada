"""The same problem with time running backwards: last things first.

A schedule of the mirrored problem, read from its end, is a schedule of the problem in which all is
done as late as possible: gathers just in time, what frees memory early.
"""

from __future__ import annotations

from collections.abc import Sequence

from fcoll.scheduling.problem import COMPUTE, START, WAIT, Problem


def mirrored(problem: Problem) -> Problem | None:
    """Unit u becomes n - 1 - u, starts become waits and waits starts. None where a collective has
    no wait of its own, or several: then what would start it is not one unit."""
    wait_of = _waits(problem)
    if wait_of is None:
        return None
    n = problem.n
    other = [START if k == WAIT else WAIT if k == START else COMPUTE for k in problem.kind]
    us, stream = list(problem.us), list(problem.stream)
    for start, wait in wait_of.items():
        us[wait], us[start] = problem.us[start], problem.us[wait]
        stream[wait], stream[start] = problem.stream[start], -1

    def flip(units: Sequence[int]) -> list[int]:
        return [n - 1 - u for u in reversed(units)]

    return Problem(
        kind=other[::-1],
        us=us[::-1],
        stream=stream[::-1],
        before=[flip(u) for u in reversed(problem.after)],
        after=[flip(u) for u in reversed(problem.before)],
        flights=[[n - 1 - wait_of[u]] if u in wait_of else [] for u in range(n - 1, -1, -1)],
        touches=problem.touches[::-1],
        names=problem.names[::-1],
        members=problem.members[::-1],
        size=problem.size,
        pinned=problem.live_first,
        streams=problem.streams,
        held_bytes=problem.held_bytes,
        steps=problem.steps,
        live_first=problem.pinned,
    )


def _waits(problem: Problem) -> dict[int, int] | None:
    """The one wait of each start."""
    found: dict[int, int] = {}
    for u, flights in enumerate(problem.flights):
        if not flights:
            continue
        if problem.kind[u] != WAIT or len(flights) != 1 or flights[0] in found:
            return None
        found[flights[0]] = u
    waits = sum(k == WAIT for k in problem.kind)
    return found if len(found) == waits == sum(k == START for k in problem.kind) else None


def flipped(order: Sequence[int], n: int) -> list[int]:
    """An order of the mirrored problem as one of the problem, and the other way round."""
    return [n - 1 - u for u in reversed(order)]
