"""Which ranks of a large world take exactly the same time, so that one of them is enough to run.

Along an axis on which nobody sends messages, all ranks do the same, and exchanging two of them
changes nothing but their names, as long as both are as fast and every group spans the axis wholly
or not at all. So of such an axis the places of slow ranks are kept, and one place for all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from fcoll.graph.issued import Issued
from fcoll.report.places import is_whole, place_of, rank_at, varying


def representatives(
    axes: Mapping[str, int], calls: Iterable[Issued], slow: Iterable[int]
) -> dict[int, int] | None:
    """Of each rank the one that is run for it; None if all must be.

    >>> found = representatives({"dp": 4, "tp": 2}, (), slow=[5])  # at dp=2, tp=1
    >>> found
    {0: 0, 1: 1, 2: 0, 3: 1, 4: 4, 5: 5, 6: 0, 7: 1}
    """
    spans: dict[tuple[int, ...], list[str]] = {}
    with_messages: set[str] = set()
    for call in calls:
        if call.ranks not in spans:
            spans[call.ranks] = varying(call.ranks, axes)
        if call.row.is_p2p:
            with_messages.update(spans[call.ranks])
    if not all(is_whole(ranks, along, axes) for ranks, along in spans.items()):
        return None
    kept = _kept(axes, with_messages, slow)
    found = {}
    for rank in range(prod(axes.values())):
        place = zip(kept, place_of(rank, axes), strict=True)
        found[rank] = rank_at([at if at in keep else keep[-1] for keep, at in place], axes)
    return found


def _kept(axes: Mapping[str, int], with_messages: set[str], slow: Iterable[int]) -> list[list[int]]:
    """Of each axis the places that are run; the last one also for those that are not."""
    places = [place_of(rank, axes) for rank in slow]
    kept = []
    for i, (name, n) in enumerate(axes.items()):
        special = {place[i] for place in places}
        others = [at for at in range(n) if at not in special]
        kept.append(list(range(n)) if name in with_messages else [*sorted(special), *others[:1]])
    return kept
