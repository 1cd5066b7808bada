"""Time run backwards: which problems have a mirror, and what it keeps."""

from __future__ import annotations

from random_steps import Writer, step

from fcoll.scheduling.bounds import times
from fcoll.scheduling.mirror import flipped, mirrored
from fcoll.scheduling.overlap import NEVER, Overlap
from fcoll.scheduling.problem import problem_of


def gathered_and_updated():
    """Parameters are gathered, used and then written in place: the write needs the gathers' ends,
    too, as an optimizer's does."""
    writer = Writer()
    for _ in range(3):
        writer.collective([], 10.0, 1000, "dp")
        writer.compute([writer.values[-1]], 10.0, 100)
    steps, us = writer.finish(set())
    starts = [s.name for s in steps if s.kind == "start"]
    computed = [s.name for s in steps if s.kind == "compute"]
    update = step("update", "compute", [*starts, *computed], out=1)
    us["update"] = 5.0
    return problem_of((*steps, update), lambda s: us[s.name])


def test_a_collective_may_be_needed_behind_its_wait():
    problem = gathered_and_updated()
    back = mirrored(problem)
    assert back is not None
    assert mirrored(back) is not None
    order = flipped(range(problem.n), problem.n)
    place = {u: i for i, u in enumerate(order)}
    assert all(place[v] < place[u] for u in range(back.n) for v in back.before[u])
    assert sum(back.us) == sum(problem.us)
    assert times(problem, range(problem.n))[0] == 65


def test_such_programs_are_scheduled_backward_too():
    problem = gathered_and_updated()
    planner = Overlap(problem)
    assert planner.back is not None
    assert planner.best(NEVER).us == planner.bound_us == 45


def test_one_that_is_needed_before_its_wait_has_none():
    start = step("s0", "start", stream="dp", out=8, collective=0)
    early = step("c1", "compute", ["s0"])
    wait = step("w0", "wait", ["s0"], collective=0)
    assert mirrored(problem_of((start, early, wait), lambda s: 1.0)) is None
