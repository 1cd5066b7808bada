"""All ranks against each other where streams slow one another down: times found by hand."""

from __future__ import annotations

import pytest
from timelines import compute, start, wait

from fcoll.scheduling.clock import Rendezvous
from fcoll.scheduling.contention import Contention
from fcoll.scheduling.rank_lines import RankProgram, run_world

US = {"early": 4.0, "work": 10.0, "a": 10.0, "b": 10.0}


def program(steps, ranks_of, **contention):
    """``ranks_of`` are the ranks of each collective, by its name."""
    meetings = {
        step.collective: [Rendezvous(step.name, ranks_of[step.name])]
        for step in steps
        if step.kind == "start"
    }
    return RankProgram(steps, meetings, lambda s: US.get(s.name, 0.0), Contention(**contention))


def test_compute_is_slower_while_a_collective_of_its_rank_is_in_flight():
    """Rank 1 comes at 4, so the collective is in flight from 4 to 14. Until then rank 0 has done 4
    of its 10 us, then 5 more at half the rate, the last one behind it: 15. Rank 1 does 5 until 14.
    """
    both = {"a": (0, 1)}
    one = program([start("a", 0), compute("work")], both, slowdown=2.0)
    other = program([compute("early"), start("a", 0), compute("work")], both, slowdown=2.0)
    lines = run_world({0: one, 1: other})
    flights = {r: next(s for s in line.spans if s.step == "a") for r, line in lines.items()}
    assert {(s.start_us, s.end_us) for s in flights.values()} == {(4.0, 14.0)}
    assert lines[0].end_us == 15.0 and lines[1].end_us == 19.0


def test_a_collective_is_as_fast_as_its_slowest_rank_lets_it_be():
    """Both use a link of rank 0: each goes at half the rate, on ranks 1 and 2, too. With a second
    one later, the first has all of the link until then."""
    ranks_of, links = {"a": (0, 1), "b": (0, 2)}, {0: 1, 1: 1}
    alone = {1: program([start("a", 0)], ranks_of, links=links),
             2: program([start("b", 1)], ranks_of, links=links)}  # fmt: skip
    zero = program([start("a", 0), start("b", 1)], ranks_of, links=links)
    lines = run_world({0: zero, **alone})
    assert {r: line.end_us for r, line in lines.items()} == {0: 20.0, 1: 20.0, 2: 20.0}
    later = program([start("a", 0), compute("early"), start("b", 1)], ranks_of, links=links)
    lines = run_world({0: later, **alone})
    # a: 4 us alone, 6 more at half the rate: 16. b: 6 of 10 by then, the rest alone: 20.
    assert {r: line.end_us for r, line in lines.items()} == {0: 20.0, 1: 16.0, 2: 20.0}


def test_links_of_another_rank_do_not_count():
    ranks_of = {"a": (0, 1), "b": (0, 2)}
    apart = program([start("a", 0), start("b", 1)], ranks_of, links={0: 1, 1: 2})
    others = {1: program([start("a", 0)], ranks_of, links={0: 1}),
              2: program([start("b", 1)], ranks_of, links={1: 2})}  # fmt: skip
    lines = run_world({0: apart, **others})
    assert {line.end_us for line in lines.values()} == {10.0}


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("host_us", [0.0, 3.0])
def test_the_same_as_without_where_nothing_slows_down(lazy, host_us):
    waits = wait("w", 0, "a")
    steps = [compute("early"), start("a", 0, "early"), compute("work"), waits, compute("end", "w")]
    made = {r: program(steps[r:], {"a": (0, 1)}, host_us=host_us) for r in (0, 1)}
    plain = run_world(made, lazy)
    fast = {r: program(steps[r:], {"a": (0, 1)}, host_us=host_us, links={0: 1}) for r in (0, 1)}
    assert run_world(fast, lazy) == plain, "alone on its link"
    # By hand: rank 1 issues a as it begins, rank 0 when its first 4 us are over.
    late = 4.0 + host_us
    assert {
        (s.start_us, s.end_us) for line in plain.values() for s in line.spans if s.step == "a"
    } == {(late, late + 10.0)}


def test_a_second_wait_is_a_use_as_on_one_rank():
    """The first is put off to where the result is used; the second one is the program's own."""
    steps = [start("a", 0), wait("w", 0, "a"), wait("again", 0, "w"), compute("work")]
    put_off = [*steps[:2], steps[3]]
    (line,) = run_world({0: program(steps, {"a": (0,)})}).values()
    assert [(s.start_us, s.end_us) for s in line.waits] == [(0.0, 10.0)] and line.end_us == 20.0
    (line,) = run_world({0: program(put_off, {"a": (0,)})}).values()
    assert line.waits == () and line.end_us == 10.0
