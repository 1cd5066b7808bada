"""Renderers: golden files, and formats that their readers accept."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import timelines
from golden import check_golden
from timelines import compute, issued, many, run, serial, start, wait

from fcoll.report import perfetto, scaling, summary, svg, text
from fcoll.report.scale import Point
from fcoll.report.why import reasons
from fcoll.scheduling.timeline import timeline

# -- text ---


def test_table():
    line = timelines.overlapped()
    shown = text.render(line, why=reasons(line))
    check_golden("report.txt", shown + "\n")
    without = text.render(line)
    assert "why" in shown and "why" not in without
    assert len(without.splitlines()) == len(shown.splitlines())


def test_table_of_before_and_after():
    check_golden("report_compared.txt", text.render(serial(), timelines.overlapped()) + "\n")


def test_what_no_one_waits_for_is_told():
    line = run([compute("a"), start("r", 0, "a")], dict(a=10, r=15))
    assert "exposed 0.00 us (0%) + 15.0 us that no one waits for" in text.render(line)


def test_collectives_that_are_alike_are_one_row():
    line = many(9)
    found = summary.rows(line)
    assert sorted((r.axis, r.count) for r in found) == [("dp", 3), ("tp", 6)]
    assert sum(r.exposed_us for r in found) == pytest.approx(line.exposed_total_us)
    assert sum(r.us for r in found) == pytest.approx(sum(25.0 + i % 5 for i in range(9)))
    assert sum(r.bytes for r in found) == 9 * (4 << 20)
    assert [r.exposed_us for r in found] == sorted((r.exposed_us for r in found), reverse=True)


def test_verdicts():
    assert summary.verdict(serial()) == "33% of the step is exposed communication; largest: m.py:3"
    none = summary.verdict(run([compute("a")], dict(a=1)))
    assert none.startswith("the step has no collectives: nothing is sharded or reduced, each rank")
    steps = [start("r", 0), compute("a"), wait("w", 0, "r")]
    hidden = run(steps, dict(r=1, a=5))
    assert summary.verdict(hidden) == "all communication is hidden behind compute"


def test_the_largest_is_a_line_and_not_a_row():
    """Forward and backward of a line count together."""
    steps = [start(f"r{i}", i) for i in range(3)] + [wait(f"w{i}", i, f"r{i}") for i in range(3)]
    sources = ("big.py:1", "sum.py:2", "sum.py:2")
    found = tuple(
        replace(issued(s, source=source), phase=phase)
        for s, source, phase in zip(steps, sources, ("fwd", "fwd", "bwd"), strict=False)
    )
    line = timeline((tuple(steps), found), "h100", dict(r0=10.0, r1=8.0, r2=8.0))
    assert summary.rows(line)[0].source == "big.py:1"
    assert summary.verdict(line).endswith("largest: sum.py:2")


def test_numbers_for_programs_are_json():
    found = json.loads(json.dumps(summary.as_dict(timelines.overlapped())))
    assert found["exposed_share"] == pytest.approx(0.25)
    assert found["rows"][0]["exposed_us"] == 15


# -- Perfetto ---


def check_trace_events(data: dict) -> dict[str, list[dict]]:
    """What the Trace Event Format demands; events by kind."""
    assert data["displayTimeUnit"] in ("ms", "ns")
    kinds = defaultdict(list)
    for event in data["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        if event["ph"] in "Xsf":
            assert isinstance(event["tid"], int)
        kinds[event["ph"]].append(event)
    assert set(kinds) <= set("MXCsf")
    tracks = defaultdict(list)
    for event in kinds["X"]:
        assert event["dur"] > 0
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for ends in tracks.values():  # slices of a track may nest; these follow one another
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(sorted(ends)))
    named = {(e["pid"], e["tid"]) for e in kinds["M"] if e["name"] == "thread_name"}
    assert set(tracks) <= named
    arrows = {e["id"]: e for e in kinds["s"]}
    assert len(arrows) == len(kinds["s"]) == len(kinds["f"])
    for end in kinds["f"]:
        assert end["ts"] >= arrows[end["id"]]["ts"]
        assert end["tid"] == 0 != arrows[end["id"]]["tid"]
        begun = arrows[end["id"]]
        around = tracks[begun["pid"], begun["tid"]]
        assert any(a <= begun["ts"] < b for a, b in around)  # else it binds to nothing
        ends = tracks[end["pid"], 0]
        inside = any(a <= end["ts"] < b for a, b in ends)
        assert inside if end.get("bp") == "e" else any(a >= end["ts"] for a, _ in ends)
    return kinds


def test_perfetto_has_numbers_and_no_slice_without_length():
    steps = [
        compute("a", op="aten::mm", flops=10**9),
        start("r", 0, "a"),
        start("none", 1, "a"),
        wait("wr", 0, "r"),
        wait("wn", 1, "none"),
        compute("short", "wr"),
        compute("b", "short", "wn"),
        start("late", 2, "b"),
        wait("wl", 2, "late"),
    ]
    line = run(steps, dict(a=10, r=15, short=1e-5, b=20, late=5))
    kinds = check_trace_events(json.loads(perfetto.render(line)))
    named = {e["args"]["node"]: e["args"] for e in kinds["X"] if e["cat"] != "exposed"}
    assert set(named) == {"a", "r", "b", "late"}
    assert named["a"]["flops"] == 10**9 and named["a"]["read_bytes"] == 0
    assert named["r"]["bytes"] == 4 << 20 and named["r"]["wire_bytes"] == 6 << 20
    ends = {e["id"]: e.get("bp") for e in kinds["f"]}
    assert ends == {0: None, 2: "e"}  # nothing is computed after the last, but compute waits


def test_perfetto_is_valid_and_golden():
    written = perfetto.render(timelines.overlapped())
    kinds = check_trace_events(json.loads(written))
    assert len(kinds["s"]) == 3
    check_golden("report_perfetto.json", json.dumps(json.loads(written), indent=1) + "\n")


def test_perfetto_shows_overlapping_spans_on_separate_tracks():
    kinds = check_trace_events(json.loads(perfetto.render(many(50), serial())))
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in kinds["M"] if e["name"] == "thread_name"
    }
    assert set(names.values()) == {"compute", "dp", "tp"}
    first = [e for e in kinds["X"] if e["pid"] == 0]
    comm = [e for e in first if e["tid"] != 0]
    computes = [e for e in first if e["tid"] == 0 and e["cat"] != "exposed"]
    assert any(
        a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"]
        for a in comm
        for b in computes
    )
    assert {e["pid"] for e in kinds["X"]} == {0, 1}


# -- pictures ---


def test_svg_is_xml_of_bounded_size():
    small = ElementTree.fromstring(svg.render(timelines.overlapped()))
    classes = [e.get("class") for e in small.iter() if e.get("class")]
    assert {"matmul", "other", "hidden", "exposed", "blocked", "memory"} <= set(classes)
    both = svg.render(serial(), timelines.overlapped())
    assert "before:" in both and "after:" in both
    ElementTree.fromstring(both)
    assert len(svg.render(many(5000))) < 300_000


def test_svg_draws_to_scale():
    drawn = ElementTree.fromstring(svg.render(timelines.overlapped()))
    rects = [e for e in drawn.iter() if e.tag.endswith("rect") and e.get("class") == "exposed"]
    scale = (svg.WIDTH - svg.LEFT - svg.RIGHT) / 60
    assert float(rects[0].get("x")) == pytest.approx(svg.LEFT + 35 * scale, abs=0.1)
    assert float(rects[0].get("width")) == pytest.approx(15 * scale, abs=0.1)


def test_png(tmp_path):
    pytest.importorskip("matplotlib", reason="PNG needs matplotlib")
    svg.save_png(tmp_path / "x.png", serial(), timelines.overlapped())
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


POINTS = [
    Point(n, 8 * n, 1e5 + 2e4 * i, 1e5, 2e4 * i, 3e4 * i, 2.0**30 * i, 2**34 // n, 12 * i)
    for i, n in enumerate((1, 2, 4, 8))
]


def test_scaling():
    check_golden("scale.txt", scaling.render(POINTS, "dp") + "\n")
    drawn = ElementTree.fromstring(scaling.plot(POINTS, "dp", "a <model>"))
    assert len([e for e in drawn.iter() if e.tag.endswith("polygon")]) == 2
    ElementTree.fromstring(scaling.plot(POINTS[:1], "dp", "one"))
