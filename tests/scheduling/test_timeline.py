"""Timelines against times worked out by hand, and what must hold of all of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import sympy
import timelines
from hypothesis import given
from hypothesis import strategies as st
from timelines import compute, run, start, wait

from fcoll import errors
from fcoll.costs.model import collective_us
from fcoll.report.scale import sizes_from
from fcoll.scheduling.timeline import timeline


def spans(line) -> dict[str, tuple[float, float]]:
    return {s.step: (s.start_us, s.end_us) for s in line.spans}


def test_overlap_by_hand():
    line = timelines.overlapped()
    assert spans(line) == {
        "a": (0, 10),
        "r": (10, 25),  # hidden behind b
        "b": (10, 30),
        "s": (30, 34),
        "t": (34, 50),  # queued behind s on dp
        "c": (30, 35),
        "d": (50, 60),
    }
    # From 35 on compute waits for t, and t runs from 34 to 50: s is not to blame.
    assert line.exposed_us == {0: 0, 1: 0, 2: 15}
    assert line.hidden_us == {0: 15, 1: 4, 2: 1}
    assert [(s.start_us, s.end_us, s.collective) for s in line.blocked] == [(35, 50, 2)]
    assert (line.step_us, line.compute_us, line.exposed_total_us) == (60, 45, 15)
    assert line.streams == ("compute", "tp", "dp")
    assert line.issued_us == {0: 10, 1: 30, 2: 30}
    assert line.waited_us == {0: 30, 2: 50, 1: 60}


def test_time_in_the_queue_is_charged_to_the_one_that_ran():
    steps = [start("r", 0), start("s", 1), wait("ws", 1, "s"), wait("wr", 0, "r")]
    line = run(steps, dict(r=10, s=3))
    assert line.exposed_us == {0: 10, 1: 3}
    assert [(s.start_us, s.end_us, s.collective) for s in line.blocked] == [(0, 10, 0), (10, 13, 1)]


def test_a_collective_of_a_result_that_is_under_way_waits_for_it_and_compute_does_not():
    steps = [
        start("r", 0, stream="tp"),
        start("s", 1, "r", stream="dp"),
        compute("a"),
        wait("ws", 1, "s"),
    ]
    line = run(steps, dict(r=10, s=10, a=4))
    assert spans(line) == {"r": (0, 10), "s": (10, 20), "a": (0, 4)}
    assert line.exposed_us == {0: 6, 1: 10}


def test_a_step_that_needs_a_result_without_a_wait_blocks_all_the_same():
    line = run([start("r", 0), compute("a", "r")], dict(r=10, a=1))
    assert spans(line)["a"] == (10, 11)
    assert line.exposed_us == {0: 10}


def test_waits_put_off_to_the_first_use():
    steps = (
        start("r", 0),
        wait("w", 0, "r"),  # right behind the start, as a trace has it
        compute("a"),
        compute("b", "w"),
    )
    trace, costs = (steps, (timelines.issued(steps[0]),)), dict(r=10.0, w=0, a=4.0, b=1.0)
    in_place = timeline(trace, "h100", costs)
    assert in_place.exposed_us == {0: 10} and in_place.step_us == 15
    used = timeline(trace, "h100", costs, waits="first use")
    assert used.exposed_us == {0: 6} and used.step_us == 11
    # A second wait is the program's own: it stays.
    steps = (*steps[:2], wait("again", 0, "w"), *steps[2:])
    waited = timeline((steps, trace[1]), "h100", costs | {"again": 0}, waits="first use")
    assert waited.exposed_us == {0: 10}
    # So is another collective of the result: compute waits before it issues that.
    steps = (*steps[:2], start("s", 1, "w", stream="dp"), compute("a"))
    both = (timelines.issued(steps[0]), timelines.issued(steps[2]))
    chained = timeline((steps, both), "h100", costs | {"s": 5.0}, waits="first use")
    assert spans(chained) == {"r": (0, 10), "s": (10, 15), "a": (10, 14)}
    assert chained.exposed_us == {0: 10, 1: 0}
    with pytest.raises(errors.BadOption, match="first use"):
        timeline(trace, "h100", waits="never")


def test_memory_by_hand():
    line = timelines.overlapped()
    # a 100 at 0; r 50 and b 200 at 10; s 10, t 20 and c 30 at 30; a and r go with c at 35; b, d's
    # inputs t and c go at 50 and 60, s with its wait.
    assert line.memory == (
        (0.0, 100), (10, 350), (30, 410), (35, 260), (50, 60), (60, 0),
    )  # fmt: skip
    assert line.peak_bytes == 410


def test_costs_may_be_a_table_or_a_function_that_knows_little():
    steps = (compute("a"), start("r", 0, "a"), wait("w", 0, "r"))
    trace = (steps, (timelines.issued(steps[1]),))
    modelled = timeline(trace, timelines.H100)
    want = collective_us("all_reduce", 4, 4 << 20, timelines.H100, range(4))
    assert modelled.step_us == pytest.approx(want)
    assert timeline(trace, timelines.H100, {"r": 7.0}).step_us == 7
    known = timeline(trace, timelines.H100, lambda s: 5.0 if s.name == "a" else None)
    assert known.step_us == pytest.approx(5 + want)


def test_symbolic_steps_need_their_sizes():
    n = sympy.Symbol("s0", positive=True)
    trace = ((compute("a", op="aten::mm", flops=n**3),), ())
    small, large = (timeline(trace, "h100", sizes={"s0": k}).step_us for k in (100, 100_000))
    assert small < large
    with pytest.raises(errors.MissingSize):
        timeline(trace, "h100")


def test_nothing_takes_no_time():
    line = timeline(((), ()), "h100")
    assert (line.step_us, line.exposed_share, line.peak_bytes) == (0, 0, 0)


@st.composite
def programs(draw):
    """Any order of compute, starts on three streams and waits, with any dependencies back."""
    steps, costs, open_, names, ids = [], {}, [], [], 0
    for i in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["compute", "compute", "start", "wait"]))
        inputs = draw(st.lists(st.sampled_from(names), max_size=3, unique=True)) if names else []
        name = f"x{i}"
        if kind == "wait" and open_:
            started = open_.pop(draw(st.integers(0, len(open_) - 1)))
            steps.append(wait(name, started.collective, started.name))
        elif kind == "start":
            stream = draw(st.sampled_from(["tp", "dp", "pp"]))
            steps.append(start(name, ids, *inputs, stream=stream))
            open_.append(steps[-1])
            ids += 1
        else:
            steps.append(compute(name, *inputs))
        if steps[-1].kind != "wait":
            costs[name] = float(draw(st.integers(0, 20)))
        names.append(name)
    return steps, costs


@given(programs())
def test_what_holds_of_every_timeline(program):
    steps, costs = program
    line = run(steps, costs)
    at = spans(line)
    for stream in line.streams:
        ends = sorted((s.start_us, s.end_us) for s in line.spans if s.stream == stream)
        assert all(a[1] <= b[0] for a, b in pairwise(ends)), "one at a time"
    for step in steps:
        for needed in step.inputs:
            if step.name in at and needed in at:
                assert at[needed][1] <= at[step.name][0], "nothing runs before what it needs"
    for i, exposed in line.exposed_us.items():
        assert exposed >= 0 and line.hidden_us[i] >= 0
        assert (
            exposed + line.hidden_us[i] == costs[next(s.name for s in steps if s.collective == i)]
        )
    computed = sum(costs.get(s.name, 0) for s in steps if s.kind == "compute")
    assert line.compute_us == computed
    standing = sum(s.us for s in line.blocked)
    assert standing == line.exposed_total_us
    last = max([e for s, (_, e) in at.items()], default=0)
    assert computed + standing <= line.step_us == last
    # Compute works or stands still, and nothing else: its stream is one stretch without gaps.
    pieces = sorted(
        [(s.start_us, s.end_us) for s in line.spans if s.stream == "compute"]
        + [(s.start_us, s.end_us) for s in line.blocked]
    )
    reached = 0.0
    for a, b in pieces:
        assert a == reached
        reached = b


def test_sizes_of_a_growing_axis():
    assert sizes_from("1..4096")[-3:] == [1024, 2048, 4096]
    for bad in ("", "x", "4..2", "0..8", "1..y"):
        with pytest.raises(errors.BadOption):
            sizes_from(bad)
