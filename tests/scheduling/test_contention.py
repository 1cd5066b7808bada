"""Contention worked out by hand, and what must hold of it: never faster, the same everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import programs as dags
from test_timeline import programs
from timelines import H100, compute, issued, start, wait

import fcoll
from fcoll import errors
from fcoll.scheduling.bounds import lower_bound_us, times
from fcoll.scheduling.clock import COMPUTE, START, Units, alone
from fcoll.scheduling.contention import Contention
from fcoll.scheduling.problem import problem_of
from fcoll.scheduling.timeline import timeline

BOTH = (0, 1, 8, 9)
RANKS = {"tp": (0, 1, 2, 3), "dp": (0, 8, 16, 24), "pp": BOTH, "cp": BOTH}  # intra, inter, both


def calls_of(steps):
    return tuple(replace(issued(s), ranks=RANKS[s.stream]) for s in steps if s.kind == "start")


def run(steps, costs, **fields):
    """A timeline on a machine with these fields."""
    machine = replace(H100, **fields)
    return timeline((tuple(steps), calls_of(steps)), machine, lambda s: costs.get(s.name, 0))


def spans(line):
    return {s.step: (s.start_us, s.end_us) for s in line.spans}


# -- by hand ---


def test_compute_slows_down_beside_a_collective():
    steps = [compute("a"), start("r", 0, "a"), compute("b"), compute("c"), wait("w", 0, "r")]
    line = run(steps, dict(a=10, r=12, b=20, c=6), slowdown=1.5)
    # In the 12 us of r, b does 8 of its 20; the other 12 take 12. c runs alone.
    assert spans(line) == {"a": (0, 10), "r": (10, 22), "b": (10, 34), "c": (34, 40)}
    assert line.exposed_us == {0: 0} and line.hidden_us == {0: 12}
    assert line.compute_us == line.step_us == 40


def test_a_collective_in_the_queue_slows_compute_down_when_it_flies():
    steps = [start("r", 0), start("s", 1), compute("a"), wait("w", 1, "s")]
    line = run(steps, dict(r=3, s=4, a=5), slowdown=2.0)
    # a does 3.5 of its 5 in the 7 us that r and then s are in flight.
    assert spans(line) == {"r": (0, 3), "s": (3, 7), "a": (0, 8.5)}


def test_two_groups_on_one_link_have_half_of_it_each():
    steps = [start("r", 0), start("s", 1, stream="pp"), wait("wr", 0, "r"), wait("ws", 1, "s")]
    alone = run(steps, dict(r=10, s=4))
    assert spans(alone) == {"r": (0, 10), "s": (0, 4)}
    both = run(steps, dict(r=10, s=4), shared_links=("intra",))
    # s takes 8 at half the rate, r has done 4 by then and the other 6 alone.
    assert spans(both) == {"r": (0, 14), "s": (0, 8)}
    assert both.exposed_us == {0: 14, 1: 0}
    assert spans(run(steps, dict(r=10, s=4), shared_links=("inter",))) == spans(alone)


def test_a_link_that_is_joined_and_left_again():
    steps = [
        start("r", 0),
        compute("a"),
        start("s", 1, stream="pp"),
        compute("b"),
        start("t", 2, stream="pp"),
        wait("w", 0, "r"),
    ]
    line = run(steps, dict(r=10, a=4, s=2, b=10, t=1), shared_links=("intra",))
    # r does 4 alone, 2 of 4 us beside s, then 4 alone: it is done at 12. t comes at 14.
    assert spans(line) == {"r": (0, 12), "a": (0, 4), "s": (4, 8), "b": (4, 14), "t": (14, 15)}


def test_a_group_on_both_links_has_the_lower_of_its_rates():
    steps = [start("p", 0, stream="pp"), start("t", 1), start("d", 2, stream="dp")]
    line = run(steps, dict(p=6, t=6, d=2), shared_links=("intra", "inter"))
    # Each link has two: all at half. d ends at 4; p shares with t until both end.
    assert spans(line) == {"p": (0, 12), "t": (0, 12), "d": (0, 4)}


def test_a_host_that_is_too_slow():
    steps = [compute("a"), compute("b"), start("r", 0, "b"), compute("c"), wait("w", 0, "r")]
    line = run(steps, dict(a=2, b=9, r=3, c=1), host_us=5.0)
    # Issued at 5, 10, 15, 20. b runs until 19 and hides the issue of r; c has to wait for its own.
    assert spans(line) == {"a": (5, 7), "b": (10, 19), "r": (19, 22), "c": (20, 21)}
    late = [(s.step, s.start_us, s.end_us) for s in line.host_waits]
    assert late == [("a", 0, 5), ("b", 7, 10), ("c", 19, 20)]
    assert line.exposed_us == {0: 1} and line.step_us == 22
    fast = run(steps, dict(a=2, b=9, r=3, c=1), host_us=0.1)
    assert fast.step_us == pytest.approx(14.1)  # only the first is waited for


def test_a_kernel_is_issued_once():
    steps = [compute("a", fused_with="a"), compute("b", "a", fused_with="a"), compute("c")]
    line = run(steps, dict(a=1, b=1, c=1), host_us=10.0)
    assert spans(line) == {"a": (10, 11), "b": (11, 12), "c": (20, 21)}


def test_flights_that_end_at_once():
    """Two on one link, a third after both, and one of no time at 20 that comes after that."""
    units = Units(
        kind=[START, START, START, COMPUTE, START], us=[5, 5, 1, 9, 0], stream=[0, 1, 2, -1, 3],
        flights=[[], [], [0, 1], [2], [2]], streams=list("abcd"),
        contention=Contention(links={0: 1}), links=[1, 1, 1, 0, 1], launches=[0] * 5,
    )  # fmt: skip
    rank = alone(units, range(5))
    assert rank.ends == [10, 10, 11, 20, 20] and rank.blocked == [(2, 0, 11)]
    (first,), (second,), (third,), (last,) = rank.tasks.values()
    assert [first.cause, second.cause, third.cause, last.cause] == [None, None, first, None]
    assert list(rank.exposed()) == [(0, 0, 10), (2, 10, 11)]


def test_machines_without_the_fields_are_as_they_were():
    assert Contention.of(H100, ()) is None
    assert all(
        Contention.of(replace(H100, **field), ()) is not None
        for field in (dict(slowdown=1.1), dict(host_us=1.0), dict(shared_links=("inter",)))
    )


@pytest.mark.parametrize(
    "field, told",
    [
        (dict(slowdown=0.9), "slowdown"),
        (dict(host_us=-1), "host_us"),
        (dict(shared_links=("nvlink",)), "intra"),
    ],
)
def test_fields_that_make_no_sense(field, told):
    with pytest.raises(errors.BadOption, match=told):
        replace(H100, **field)


def test_fields_in_a_file(tmp_path):
    made = replace(H100, slowdown=1.2, shared_links=("intra", "inter"), host_us=4.0)
    path = tmp_path / "h100.toml"
    path.write_text(made.to_toml())
    assert fcoll.Machine.of(path) == made


# -- of all programs ---

fields = st.fixed_dictionaries(
    {
        "slowdown": st.sampled_from([1.0, 1.25, 2.0]),
        "shared_links": st.sampled_from([(), ("intra",), ("intra", "inter")]),
        "host_us": st.sampled_from([0.0, 1.0, 7.0]),
    }
)


@given(programs(), fields)
def test_contention_makes_nothing_faster(program, field):
    steps, costs = program
    alone, line = run(steps, costs), run(steps, costs, **field)
    then, now = spans(alone), spans(line)
    for name, (begin, end) in then.items():
        assert now[name][0] >= begin - 1e-9 and now[name][1] >= end - 1e-9
        assert now[name][1] - now[name][0] >= end - begin - 1e-9
    # Compute works, stands still or waits for the host, and nothing else.
    parts = [s for s in line.spans if s.stream == "compute"]
    parts = sorted([*parts, *line.blocked, *line.host_waits], key=lambda s: (s.start_us, s.end_us))
    reached = 0.0
    for s in parts:
        assert s.start_us == pytest.approx(reached)
        reached = s.end_us
    for i, exposed in line.exposed_us.items():
        assert exposed >= -1e-9 and line.hidden_us[i] >= -1e-9


@given(programs(), fields)
def test_the_timeline_and_the_schedulers_agree(program, field):
    steps, costs = program
    line = run(steps, costs, **field)
    contention = Contention.of(replace(H100, **field), calls_of(steps))
    problem = problem_of(steps, lambda s: costs.get(s.name, 0.0), contention=contention)
    us, ends = times(problem, range(problem.n))
    assert us == pytest.approx(max(line.step_us, *ends))
    for name, (_, end) in spans(line).items():
        assert ends[problem.names.index(name)] == pytest.approx(end)


@settings(max_examples=40, deadline=None)
@given(dags(most=12), fields)
def test_plans_under_contention(program, field):
    steps, costs = program
    machine = replace(H100, **field)
    plan = fcoll.schedule((steps, calls_of(steps)), machine, costs, memory_cap=None)
    assert plan.lower_bound_us <= plan.makespan_us * (1 + 1e-9)
    assert plan.makespan_us <= plan.original_us * (1 + 1e-9)
    assert plan.timeline.step_us == pytest.approx(plan.makespan_us)
    bound = lower_bound_us(problem_of(plan.steps, lambda s: costs.get(s.name, 0.0)))
    assert bound <= plan.makespan_us * (1 + 1e-9), "of the times without contention"
