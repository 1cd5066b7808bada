"""Costs against simulations of the algorithms, symbols against numbers, machines against files."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from fcoll import errors
from fcoll.costs.forms import one_shot, ring, tree
from fcoll.costs.machine import PRESETS, Link, Machine, presets
from fcoll.costs.model import collective_us, compute_us, form_of, number, times_by_form
from fcoll.graph.steps import Step
from fcoll.table.collectives import COLLECTIVES

SHIPPED = ("a100", "b200", "b300", "h100", "h20", "mi300x")
H100 = Machine.from_toml(PRESETS / "h100.toml")
LINK = Link(latency_us=3.0, gb_per_s=20.0, message_us=0.25)
#: A machine that says nothing of its library, nor of what chunks cost.
PLAIN = replace(
    H100, library="", forms={}, collective_us=5.0,
    intra=Link(1.0, 450, 0.1, 0.8), inter=Link(4.0, 50, 0.5, 0.9),
)  # fmt: skip
rows = pytest.mark.parametrize("row", COLLECTIVES.values(), ids=lambda r: r.name)


def ring_by_hand(parts_sent: int, n: int, b: float, link: Link) -> float:
    """Every rank sends a part to the next when it has it; the time that the last one arrives."""
    have = [0.0] * n  # when each rank has what it sends next
    for _ in range(parts_sent):
        arrive = [t + link.latency_us + b / n / (link.gb_per_s * 1e3) for t in have]
        have = [arrive[(i - 1) % n] for i in range(n)]
    return max(have)


@pytest.mark.parametrize("n", [2, 3, 8, 100])
@pytest.mark.parametrize("b", [64, 10_000, 3e8])
def test_ring_is_what_a_simulated_ring_takes(n, b):
    gather = ring(COLLECTIVES["all_gather_into_tensor"], n, b, LINK)
    assert gather == pytest.approx(ring_by_hand(n - 1, n, b, LINK))
    assert ring(COLLECTIVES["all_reduce"], n, b, LINK) == pytest.approx(
        ring_by_hand(2 * (n - 1), n, b, LINK)
    )


@pytest.mark.parametrize("n", [2, 8, 1024])
@pytest.mark.parametrize("b", [1e4, 1e6, 1e9])
def test_tree_has_the_best_number_of_chunks(n, b):
    row = COLLECTIVES["all_reduce"]
    rounds, total = 2 * math.log2(n), 2 * b * (n - 1) / n
    rate = LINK.gb_per_s * 1e3

    def with_chunks(k: float) -> float:
        return (rounds + k) * (LINK.latency_us + total / k / rate)

    cost = tree(row, n, b, LINK)
    best = min(with_chunks(k) for k in np.geomspace(1e-3, 1e6, 20001))
    assert cost == pytest.approx(best, rel=1e-4)


def test_one_shot_sends_the_whole_message_to_each_peer():
    whole = one_shot(COLLECTIVES["all_reduce"], 8, 20_000, LINK)
    assert whole == pytest.approx(3.0 + 6 * 0.25 + 7 * 20_000 / 20_000)
    parts = one_shot(COLLECTIVES["all_gather_into_tensor"], 8, 20_000, LINK)
    assert parts == pytest.approx(3.0 + 6 * 0.25 + 7 / 8)


@rows
@pytest.mark.parametrize("machine", [H100, replace(H100, ranks_per_node=4)], ids=["8", "4"])
def test_symbols_give_the_numbers(row, machine):
    n, b = sympy.symbols("n b", positive=True)
    cost = collective_us(row, n, b, machine)
    at = sympy.lambdify((n, b), cost, "numpy")
    ns, bs = np.array([2.0, 4, 8, 16, 1024]), np.array([64.0, 1e5, 1e6, 3e7, 1e9])
    found = np.broadcast_to(at(ns, bs), ns.shape)
    pairs = zip(ns, bs, strict=True)
    want = [float(collective_us(row, int(k), float(x), machine)) for k, x in pairs]
    np.testing.assert_allclose(found, want, rtol=1e-9)
    assert sympy.sstr(cost)  # it can be printed


@rows
@pytest.mark.parametrize("machine", [H100, PLAIN], ids=["nccl", "plain"])
def test_the_best_of_the_librarys_forms_is_taken(row, machine):
    costs = times_by_form(row, 8, 1 << 20, machine)
    form = form_of(row, 8, 1 << 20, machine)
    total = collective_us(row, 8, 1 << 20, machine)
    assert total == (pytest.approx(costs[form]) if row.steps(2) else 0)
    assert list(costs.values()) == sorted(costs.values())
    assert total == min(costs.values(), default=0), "neither has another form than its library's"


@rows
@given(
    n=st.integers(2, 4096),
    b=st.floats(1, 1e10),
    more=st.floats(1, 100),
    size=st.sampled_from([1, 4, 8, 5000]),
)
def test_more_bytes_never_cost_less(row, n, b, more, size):
    machine = replace(H100, ranks_per_node=size)
    assert collective_us(row, n, b, machine) <= collective_us(row, n, b * more, machine) * (
        1 + 1e-9
    )


def test_small_messages_avoid_the_ring_and_large_ones_the_extra_bytes():
    assert form_of("all_reduce", 8, 1024, PLAIN) == "one-shot"
    assert form_of("all_reduce", 8, 1 << 28, PLAIN) == "ring"
    assert form_of("all_reduce", 4096, 1 << 20, PLAIN) == "tree"


def test_the_ranks_of_a_group_decide_the_link():
    b = 1 << 28
    near = collective_us("all_gather_into_tensor", 8, b, H100, range(8))
    spread = collective_us("all_gather_into_tensor", 8, b, H100, range(0, 64, 8))
    assert spread / near == pytest.approx(450 * 0.8 / (50 * 0.93), rel=0.1)
    # 8 ports carry what crosses between nodes, but each rank's own bytes go through its own.
    both = collective_us("all_gather_into_tensor", 64, b, H100, range(64))
    personal = collective_us("all_to_all_single", 64, b, H100, range(64))
    assert both < 1.5 * near
    assert personal == pytest.approx(b * 56 / 64 / (50e3 * 0.93), rel=0.05)


def test_one_rank_talks_to_nobody():
    assert collective_us("all_reduce", 1, 1 << 20, H100) == 0


# -- compute ---


def step(**changes) -> Step:
    plain = dict(
        name="mm", kind="compute", inputs=(), stream="compute", flops=0, read_bytes=0,
        write_bytes=0, dtype="bfloat16", out_bytes=0, last_use_of=(), collective=None,
        op="aten::mm", source="", module="", phase="fwd",
    )  # fmt: skip
    return Step(**{**plain, **changes})


def test_a_step_takes_its_flops_or_its_bytes():
    by_flops = compute_us(step(flops=989e12 * 0.7), H100)
    assert by_flops == pytest.approx(1e6 + H100.launch_us)
    by_bytes = compute_us(step(read_bytes=3350e9 * 0.85 / 2, write_bytes=3350e9 * 0.85 / 2), H100)
    assert by_bytes == pytest.approx(1e6 + H100.launch_us)
    slow = compute_us(step(flops=67e12 * 0.7, dtype="float32"), H100)
    assert slow == pytest.approx(1e6 + H100.launch_us)


def test_a_kernel_is_launched_once():
    rest = step(name="b", read_bytes=1000, fused_with="a")
    assert compute_us(rest, H100) < H100.launch_us
    assert compute_us(replace(rest, name="a"), H100) > H100.launch_us
    assert compute_us(step(name="b", fused_with="a"), H100) == 0


def test_costs_of_symbolic_steps():
    s = sympy.Symbol("s0", positive=True)
    cost = compute_us(step(flops=2 * s**3, read_bytes=4 * s**2), H100)
    want = compute_us(step(flops=2 * 4096**3, read_bytes=4 * 4096**2), H100)
    assert number(cost, {"s0": 4096}) == pytest.approx(want)
    with pytest.raises(errors.MissingSize, match=r'sizes=\{"s0": 128'):
        number(cost)


# -- machines ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FCOLL_MACHINE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_machines(name, folder):
    machine = Machine.preset(name)
    assert machine.name == name and machine.ranks_per_node == 8
    assert machine.inter.gb_per_s == (100 if name == "b300" else 50)  # 800 and 400 Gb/s
    assert machine.flops["bfloat16"] > machine.flops["float32"]
    assert set(SHIPPED) <= set(presets())


def test_a_machine_survives_its_file(folder):
    made = replace(
        H100, name="mine", measured={"all_reduce": ((64.0, 1.5), (1e6, 80.25))}, measured_ranks=2
    )
    (folder / "mine.toml").write_text(made.to_toml())
    assert Machine.preset("mine") == Machine.of(folder / "mine.toml") == made
    assert Machine.of(made) is made


def test_machines_that_are_not_there(folder):
    with pytest.raises(errors.UnknownMachine, match="one of a100, b200, b300, cpu, cpu-gloo, h100"):
        Machine.of("h1000")
    with pytest.raises(errors.NotCalibrated, match="fcoll calibrate"):
        Machine.of("local")
    with pytest.raises(errors.BadMachineFile, match="No such file"):
        Machine.of(folder / "none.toml")


@pytest.mark.parametrize(
    "text, why",
    [
        ("memory_gb_per_s = ", "Invalid"),
        ("memory_gb_per_s = 3\nspeed = 4", "no 'speed'"),
        ("memory_gb_per_s = 3\n[flops]\nfloat32 = 1", "intra"),
        ("memory_gb_per_s = 3\n[flops]\n[intra]\nlatency_us = 1\ngb_per_s = 1", "positive"),
    ],
)
def test_files_that_are_no_machines(folder, text, why):
    (folder / "bad.toml").write_text(text)
    with pytest.raises(errors.BadMachineFile, match=why):
        Machine.preset("bad")


def test_measured_times_go_before_the_formulas():
    points = ((1024, 4.0), (4096, 8.0), (1 << 20, 800.0))
    machine = replace(H100, measured={"all_reduce": points}, measured_ranks=2)
    for b, us in points:
        assert collective_us("all_reduce", 2, b, machine) == pytest.approx(us)
    assert collective_us("all_reduce", 2, 2048, machine) == pytest.approx(math.sqrt(32))
    assert collective_us("all_reduce", 2, 4, machine) == 4.0
    assert collective_us("all_reduce", 2, 2 << 20, machine) == pytest.approx(1600)
    assert collective_us("all_reduce_", 2, 1000, machine) == collective_us(
        "all_reduce", 2, 1000, machine
    )
    # Of other groups and other collectives nothing was measured.
    assert collective_us("all_reduce", 4, 1024, machine) == collective_us(
        "all_reduce", 4, 1024, H100
    )
    assert collective_us("broadcast", 2, 1024, machine) == collective_us("broadcast", 2, 1024, H100)
