"""Why a collective is exposed: each cause on a program made for it, and the facts that are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import timelines
from timelines import compute, many, run, start, wait

from fcoll.report import summary
from fcoll.report.why import CAUSES, reasons


def used_at_once():
    """b needs r at once; c could run first."""
    steps = [
        compute("a", flops=1),
        start("r", 0, "a"),
        wait("w", 0, "r"),
        compute("b", "w"),
        compute("c"),
    ]
    return run(steps, dict(a=10, r=20, b=10, c=30))


def too_little():
    steps = [compute("a", flops=1), start("r", 0, "a"), compute("c"), wait("w", 0, "r")]
    return run([*steps, compute("b", "w"), compute("d")], dict(a=10, r=20, c=5, b=10, d=30))


def little_else():
    steps = [compute("a", flops=1), start("r", 0, "a"), wait("w", 0, "r"), compute("b", "w")]
    return run(steps, dict(a=10, r=20, b=10))


def started_late():
    """r needs nothing of a, and is started behind it."""
    steps = [compute("a", flops=1), start("r", 0), wait("w", 0, "r"), compute("b", "w")]
    return run(steps, dict(a=40, r=20, b=10))


def waits_early():
    """The wait stands before c, which does not need r."""
    steps = [
        compute("a", flops=1),
        start("r", 0, "a"),
        wait("w", 0, "r"),
        compute("c"),
        compute("b", "w"),
    ]
    return run(steps, dict(a=10, r=20, c=30, b=10))


def queued():
    """r has compute to hide behind, but s is before it on its stream, and nobody waits for s."""
    steps = [
        compute("a", flops=1),
        start("s", 1, "a"),
        start("r", 0, "a"),
        compute("c"),
        wait("w", 0, "r"),
    ]
    return run([*steps, compute("b", "w")], dict(a=10, s=30, r=20, c=30, b=10))


def blocks_others():
    """The same, with s so long that compute stands still for it, too, on behalf of r."""
    steps = [
        compute("a", flops=1),
        start("s", 1, "a"),
        start("r", 0, "a"),
        compute("c"),
        wait("w", 0, "r"),
    ]
    return run([*steps, compute("b", "w")], dict(a=10, s=50, r=20, c=30, b=10))


def a_message():
    line = little_else()
    calls = tuple(replace(c, op="irecv", args={"src": 1, "tag": 0}) for c in line.collectives)
    return replace(line, collectives=calls)


def started_late_behind_a_cast():
    """As FSDP2 does it: a copy of a parameter right before the gather."""
    steps = [compute("a", flops=1), compute("cast"), start("r", 0, "cast"), wait("w", 0, "r")]
    return run([*steps, compute("b", "w")], dict(a=40, cast=1, r=20, b=10))


PROGRAMS = {
    "a message": (a_message, 0),
    "used at once": (used_at_once, 0),
    "too little compute": (too_little, 0),
    "little else to do": (little_else, 0),
    "started late": (started_late, 0),
    "waits early": (waits_early, 0),
    "queued": (queued, 0),
    "blocks others": (blocks_others, 1),
}


def test_every_cause_has_a_program():
    assert set(PROGRAMS) == set(CAUSES)


@pytest.mark.parametrize("cause", PROGRAMS)
def test_causes(cause):
    make, call = PROGRAMS[cause]
    line = make()
    why = reasons(line)
    assert why[call].cause == cause
    row = next(r for r in summary.rows(line, why) if call in r.ids)
    worst = max((i for i in row.ids if i in why), key=lambda i: line.exposed_us[i])
    assert row.why == why[worst].cause
    assert all(r.why == "" for r in summary.rows(line))


def test_copies_of_inputs_are_inputs():
    assert reasons(started_late_behind_a_cast())[0].cause == "started late"


def test_facts_of_a_queue():
    facts = reasons(blocks_others())
    assert facts[0].queued_us == pytest.approx(50) and facts[1].queued_us == 0
    assert any("Compute waits for all_reduce" in f and "queued behind it on tp" in f
               for f in facts[1].facts)  # fmt: skip
    assert any("begins 50.0 us after its issue: tp was busy with" in f for f in facts[0].facts)


def test_facts_of_compute():
    why = reasons(too_little())[0]
    assert why.lead_us == pytest.approx(5) and why.early_us == 0
    assert why.beside_us == pytest.approx(35)  # c and d
    assert "It takes 20.0 us; compute stands still for 15.0 us of it." in why.facts
    assert any("its first use, by mul at m.py:1, there are 5.00 us of compute" in f
               for f in why.facts)  # fmt: skip
    why = reasons(started_late())[0]
    assert why.early_us == pytest.approx(40)
    assert any("needs nothing but inputs of the step, and is issued 40.0 us" in f
               for f in why.facts)  # fmt: skip
    why = reasons(little_else())[0]
    assert why.beside_us == pytest.approx(0)
    assert any("No compute could run beside it" in f for f in why.facts)


def test_hidden_ones_have_no_reason():
    line = timelines.overlapped()
    assert set(reasons(line)) == {i for i, us in line.exposed_us.items() if us > 0}


def test_a_long_step_takes_no_time():
    assert len(reasons(many(3000))) > 1000


def test_modules_in_common():
    assert summary.common([]) == "" and summary.common(["a.0.b"]) == "a.0.b"
    assert summary.common(["a.0.b", "a.1.b"]) == "a.*.b"
    assert summary.common(["a.0", "a.0.b"]) == "a.0.*" and summary.common(["a", "b.c"]) == "*"
