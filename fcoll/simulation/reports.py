"""What is said of ranks that wait for one another, and of results that nobody waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from fcoll._torch import frames_of
from fcoll.errors import Deadlock
from fcoll.simulation.baton import Rank
from fcoll.simulation.work import SimulatedWork
from fcoll.source import show, sites_of

SHOWN = 16  # ranks of a report; of larger worlds, those that wait for others in a circle first


def deadlock(ranks: Sequence[Rank], killed: Collection[int], notes: Sequence[str]) -> Deadlock:
    """Which rank waits for what, where, and for whom."""
    waits_for = {r.number: r.awaits.missing() for r in ranks if r.awaits is not None}
    circle = _circle(waits_for)
    first = sorted(ranks, key=lambda r: (r.number not in circle, r.ended, r.number))[:SHOWN]
    lines = [_line(r, killed) for r in sorted(first, key=lambda r: r.number)]
    if len(ranks) > SHOWN:
        lines.append(f"  and {len(ranks) - SHOWN} more ranks")
    lines += [f"  fault: {note}" for note in notes]
    around = f"\nIn a circle: {' -> '.join(f'rank {r}' for r in circle)}." if circle else ""
    error = Deadlock(message="no rank can go on:\n" + "\n".join(lines) + around)
    error.ranks = tuple(circle[:-1] or waits_for)
    return error


def _line(rank: Rank, killed: Collection[int]) -> str:
    if rank.awaits is not None:
        shown, at = str(rank.awaits), show(*sites_of(frames_of(rank.stack)))
        here = f", waited for at {at}" if at and not shown.endswith(f" at {at}") else ""
        return f"  rank {rank.number} waits in {shown}{here}{names(rank.awaits.missing())}"
    done = "was killed" if rank.number in killed else "has ended" if rank.ended else "is ready"
    return f"  rank {rank.number} {done}"


def names(ranks: Sequence[int]) -> str:
    """ ", for ranks 1, 2" """
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f", for rank{'s' * (len(ranks) > 1)} {shown}"


def _circle(waits_for: dict[int, tuple[int, ...]]) -> list[int]:
    """Ranks each of which waits for the next, the first again at the end; or empty."""
    for start in waits_for:
        path = [start]
        while True:
            following = [r for r in waits_for.get(path[-1], ()) if r in waits_for]
            if not following:
                break
            if following[0] in path:
                return [*path[path.index(following[0]) :], following[0]]
            path.append(following[0])
    return []


def never_waited_for(works: Collection[SimulatedWork]) -> str:
    """One line for each call that nobody waited for."""
    count: Counter[tuple[str, str]] = Counter()
    ranks: dict[tuple[str, str], list[int]] = {}
    for work in works:
        absent = "" if work.done else names(work.missing()).replace(", for", "; not called by", 1)
        key = str(work), absent
        count[key] += 1
        ranks.setdefault(key, []).append(work.rank.number)
    lines = []
    for key, numbers in sorted(ranks.items()):
        who = sorted(set(numbers))
        said = names(who).removeprefix(", for ")
        lines.append(f"  {key[0]}, by {said}{key[1]}")
    return "\n".join(lines)
