"""Every order of the ranks' steps through the ring, the arena and the barrier; and the mistakes
that must not be in them are found when they are put back."""

from __future__ import annotations

import pytest
from interleavings import Stuck, explore
from memory_models import Arena, Barrier, Ring, Wrong

# -- the ring ---

IN_STEP = (("start", "finish") * 5,) * 2
ONE_AHEAD = (("start", "start", "finish", "start", "finish", "finish"),) * 2
AT_ONCE = (("start",) * 5 + ("finish",) * 5,) * 2
THREE_RANKS = (("start", "start", "finish", "finish") * 2,) * 3
# an async collective, then another, then a message that the peer wants before it makes either
MESSAGE_FIRST = (
    ("start", "start", "send 1", "finish", "finish"),
    ("recv", "start", "start", "finish", "finish"),
)
# one is a round ahead, and the other reads its parts of the first only after a message
READS_LATE = (
    ("start", "start", "finish", "finish", "start", "start", "send 1", "finish", "finish"),
    ("start", "start", "recv", "finish", "finish", "start", "start", "finish", "finish"),
)
# the same with as many in flight as the ring has slots
TOO_MANY = (
    ("start",) * 4 + ("finish",) * 4 + ("start", "send 1", "finish"),
    ("start",) * 4 + ("recv",) + ("finish",) * 4 + ("start", "finish"),
)


@pytest.mark.parametrize(
    "programs",
    [
        IN_STEP,
        AT_ONCE,
        MESSAGE_FIRST,
        READS_LATE,
        (("start", "start", "finish", "finish") * 2,) * 3,
    ],
    ids=["in step", "at once", "message first", "reads late", "three ranks"],
)
def test_ring(programs):
    assert explore(Ring(programs)) > 20


def test_ring_without_waiting_for_readers():
    with pytest.raises(Wrong):
        explore(Ring(ONE_AHEAD, size=2, waits_until_read=False))
    explore(Ring(ONE_AHEAD, size=2))


def test_a_start_that_completes_what_is_under_way_is_found():
    with pytest.raises(Stuck):
        explore(Ring(MESSAGE_FIRST, completes_earlier=True))


def test_a_window_as_large_as_the_ring_is_found():
    with pytest.raises(Stuck):
        explore(Ring(TOO_MANY, in_flight=4))
    explore(Ring(TOO_MANY, size=8, in_flight=4))


def test_more_starts_than_slots_need_a_window():
    with pytest.raises(Stuck):
        explore(Ring(AT_ONCE, in_flight=99))


# -- the arena ---

NOBODY: frozenset[int] = frozenset()


def fail_at(*calls: int) -> frozenset[int]:
    return frozenset(calls)


@pytest.mark.parametrize(
    "orphans",
    [
        (NOBODY, NOBODY),
        (fail_at(1), fail_at(1)),
        (fail_at(2), NOBODY),
        (fail_at(1, 2), NOBODY),
        (fail_at(1), fail_at(2)),
        (fail_at(1, 3), fail_at(1, 3)),
        (NOBODY,) * 3,
        (fail_at(1), NOBODY, fail_at(2)),
    ],
    ids=str,
)
def test_arena(orphans):
    assert explore(Arena(orphans)) > 20


def test_announcements_known_by_their_place_are_found():
    with pytest.raises(Wrong):
        explore(Arena((fail_at(1), fail_at(1)), by_id=False))
    explore(Arena((NOBODY, NOBODY), by_id=False))  # without a failure it does no harm


def test_a_place_that_a_peer_still_reads_is_found():
    with pytest.raises(Wrong):
        explore(Arena((fail_at(1, 2), NOBODY), meets_before_reuse=False))
    explore(Arena((fail_at(1), NOBODY), meets_before_reuse=False))  # one failure does no harm


# -- the barrier ---


@pytest.mark.parametrize("n, timeouts", [(2, 0), (2, 2), (3, 0), (3, 1)])
def test_barrier(n, timeouts):
    assert explore(Barrier(n, barriers=2, timeouts=timeouts)) > 10


def test_a_barrier_tried_again_is_a_phase_off():
    with pytest.raises(Wrong):
        explore(Barrier(3, barriers=2, timeouts=1, poisons=False))
