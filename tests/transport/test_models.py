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


def test_a_start_that_keeps_no_copy_of_its_own_part_is_found():
    with pytest.raises(Wrong):
        explore(Ring(IN_STEP, keeps_own=False))


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


# A sum in place, a small call behind it, and a call on another group, which is messages here.
BEHIND_A_SUM = (("sum", "start", "send 1", "recv", "finish", "finish"),) * 1 + (
    ("sum", "start", "send 0", "recv", "finish", "finish"),
)
# One rank waits for the sum before the call on the other group, the other one after it.
WAITS_FOR_A_SHARE = (("sum", "finish", "send 1", "recv"), ("sum", "send 0", "recv", "finish"))
SUMS = (("sum", "start", "finish", "sum", "finish", "finish"),) * 2


@pytest.mark.parametrize(
    "programs",
    [BEHIND_A_SUM, WAITS_FOR_A_SHARE, SUMS, (("sum", "finish"),) * 3],
    ids=["behind a sum", "waits for a share", "sums", "three ranks"],
)
def test_sums_in_place(programs):
    assert explore(Ring(programs, size=8, in_flight=4)) > 20


def test_a_start_that_completes_a_sum_before_it_is_found():
    sizes = {"size": 8, "in_flight": 4, "shares_while_waiting": False}
    with pytest.raises(Stuck):
        explore(Ring(BEHIND_A_SUM, published_is_complete=True, **sizes))
    explore(Ring(BEHIND_A_SUM, **sizes))


def test_a_rank_that_makes_no_shares_while_it_waits_is_found():
    with pytest.raises(Stuck):
        explore(Ring(WAITS_FOR_A_SHARE, size=8, in_flight=4, shares_while_waiting=False))


# -- the arena ---

ALIKE = (0, "read 1", 0, "read 2", 1, "read 3", 0, "read 4")
# rank 1 has recompiled: it uses other lanes, and reads later
OTHER_LANES = ((0, "read 1", 0, "read 2", 0, "read 3"), (0, 1, "read 1", 0, "read 2", "read 3"))
# rank 1 reads the first to the end, rank 0 uses its lane again; it may fail before it reads
KEEPS_THE_FIRST = ((0, 0, 0, 0), (0, 1, "read 2", 1, "read 3", 1, "read 1", "read 4"))
# after two calls for which they disagree they use one lane again
AGREE_AGAIN = ((1, 0, 0, 0, 0, "read 5"), (0, 1, 0, 0, 0, "read 5"))
LATE = ((0, 0, 1, "read 2", 0, "read 4", 0, "read 1"), (0, 1, 0, "read 1", 1, 1, "read 2"))


@pytest.mark.parametrize(
    "programs",
    [(ALIKE,) * 2, OTHER_LANES, KEEPS_THE_FIRST, AGREE_AGAIN, LATE, ((0, 0, "read 2"),) * 3],
    ids=["alike", "other lanes", "keeps the first", "agree again", "late", "three ranks"],
)
def test_arena(programs):
    assert explore(Arena(programs)) > 20


def test_parts_that_are_copied_only_when_they_are_collected_are_found():
    with pytest.raises(Wrong):
        explore(Arena(LATE, copies_when_complete=False))
    explore(Arena((ALIKE,) * 2, copies_when_complete=False))  # as long as they agree


def test_a_claim_that_does_not_complete_what_is_in_its_lane_is_found():
    with pytest.raises(Wrong):
        explore(Arena(KEEPS_THE_FIRST, claim_completes=False))


def test_a_lane_that_is_used_again_after_one_call_is_found():
    with pytest.raises(Wrong):
        explore(Arena(AGREE_AGAIN, rounds=1))


# -- the barrier ---


@pytest.mark.parametrize("n, timeouts", [(2, 0), (2, 2), (3, 0), (3, 1)])
def test_barrier(n, timeouts):
    assert explore(Barrier(n, barriers=2, timeouts=timeouts)) > 10


def test_a_barrier_tried_again_is_a_phase_off():
    with pytest.raises(Wrong):
        explore(Barrier(3, barriers=2, timeouts=1, poisons=False))
