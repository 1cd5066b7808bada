"""Every scheduler on random programs: right, under the cap, no worse than what came in."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_steps import Writer, programs

import fcoll
from fcoll.errors import BadOption, BadPlan, MemoryCapTooSmall, NoGraph, UnknownScheduler
from fcoll.scheduling.listing import RangeMax
from fcoll.scheduling.scheduler_registry import SCHEDULERS

CHECKS = settings(  # no shrinking: it takes minutes, and these programs are small
    phases=[Phase.generate],
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
NAMES = ("original", "safe", "sink_waits", "raise_comms", "reorder_compute", "overlap", "search")
RULES = ("original", "safe", "sink_waits", "raise_comms", "reorder_compute")
KEEP_CAPS = ("original", "safe", "overlap", "search")


def plan(program, scheduler="overlap", cap="+0%"):
    steps, us = program
    return fcoll.schedule((steps, ()), costs=us, memory_cap=cap, scheduler=scheduler)


def brute_force(program, cap: float) -> float:
    """The least time of all orders under a cap, by trying them: no code of the schedulers."""
    steps, us = program
    least = float("inf")
    for order in itertools.permutations(steps):
        place = {s.name: i for i, s in enumerate(order)}
        valid = all(place[x] < place[s.name] for s in steps for x in s.inputs)
        if valid and held(order) <= cap:
            least = min(least, taken(order, us))
    return least


def taken(order, us) -> float:
    now, free, ends = 0.0, {}, {}
    for s in order:
        if s.kind == "start":
            begin = max([now, free.get(s.stream, 0.0)])
            free[s.stream] = ends[s.name] = begin + us[s.name]
        else:
            now = max([now, *(ends[x] for x in s.inputs if x in ends)]) + us[s.name]
    return max([now, *free.values()])


def held(order) -> int:
    freed = {x for s in order for x in s.last_use_of}
    most = 0
    for i in range(len(order)):
        live = 0
        for s in order[: i + 1]:
            used_later = any(s.name in (t.name, *t.uses) for t in order[i:])
            live += s.out_bytes if s.name not in freed or used_later else 0
        most = max(most, live)
    return most


@CHECKS
@given(program=programs())
def test_every_plan_is_right(program):
    for name in NAMES:
        made = plan(program, name)
        made.verify()
        assert made.makespan_us >= made.lower_bound_us - 1e-6
        assert sorted(s.name for s in made.steps) == sorted(s.name for s in program[0])
        assert made.makespan_us == pytest.approx(taken(made.steps, program[1]))
        assert made.makespan_us == pytest.approx(made.timeline.step_us)
        assert made.peak_bytes == held(made.steps)
        assert plan(program, name).digest == made.digest
        if name in KEEP_CAPS:
            assert made.peak_bytes <= made.original_peak_bytes == held(program[0])
            assert made.makespan_us <= made.original_us + 1e-6


@CHECKS
@given(program=programs())
@pytest.mark.parametrize("scheduler", ["overlap", "search"])
def test_a_larger_cap_is_never_slower(program, scheduler):
    peak = held(program[0])
    caps = [peak, int(peak * 1.013) + 1, int(peak * 1.06) + 1, int(peak * 1.4) + 1, None]
    times = [plan(program, scheduler, cap or None).makespan_us for cap in caps]
    assert times == sorted(times, reverse=True)


@CHECKS
@given(program=programs(most=12))
@pytest.mark.parametrize("scheduler", ["overlap", "search"])
def test_no_plan_is_slower_than_an_order_of_a_scheduler_that_fits(program, scheduler):
    rivals = [plan(program, name, None) for name in RULES]
    for cap in sorted({r.peak_bytes for r in rivals}):
        made = plan(program, scheduler, cap or None)
        fitting = [r.makespan_us for r in rivals if not cap or r.peak_bytes <= cap]
        assert made.makespan_us <= min(fitting) + 1e-6


@CHECKS
@given(program=programs(most=12), seed=st.integers(0, 99))
def test_seeds_are_candidates_and_caps_stay_monotone(program, seed):
    """Any valid order is one: here each step as soon as it can be, drawn by lot."""

    def drawn(job):
        rng = random.Random(seed)
        left = list(job)
        order: list = []
        while left:
            names = {s.name for s in job} - {s.name for s in order}
            free = [s for s in left if names.isdisjoint(s.inputs)]
            order.append(rng.choice(free))
            left.remove(order[-1])
        return order

    steps, us = program

    def planned(cap):
        given = dict(costs=us, memory_cap=cap, seeds=[drawn])
        return fcoll.schedule((steps, ()), **given).makespan_us

    effects = any(s.effect for s in steps)
    if not effects:
        other = plan(program, drawn, None)
        assert planned(other.peak_bytes or None) <= other.makespan_us + 1e-6
    peak = held(steps)
    caps = [peak, int(peak * 1.013) + 1, int(peak * 1.4) + 1, None]
    times = [planned(cap or None) for cap in caps]
    assert times == sorted(times, reverse=True)


@CHECKS
@given(program=programs())
def test_safe_keeps_the_order_of_collectives(program):
    def starts(steps):
        return [s.name for s in steps if s.kind == "start"]

    assert starts(plan(program, "safe").steps) == starts(program[0])


@CHECKS
@given(program=programs(most=3, effects=False))
def test_search_is_exact_on_small_programs(program):
    peak = held(program[0])
    for cap in (peak, None):
        made = plan(program, "search", cap or None)
        assert made.makespan_us == pytest.approx(brute_force(program, cap or float("inf")))


# -- by hand ---


def two_layers():
    """Two gathers whose compute could hide them: in place both are exposed."""
    writer = Writer()
    for _ in range(2):
        writer.collective([], 10.0, 1000, "dp")
        writer.compute([writer.values[-1]], 10.0, 100)
    return writer.finish({3})


def test_gathers_are_prefetched():
    assert plan(two_layers(), "original").makespan_us == 40
    made = plan(two_layers(), cap=None)
    assert made.makespan_us == made.lower_bound_us == 30
    assert made.exposed_us == 10 and made.speedup == pytest.approx(4 / 3)


def test_the_cap_forbids_prefetching():
    assert plan(two_layers(), cap="+0%").makespan_us == 40


def test_a_cap_below_the_original_is_met_where_it_can_be():
    """All gathers first: just in time takes half of the memory."""
    writer = Writer()
    for _ in range(4):
        writer.collective([], 10.0, 1000, "dp")
    for i in range(4):
        writer.compute([writer.values[i]], 10.0, 0)
    program = writer.finish(set())
    assert plan(program, "original").peak_bytes == 4000
    assert plan(program, cap=2000).peak_bytes <= 2000
    with pytest.raises(MemoryCapTooSmall, match=r"the least is 1000 B, .* holds 3.91 KiB"):
        plan(program, cap=500)


def test_the_largest_of_a_range():
    values = [7 * i * i % 31 for i in range(70)]
    table = RangeMax(values)
    for begin, end in itertools.combinations(range(71), 2):
        assert table.most(begin, end) == max(values[begin:end])


# -- one's own ---


def test_no_plan_is_slower_than_its_seeds():
    """Where memory is tight, an exact search finds an order that list schedules miss."""
    writer = Writer()
    rng = random.Random(264)
    for _ in range(7):
        k = len(writer.values)
        given = [writer.values[rng.randrange(k)] for _ in range(rng.randint(0, 2))] if k else []
        if rng.random() < 0.5:
            us, out = rng.randint(0, 20), rng.randint(0, 8) * 1024
            writer.collective(given, us, out, rng.choice(["dp", "tp"]))
        else:
            writer.compute(given, rng.randint(0, 20), rng.randint(0, 8) * 1024)
    steps, us = writer.finish({rng.randrange(9)})
    exact = plan((steps, us), "search").makespan_us
    assert exact < plan((steps, us)).makespan_us
    made = fcoll.schedule((steps, ()), costs=us, seeds=["search", "safe"])
    assert made.makespan_us == exact


def test_a_seed_that_fails_is_left_out_and_one_that_is_not_whole_is_told():
    def fails(job):
        raise BadPlan(scheduler="mine", why="this graph is too large for it")

    steps, us = two_layers()
    made = fcoll.schedule((steps, ()), costs=us, memory_cap=None, seeds=[fails])
    assert made.makespan_us == 30
    with pytest.raises(BadPlan, match="missing, unknown or there twice"):
        fcoll.schedule((steps, ()), costs=us, seeds=[lambda job: ["s0"]])
    with pytest.raises(UnknownScheduler):
        fcoll.schedule((steps, ()), costs=us, seeds=["fastest"])


def test_a_function_is_a_scheduler():
    made = fcoll.schedule(
        (two_layers()[0], ()), costs=two_layers()[1], scheduler=lambda steps: list(steps)
    )
    assert made.makespan_us == 40


def test_a_scheduler_gets_a_name():
    @fcoll.scheduler("backwards")
    def backwards(job):
        assert job.cap_bytes == job.original.peak_bytes and job.us["s0"] == 10
        return [s.name for s in reversed(job)]

    try:
        with pytest.raises(BadPlan, match=r"plan of scheduler 'backwards' is wrong: .* needs"):
            plan(two_layers(), "backwards")
    finally:
        del SCHEDULERS["backwards"]


WRONG = ([], ["s0"], ["s0", "s0", "w0", "c2", "s2", "w2"], None, [1, 2], 7)


@pytest.mark.parametrize("names", WRONG, ids=str)
def test_an_order_that_is_not_whole(names):
    with pytest.raises(BadPlan):
        plan(two_layers(), lambda job: names)


@pytest.mark.parametrize("us", [-1.0, float("nan"), float("inf"), "soon"], ids=str)
def test_a_time_that_is_none(us):
    steps, given = two_layers()
    for costs in (given | {"s0": us}, lambda step: us if step.name == "s0" else 1.0):
        with pytest.raises(BadOption, match=r"s0: costs="):
            fcoll.schedule((steps, ()), costs=costs)


def test_over_the_cap():
    def greedy(job):
        return sorted((s.name for s in job), key=lambda n: ("swc".index(n[0]), n))

    with pytest.raises(BadPlan, match=r"the cap is"):
        plan(two_layers(), greedy)
    assert plan(two_layers(), greedy, None).peak_bytes == 2100


def test_unknown_names():
    with pytest.raises(UnknownScheduler, match=r"no scheduler 'fastest'.* Use one of original, "):
        plan(two_layers(), "fastest")
    for cap in ("5%", True, 0, 1.5):
        with pytest.raises(BadOption, match=f"memory_cap={cap!r}"):
            plan(two_layers(), cap=cap)
    with pytest.raises(NoGraph):
        plan(two_layers(), "torch")
    with pytest.raises(NoGraph):
        plan(two_layers()).apply()
    with pytest.raises(BadOption):
        plan(two_layers()).explain("nothing")
