"""``fcoll schedule``: schedulers side by side."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import fcoll
from fcoll.cli import main
from fcoll.report import experiments
from fcoll.report.experiments import compare


@pytest.fixture
def traced():
    """A layer whose gradients are reduced on one axis, and its result on another."""
    with fcoll.fake_world(dp=4, tp=2) as mesh:
        weights = [torch.ones(256, 256) for _ in range(4)]

        def step(x):
            sums = []
            for w in weights:
                x = fcoll.all_reduce(x @ w, "sum", mesh["tp"])
                sums.append(fcoll.all_reduce(w * 2, "sum", mesh["dp"]))
            return x, sums

        trace = fcoll.trace(step, torch.ones(64, 256))
        _ = trace.steps
        yield trace


def test_every_way_is_planned(traced):
    found = compare(traced, ["sink_waits", "overlap"], ["+0%", "none"], ["h100", "a100"])
    ways = [(r.machine, r.scheduler, r.memory) for r in found]
    for machine in ("h100", "a100"):
        assert [w[1:] for w in ways if w[0] == machine] == [
            ("original", "none"),
            ("sink_waits", "none"),  # it heeds no cap
            ("overlap", "+0%"),
            ("overlap", "none"),
        ]
    h100 = {(r.scheduler, r.memory): r for r in found if r.machine == "h100"}
    original, free = h100["original", "none"], h100["overlap", "none"]
    assert free.makespan_us < original.makespan_us
    assert free.makespan_us <= h100["overlap", "+0%"].makespan_us
    assert h100["overlap", "+0%"].peak_bytes <= original.peak_bytes
    plan = fcoll.schedule(traced, memory_cap=None)
    assert (free.makespan_us, free.peak_bytes) == (plan.makespan_us, plan.peak_bytes)
    assert all(r.over_bound >= 1 - 1e-9 for r in found)


def test_a_cap_that_cannot_be_kept_is_a_row(traced):
    *_, last = compare(traced, ["overlap"], ["1"])
    assert "MemoryCapTooSmall" in last.failed and not last.makespan_us
    text = experiments.render(compare(traced, ["overlap"], ["1"], noise=0.2), 0.2)
    assert "no plan" in text and "MemoryCapTooSmall" in text


def test_noise_moves_the_step_but_not_by_more_than_it_is(traced):
    plan = fcoll.schedule(traced, memory_cap=None)
    assert experiments.noisy_us(plan, 0.0) == pytest.approx(plan.makespan_us)
    noisy = experiments.noisy_us(plan, 0.3)
    assert noisy == experiments.noisy_us(plan, 0.3)
    assert 0.7 * plan.makespan_us <= noisy <= 1.3 * plan.makespan_us
    assert noisy != pytest.approx(plan.makespan_us)


def test_as_csv_and_as_a_picture(traced):
    found = compare(traced, ["safe", "overlap"], ["+0%", "none"])
    rows = list(csv.DictReader(io.StringIO(experiments.as_csv(found))))
    assert [float(r["makespan_us"]) for r in rows] == [r.makespan_us for r in found]
    picture = ElementTree.fromstring(experiments.plot(found, "a <title>"))
    dots = picture.findall(".//{*}circle")
    assert len(dots) == len(found)
    # the faster, the higher up: y grows downwards
    slow, fast = found[0], min(found, key=lambda r: r.makespan_us)
    titles = [dot.findtext("{*}title") for dot in dots]
    height = {t.partition(",")[0]: float(d.get("cy")) for t, d in zip(titles, dots, strict=True)}
    assert fast.makespan_us < slow.makespan_us
    assert height["overlap"] > height["original"]


def test_the_command(capsys, tmp_path):
    program = ["--demo", "tiny", "--mesh", "dp=2,tp=2", "-q"]
    svg, table = tmp_path / "plot.svg", tmp_path / "table.csv"
    options = ["--schedulers", "safe,overlap", "--svg", str(svg), "--csv", str(table)]
    assert main(["schedule", *program, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["scheduler", "original", "safe", "overlap"]
    assert svg.read_text().startswith("<svg") and len(table.read_text().splitlines()) == 4
    assert main(["schedule", *program, "--json", "--schedulers", "safe"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert results[1]["makespan_us"] <= results[0]["makespan_us"]
    for wrong in (["--schedulers", "nosuch"], ["--machine", "nosuch"], ["--memory", "much"]):
        assert main(["schedule", *program, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_report_shows_the_step_as_it_is_planned(capsys):
    program = ["report", "--demo", "tiny", "--mesh", "dp=2,tp=2", "-q"]
    assert main([*program, "--json", "--scheduler", "overlap"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_us"] < found["before"]["step_us"]
    assert main([*program, "--scheduler", "overlap"]) == 0
    shown = capsys.readouterr().out
    assert "after:" in shown and shown.count("dp=2 x tp=2") == 2


def test_a_page_of_experiments(traced):
    found = compare(traced, ["overlap"], ["+0%", "none"], noise=0.3)
    page = experiments.html(found, "a <step>", 0.3)
    assert page.count("<tr>") == 1 + len(found) and "<svg" in page
    assert "a &lt;step&gt;" in page and "+-30%" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("noise", ["1.5", "-0.1", "loud"])
def test_noise_that_makes_no_sense(noise, capsys):
    with pytest.raises(SystemExit) as end:
        main(["schedule", "--demo", "tiny", "--mesh", "dp=2", f"--noise={noise}"])
    assert end.value.code == 2 and "--noise" in capsys.readouterr().err
