"""The same problem with time running backwards: last things first.

A schedule of the mirrored problem, read from its end, is a schedule of the problem in which all is
done as late as possible: gathers just in time, what frees memory early.
"""

from __future__ import annotations

from collections.abc import Sequence

from fcoll.scheduling.problem import COMPUTE, START, WAIT, Problem


def mirrored(problem: Problem) -> Problem | None:
    """Unit u becomes n - 1 - u, starts become waits and waits starts. None where the first that
    needs a collective is no wait for it alone: then what would start it is not one unit."""
    wait_of = _waits(problem)
    if wait_of is None:
        return None
    n = problem.n
    other = [START if k == WAIT else WAIT if k == START else COMPUTE for k in problem.kind]
    us, stream = list(problem.us), list(problem.stream)
    for start, wait in wait_of.items():
        us[wait], us[start] = problem.us[start], problem.us[wait]
        stream[wait], stream[start] = problem.stream[start], -1
    later = [(wait_of[v], u) for u, flights in enumerate(problem.flights) for v in flights]
    later = [(wait, u) for wait, u in later if wait != u and wait not in problem.before[u]]
    before, after = problem.before, problem.after
    if later:  # what needs a collective behind its wait comes behind that wait
        before, after = [list(b) for b in before], [list(a) for a in after]
        for wait, u in later:
            before[u].append(wait)
            after[wait].append(u)

    def flip(units: Sequence[int]) -> list[int]:
        return [n - 1 - u for u in reversed(units)]

    return Problem(
        kind=other[::-1],
        us=us[::-1],
        stream=stream[::-1],
        before=[flip(u) for u in reversed(after)],
        after=[flip(u) for u in reversed(before)],
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
    """The wait of each start: the first unit that needs it."""
    found: dict[int, int] = {}
    for u, flights in enumerate(problem.flights):
        fresh = [v for v in flights if v not in found]
        if fresh and (problem.kind[u] != WAIT or len(flights) != 1):
            return None
        found.update(dict.fromkeys(fresh, u))
    kinds = problem.kind
    return found if len(found) == kinds.count(START) == kinds.count(WAIT) else None


def flipped(order: Sequence[int], n: int) -> list[int]:
    """An order of the mirrored problem as one of the problem, and the other way round."""
    return [n - 1 - u for u in reversed(order)]
