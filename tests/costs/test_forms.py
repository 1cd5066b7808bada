"""Prices against published measurements, and the forms that a machine has."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from fcoll import errors
from fcoll.costs.machine import PRESETS, Form, Link, Machine
from fcoll.costs.model import collective_us, form_of, times_by_form

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
B300, H100 = (Machine.from_toml(PRESETS / f"{name}.toml") for name in ("b300", "h100"))
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published", BENCHMARKS / "published.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["published"]


# -- published times ---


def test_prices_are_near_to_published_times(published):
    """The bars: 12 % over all points, 25 % for any collective of any machine."""
    points = published.points()
    errors_of = {}
    for p in points:
        found = errors_of.setdefault((p.machine, p.ranks, p.op, p.form), [])
        found.append(p.error(published.preset(p.machine)))
    assert published.geometric(e for found in errors_of.values() for e in found) <= published.BAR
    for kind, found in errors_of.items():
        assert published.geometric(found) <= 0.25, kind
    assert len(points) >= 200 and all(p.source for p in points)


@pytest.mark.parametrize("nbytes, us", [(128, 19.2), (KIB, 19.5), (64 * KIB, 23.1), (MIB, 32.4)])
def test_a_small_all_reduce_of_nccl_on_h100(nbytes, us):
    """Triton-distributed issue 57; 7 to 12 us were the prices of a machine without a launch."""
    assert collective_us("all_reduce", 8, nbytes, H100) == pytest.approx(us, rel=0.15)


def test_a_fit_finds_the_constants_that_points_come_from(published):
    a100 = published.preset("a100")
    truth = replace(a100, collective_us=17.0, intra=replace(a100.intra, efficiency=0.6))
    sizes = [1 << k for k in range(8, 31, 2)]
    points = [
        published.Point("a100", 8, op, "library", b, float(collective_us(op, 8, b, truth)), "")
        for op in ("all_reduce", "all_gather_into_tensor")
        for b in sizes
    ]
    made = published.fit(published.neutral(a100), points)
    assert published.geometric(p.error(made) for p in points) < 0.02
    assert made.intra.efficiency == pytest.approx(0.6, rel=0.1)
    assert made.inter == published.neutral(a100).inter, "of what points say nothing it stays"


# -- forms ---


@pytest.mark.parametrize(
    "form, sizes",
    [
        ("one-shot", [16 * KIB, 256 * KIB, MIB]),
        ("multimem", [2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB]),
        ("library", [64 * MIB, 128 * MIB]),
    ],
)
def test_the_best_form_by_size_on_b300(form, sizes):
    """vLLM pull request 37756: one-shot to 1 MiB, multimem to 32 MiB, then NCCL."""
    for nbytes in sizes:
        best = form_of("all_reduce", 8, nbytes, replace(B300, form="best"))
        assert best == form or (form == "library" and best in ("ring", "tree", "nvls")), nbytes


def test_a_program_pays_the_librarys_price_unless_it_asks_for_another():
    nbytes = 256 * KIB
    by_form = times_by_form("all_reduce", 8, nbytes, B300)
    nccl = collective_us("all_reduce", 8, nbytes, B300)
    assert nccl == min(by_form[form] for form in ("ring", "tree", "nvls"))
    assert nccl > 2 * by_form["one-shot"]
    one_shot = replace(B300, form="one-shot")
    assert collective_us("all_reduce", 8, nbytes, one_shot) == by_form["one-shot"]
    assert collective_us("all_reduce", 8, nbytes, B300, form="one-shot") == by_form["one-shot"]
    assert collective_us("all_reduce", 8, nbytes, B300, form="best") == min(by_form.values())
    # What has no such form, and groups on several nodes, are priced as the library does them.
    for op, n in (("all_to_all_single", 8), ("all_gather_into_tensor", 8), ("all_reduce", 64)):
        assert collective_us(op, n, nbytes, one_shot) == collective_us(op, n, nbytes, B300)


def test_what_the_kernels_send():
    link = dict(launch_us=10.0, gb_per_s=100.0)
    forms = {name: Form(**link) for name in ("one-shot", "two-shot", "multimem", "nvls")}
    machine = replace(B300, forms=forms | {"mine": Form(7.0, 100.0, like="two-shot")})
    found = times_by_form("all_reduce", 8, 10**6, machine)
    assert found["one-shot"] == pytest.approx(10 + 7 * 10)
    assert found["two-shot"] == pytest.approx(10 + 2 * 7 / 8 * 10)
    assert found["multimem"] == found["nvls"] == pytest.approx(10 + 9 / 8 * 10)
    assert found["mine"] == pytest.approx(7 + 2 * 7 / 8 * 10)


def test_nvls_across_nodes_sends_shares_between_them():
    far = Link(latency_us=4.0, gb_per_s=1.0)
    machine = replace(B300, inter=far, forms={"nvls": Form(10.0, 1e6)})
    found = times_by_form("all_reduce", 32, 8 * 10**6, machine)
    # 4 nodes of 8: each rank all-reduces an 8th, 10**6 bytes, with three others, in two rounds.
    assert found["nvls"] == pytest.approx(10 + 2 * 2 * 4 + 2 * 3 / 4 * 1000)


def test_trees_of_nccl_run_along_a_node():
    machine = replace(H100, forms={}, collective_us=0.0)
    small = times_by_form("all_reduce", 64, 1e-9, machine)
    near, far = machine.intra.latency_us, machine.inter.latency_us
    assert small["tree"] == pytest.approx(2 * (7 * near + 3 * far), rel=1e-3)
    assert small["ring"] == pytest.approx(2 * 63 * (7 * near + far) / 8, rel=1e-3)
    # NCCL has trees of others than all-reduce only between ranks of different nodes.
    assert "tree" not in times_by_form("all_gather_into_tensor", 64, 1, machine)
    assert "tree" in times_by_form("all_gather_into_tensor", 8, 1, machine, range(0, 64, 8))


@given(b=st.floats(1, 1e11), chunk=st.floats(0.01, 100), fill=st.floats(0.1, 1000))
def test_a_ramp_costs_at_most_the_fill_of_its_pipeline(b, chunk, fill):
    plain = Link(2.0, 100.0)
    ramped = replace(plain, chunk_us=chunk, fill_us=fill)
    costs = [
        collective_us("all_gather_into_tensor", 8, b, replace(H100, intra=link))
        for link in (plain, ramped)
    ]
    transfer = b * 7 / 8 / 1e5
    extra = min(2 * math.sqrt(chunk * transfer), fill)
    assert costs[1] - costs[0] == pytest.approx(extra, rel=1e-6, abs=1e-6 * costs[0])


def test_prices_are_numbers_of_python():
    for form in ("", *B300.forms):
        for n in (8, 64):
            assert type(collective_us("all_reduce", n, MIB, B300, form=form)) is float, (form, n)


def test_forms_that_there_are_not():
    with pytest.raises(errors.BadOption, match="best, ring, tree, nvls") as caught:
        replace(H100, form="two-shot")
    assert "test_forms.py:" in str(caught.value)
    with pytest.raises(errors.UnknownMachine, match="b300:"):
        Machine.of("b300:")
    with pytest.raises(errors.BadOption, match="one-shot, two-shot, multimem, nvls"):
        replace(H100, forms={"three-shot": Form(1.0, 1.0)})
    with pytest.raises(errors.BadOption, match="nccl, rccl"):
        replace(H100, library="gloo")


def test_files_of_forms(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(B300.to_toml())
    assert Machine.of(path) == B300
    path.write_text(B300.to_toml().replace("[forms.nvls]", "[forms.nvlz]"))
    with pytest.raises(errors.BadMachineFile, match="nvlz"):
        Machine.of(path)


def test_symbols_of_forms():
    n, b = sympy.symbols("n b", positive=True)
    cost = sympy.lambdify((n, b), collective_us("all_reduce", n, b, replace(B300, form="best")))
    for ranks, nbytes in ((2, 1e4), (8, 3e6), (8, 1e9), (256, 1e8)):
        want = collective_us("all_reduce", ranks, nbytes, B300, form="best")
        assert cost(ranks, nbytes) == pytest.approx(want)
