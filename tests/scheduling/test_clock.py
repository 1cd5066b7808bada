"""Everything that says when steps run says the same: timelines and schedulers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from test_contention import calls_of, fields, spans
from test_contention import run as in_place
from test_timeline import programs
from timelines import H100

from fcoll.scheduling.bounds import times
from fcoll.scheduling.contention import Contention
from fcoll.scheduling.listing import ListScheduler, Reference
from fcoll.scheduling.problem import problem_of

CALM = {"slowdown": 1.0, "shared_links": (), "host_us": 0.0}


def contention_of(steps, field):
    return Contention.of(replace(H100, **field), calls_of(steps))


def problem(steps, costs, field=CALM):
    return problem_of(
        steps, lambda s: costs.get(s.name, 0.0), contention=contention_of(steps, field)
    )


@given(programs(), fields)
def test_the_schedulers_have_the_times_of_the_timeline(program, field):
    steps, costs = program
    line, units = in_place(steps, costs, **field), problem(steps, costs, field)
    us, ends = times(units, range(units.n))
    assert us == pytest.approx(max(line.step_us, *ends))
    for name, (_, end) in spans(line).items():
        assert ends[units.names.index(name)] == pytest.approx(end)


@given(programs())
def test_a_list_schedule_runs_by_the_same_times(program):
    steps, costs = program
    units = problem(steps, costs)
    order = range(units.n)
    made = ListScheduler(units, [0.0] * units.n, Reference(units, order))
    for u in order:
        made.execute(u)
    assert made.ends == times(units, order)[1]
