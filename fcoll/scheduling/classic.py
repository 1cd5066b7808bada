"""Orders by simple rules: Inductor's classic passes, waits late, gathers just in time.

None of these but ``reorder_compute`` needs prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from fcoll.scheduling.bounds import peak_bytes
from fcoll.scheduling.listing import ListScheduler, Reference
from fcoll.scheduling.problem import COMPUTE, START, WAIT, Problem

_LAST = 1 << 60
_NEVER = float("inf")


def by_communication(
    problem: Problem, raise_comms: bool = False, sink_waits: bool = False, overlap: bool = False
) -> list[int]:
    """Inductor's rules: what the next collective needs goes first (``raise_comms``), waits go last
    of what is ready (``sink_waits``), and behind each collective comes compute that does not need
    it until its time is covered (``overlap``)."""
    needed_by = _first_collective(problem) if raise_comms else [_LAST] * problem.n
    late = [int(sink_waits and kind == WAIT) for kind in problem.kind]
    ready: list[tuple[int, int, int]] = []
    compute: list[tuple[int, int, int]] = []  # the same, compute only
    missing = [len(b) for b in problem.before]
    done = [False] * problem.n
    order: list[int] = []

    after, kind = problem.after, problem.kind

    def release(u: int) -> None:
        heappush(ready, key := (needed_by[u], late[u], u))
        if overlap and kind[u] == COMPUTE:
            heappush(compute, key)

    def take(heap: list[tuple[int, int, int]]) -> int | None:
        while heap:
            u = heappop(heap)[2]
            if not done[u]:
                break
        else:
            return None
        done[u] = True
        order.append(u)
        for v in after[u]:
            missing[v] -= 1
            if not missing[v]:
                release(v)
        return u

    for u, count in enumerate(missing):
        if not count:
            release(u)
    while (taken := take(ready)) is not None:
        uncovered = problem.us[taken] if overlap and problem.kind[taken] == START else 0.0
        while uncovered > 0 and (v := take(compute)) is not None:
            uncovered -= problem.us[v]
    return order


def _first_collective(problem: Problem) -> list[int]:
    """For each unit the number of the first collective that needs it, itself included."""
    found = [_LAST] * problem.n
    after, kind = problem.after, problem.kind
    number = kind.count(START)
    for u in range(problem.n - 1, -1, -1):
        if kind[u] == START:
            number -= 1
            found[u] = number
            continue
        first = _LAST
        for v in after[u]:
            if found[v] < first:
                first = found[v]
        found[u] = first
    return found


def waits_late(problem: Problem, order: Sequence[int], cap: float) -> list[int]:
    """Each wait right before the first unit that needs it, but earlier where what it frees is
    needed to stay under the cap. Takes no longer: a wait only blocks."""
    kind, before, size, touches = problem.kind, problem.before, problem.size, problem.touches
    us, pinned = problem.us, problem.pinned
    if cap == _NEVER:
        return _waits_at_use(problem, order)
    waiting: dict[int, None] = {}
    live, left = list(problem.live_first), problem.touch_counts()
    held = problem.held_bytes + sum(b for b, first in zip(size, live, strict=True) if first)
    made: list[int] = []

    def emit(u: int) -> None:
        nonlocal held
        made.append(u)
        for b in touches[u]:
            if not live[b]:
                live[b] = True
                held += size[b]
            left[b] -= 1
            if not left[b] and not pinned[b]:
                held -= size[b]

    def flush(u: int) -> None:
        for v in before[u]:
            if v in waiting:
                del waiting[v]
                flush(v)
                emit(v)

    for u in order:
        if kind[u] == WAIT and not us[u]:
            waiting[u] = None
            continue
        if waiting:
            flush(u)
            need = 0
            for b in touches[u]:
                if not live[b]:
                    need += size[b]
            while waiting and held + need > cap:
                v = next(iter(waiting))
                del waiting[v]
                flush(v)
                emit(v)
        emit(u)
    made.extend(waiting)
    return made


def _waits_at_use(problem: Problem, order: Sequence[int]) -> list[int]:
    """The same without a cap."""
    kind, us, before = problem.kind, problem.us, problem.before
    waiting: dict[int, None] = {}
    made: list[int] = []

    def flush(u: int) -> None:
        for v in before[u]:
            if v in waiting:
                del waiting[v]
                flush(v)
                made.append(v)

    for u in order:
        if kind[u] == WAIT and not us[u]:
            waiting[u] = None
        else:
            if waiting:
                flush(u)
            made.append(u)
    made.extend(waiting)
    return made


def just_in_time(problem: Problem) -> list[int]:
    """The order that came in, but what needs only the graph's inputs (gathers of parameters, casts)
    comes right before its first use: the least memory without reordering the rest."""
    lazy = [False] * problem.n
    for u in range(problem.n):
        lazy[u] = bool(problem.after[u]) and all([lazy[v] for v in problem.before[u]])
    done = [False] * problem.n
    order: list[int] = []
    for u in range(problem.n):
        if not lazy[u]:
            _emit_with_needs(u, problem, done, order)
    return order


def with_needs(problem: Problem, order: Sequence[int]) -> list[int]:
    """The same order, but where a unit comes before one that it needs, that one comes first."""
    done = [False] * problem.n
    made: list[int] = []
    for u in order:
        _emit_with_needs(u, problem, done, made)
    return made


def _emit_with_needs(u: int, problem: Problem, done: list[bool], order: list[int]) -> None:
    """A unit, and before it what it needs and is not there yet. No recursion: chains are long."""
    stack = [(u, iter(problem.before[u]))]
    while stack:
        at, needs = stack[-1]
        missing = next((v for v in needs if not done[v]), None)
        if missing is not None:
            stack.append((missing, iter(problem.before[missing])))
            continue
        stack.pop()
        if not done[at]:
            done[at] = True
            order.append(at)


def starts_early(
    problem: Problem, order: Sequence[int], cap: float, one_queue: bool = False
) -> list[int]:
    """Each start as early as what it needs and the cap allow, behind the starts before it on its
    stream (with ``one_queue``: on all streams). Takes no longer, and gives collectives that are
    slower than their price some slack."""
    run = ListScheduler(problem, [0.0] * problem.n, Reference(problem, order), cap)
    queues: dict[int, list[int]] = {}
    for u in reversed(order):
        if problem.kind[u] == START:
            queues.setdefault(0 if one_queue else problem.stream[u], []).append(u)
    for u in order:
        for queue in queues.values():
            while queue:
                v = queue[-1]
                if not run.done[v]:
                    if run.missing[v] or not run.fits(v):
                        break
                    run.execute(v)
                queue.pop()
        if not run.done[u]:
            run.execute(u)
    return run.order


def safe(problem: Problem) -> list[int]:
    """Collectives start as early and are waited for as late as the memory of the order that came in
    allows. They keep their order, compute keeps its own, and no price is asked for."""
    original = range(problem.n)
    cap = peak_bytes(problem, original)
    return waits_late(problem, starts_early(problem, original, cap, one_queue=True), cap)
