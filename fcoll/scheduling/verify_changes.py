"""Does a graph with buckets and splits, or without collectives that had run before, compute what
the graph that came in does, and was it changed as its plan says?

Asked of every plan that changes its graph, by what fcoll.verify asks of anyone's: nothing is shared
with what makes the changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.fx import Node

from fcoll.scheduling.value_moves import Unsure
from fcoll.scheduling.value_parts import Part
from fcoll.scheduling.verify_graphs import GraphVerdict, Match, Side, compare
from fcoll.scheduling.verify_order import Fail


def check_changes(
    source: Side,
    changed: Iterable[Node],
    splits: Sequence[Any],
    buckets: Sequence[Any],
    reuses: Sequence[Any],
    fail: Fail,
) -> None:
    """``changed`` are nodes in the order in which they run. Raises Unsure where it cannot be told
    whether they compute the same."""
    sums = {name for split in splits for name in split.sums}
    match = compare(source, changed, sums)
    if isinstance(match, GraphVerdict) and match.equal is None:
        raise Unsure(match.why)
    if isinstance(match, GraphVerdict):
        fail(match.difference)
    if match.wholes.summed != sums:
        fail(f"{min(sums - match.wholes.summed)} is not summed in chunks")
    merged = {member for bucket in buckets for member in bucket.members}
    for chunk, whole, part in _chunks(splits):
        made, of = match.after.term_of(chunk), match.before.term_of(whole)
        if of is None or chunk in merged:
            continue  # a list, or sent in a bucket
        if made is None or match.wholes.part_of(made, of) != part:
            fail(f"{chunk} is missing, or not chunk {part.j} of {part.k} of {whole}")
    _check_events(match, splits, buckets, reuses, fail)


def _chunks(splits: Sequence[Any]) -> Iterator[tuple[str, str, Part]]:
    for split in splits:
        for name, blocks in zip(split.members, split.blocks, strict=True):
            for j in range(split.chunks):
                yield f"{name}_c{j}", name, Part(split.chunks, j, blocks)


def _check_events(
    match: Match, splits: Sequence[Any], buckets: Sequence[Any], reuses: Sequence[Any], fail: Fail
) -> None:
    """The buckets send their members in order; what is left out has run before."""
    names = [event.node.name for event in match.before.events]
    pairs = zip(match.after.events, match.members, strict=True)
    sent = {event.node.name: [names[i] for i in of] for event, of in pairs}
    whole = {chunk: name for chunk, name, _ in _chunks(splits)}
    for bucket in buckets:
        members = dict.fromkeys(whole.get(name, name) for name in bucket.members)
        if sent.get(bucket.name) != list(members):
            fail(f"{bucket.name} does not send its members in their order")
    left_out = set(names).difference(*sent.values())
    if left_out != {reuse.collective for reuse in reuses}:
        fail(f"{sorted(left_out)} are left out, others than the plan says")
