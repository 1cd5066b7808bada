"""Renderers: golden files, formats that their readers accept, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import timelines
from golden import check_golden
from timelines import compute, issued, run, start, wait

from fcoll.report import html, perfetto, scaling, summary, svg, text
from fcoll.report.advice import Advice
from fcoll.report.scale import Point
from fcoll.scheduling.timeline import Timeline, timeline


def serial() -> Timeline:
    """The same work as timelines.overlapped, nothing hidden."""
    steps = [
        compute("a", out=100, op="aten::mm", flops=10**9),
        start("r", 0, "a", out=50),
        wait("wr", 0, "r"),
        compute("b", "wr"),
    ]
    return run(steps, dict(a=10, r=15, b=20))


def many(layers: int) -> Timeline:
    """A step of 4 spans a layer, half of its communication hidden."""
    steps, costs, free = [], {}, ()
    for i in range(layers):
        steps += [
            compute(f"mm{i}", out=4 << 20, op="aten::mm", flops=10**9, frees=free),
            start(f"r{i}", i, f"mm{i}", stream="tp" if i % 3 else "dp", out=1 << 20),
            compute(f"mul{i}", f"mm{i}", out=2 << 20),
            compute(f"add{i}", f"mul{i}", frees=(f"mm{i}",)),
            wait(f"w{i}", i, f"r{i}"),
        ]
        free = (f"r{i}", f"mul{i}")
        costs |= {f"mm{i}": 30.0 + i % 7, f"r{i}": 25.0 + i % 5, f"mul{i}": 8.0, f"add{i}": 4.0}
    return run(steps, costs)


# -- text ---


def test_table():
    check_golden("report.txt", text.render(timelines.overlapped()) + "\n")


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
    assert summary.verdict(run([compute("a")], dict(a=1))) == "the step has no collectives"
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
        assert event["dur"] >= 0
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
    return kinds


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


# -- the page ---


def test_the_page_stands_alone():
    page = html.render(timelines.overlapped(), title="a </script> title")
    assert "/*DATA*/" not in page
    assert not re.search(r"""(?:src|href)\s*=|https?://|@import|url\(""", page)
    data = page.partition('type="application/json">')[2].partition("</script>")[0]
    assert json.loads(data)["title"] == "a </script> title"


def test_source_lines_are_in_the_page(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("".join(f"line {i}\n" for i in range(1, 11)))
    shown = html.source_text(f"{file}:4")
    assert shown == [(i, f"line {i}", i == 4) for i in range(2, 7)]
    assert html.source_text("gone.py:3") == html.source_text("") == []


def browser():
    """(a page, its browser) of a headless Chromium, or why there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="the page's test needs playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    with api.sync_playwright() as play:
        try:
            chrome = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium here: {str(error).splitlines()[0]}")
        yield chrome
        chrome.close()


@pytest.fixture(scope="module")
def chrome():
    yield from browser()


@pytest.fixture
def opened(chrome, tmp_path):
    """opened(html text) is a page on which nothing may go wrong."""
    wrong = []

    def open_(written: str, **options):
        file = tmp_path / "report.html"
        file.write_text(written)
        page = chrome.new_page(viewport={"width": 1200, "height": 900}, **options)
        page.on("console", lambda m: m.type in ("error", "warning") and wrong.append(m.text))
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith("file:") else wrong.append(r.url))
        page.goto(file.as_uri())
        return page

    yield open_
    assert not wrong


def click_span(page, collective: int) -> None:
    """Click the middle of a collective's span on the canvas."""
    at = page.evaluate(
        """(id) => { const r = window.fcollReport, s = r.timeline().spanOf.get(id);
            return { x: r.x((s[1] + s[2]) / 2), y: r.laneTop(s[0]) + r.LANE / 2 }; }""",
        collective,
    )
    page.locator("#canvas").click(position=at)


def test_a_click_tells_what_hides_a_collective(opened):
    page = opened(html.render(timelines.overlapped()))
    assert page.locator("#verdict").inner_text() == summary.verdict(timelines.overlapped())
    assert not page.locator("#panel").is_visible()
    click_span(page, 0)
    panel = page.locator("#panel").inner_text()
    for fact in ("all_reduce", "tp (4 ranks)", "4.00 MiB", "m.py:3", "15.0 µs", "mul"):
        assert fact in panel, fact
    click_span(page, 2)
    assert "1.00 µs" in page.locator("#panel").inner_text()  # t is hidden by 1 us of c
    page.locator("#panel button").click()
    assert not page.locator("#panel").is_visible()


def test_the_toggle_switches_between_before_and_after(opened):
    page = opened(html.render(serial(), timelines.overlapped()))
    before, after = page.locator("#toggle button").all()
    assert after.get_attribute("aria-pressed") == "true"  # it opens on what came of it
    before.click()
    assert "45.0 µs" in page.locator("#tiles").inner_text()
    after.click()
    assert "60.0 µs" in page.locator("#tiles").inner_text()
    assert page.locator("#verdict").inner_text() == summary.verdict(timelines.overlapped())
    assert after.get_attribute("aria-pressed") == "true"
    click_span(page, 2)
    before.click()
    assert not page.locator("#panel").is_visible()
    assert page.locator("#verdict").inner_text() == summary.verdict(serial())


def some_advice(n: int) -> list[Advice]:
    facts = dict(op="all_reduce", axis="tp", phase="fwd", count=2, share=0.1, step_us=50.0)
    return [
        Advice(
            "prefetch", f"do <thing {i}>", "m.py:3", saved_us=9.0 - i, more_bytes=2 << 20, **facts
        )
        for i in range(n)
    ]


def test_advice_is_on_top(opened):
    line = timelines.overlapped()
    shown = text.render(line, advice=some_advice(5)).splitlines()
    assert "each by itself" in shown[4] and shown[5].startswith("  1. 9.00 us (10.0%) m.py:3: do")
    assert "2 MiB more memory" in shown[5]
    assert len([x for x in shown if "do <thing" in x]) == 3
    page = opened(html.render(line, advice=some_advice(5)))
    first = page.locator("#advice li").first
    assert "do <thing 0>" in first.inner_text() and "9.00 µs" in first.inner_text()
    assert page.locator("#advice li:visible").count() == 3  # and the rest in a fold
    page.locator("#advice summary").click()
    assert page.locator("#advice li:visible").count() == 5
    first.click()
    assert page.locator("#filter").input_value() == "m.py:3"
    page.goto("about:blank")
    page = opened(html.render(line))
    assert not page.locator("#advice").is_visible() and not page.locator("#moved").is_visible()


def test_before_and_after_open_on_the_gain(opened):
    page = opened(html.render(serial(), timelines.overlapped()))
    assert (
        page.locator("#gain").inner_text() == "0.75x as fast (45.0 us → 60.0 us), 260 B more memory"
    )
    moved = page.locator("#moved tbody tr").all_inner_texts()
    assert any("dp" in row and "0 → 2" in row for row in moved)  # there was none before
    assert any("0.00 µs → 20.0 µs" in row for row in moved)  # b runs beside it


@pytest.mark.parametrize("width", [1600, 390])
def test_the_page_fits_its_window(opened, width):
    page = opened(html.render(serial(), many(20), advice=some_advice(4)))
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_table_sorts_filters_and_leads_to_the_timeline(opened):
    page = opened(html.render(many(30)))
    first = page.locator("#rows tr").first
    assert "tp" in first.inner_text()
    page.locator("#columns th", has_text="axis").click()
    assert "dp" in first.inner_text()
    page.locator("#filter").fill("tp")
    assert page.locator("#rows tr").count() == 1
    first.click()
    assert page.evaluate("window.fcollReport.chosen()") is not None
    a, b = page.evaluate("window.fcollReport.view()")
    assert b - a < many(30).step_us / 2


def test_zoom_and_pan(opened):
    page = opened(html.render(many(100)))
    whole = page.evaluate("window.fcollReport.view()")
    page.locator("#canvas").hover(position={"x": 600, "y": 60})
    page.mouse.wheel(0, -600)
    page.wait_for_function(f"window.fcollReport.view()[1] < {whole[1] * 0.9}")
    a, b = page.evaluate("window.fcollReport.view()")
    box = page.locator("#canvas").bounding_box()
    page.mouse.move(box["x"] + 600, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 60, steps=4)
    page.mouse.up()
    c, d = page.evaluate("window.fcollReport.view()")
    assert c > a and d - c == pytest.approx(b - a)
    page.locator("#fit").click()
    assert page.evaluate("window.fcollReport.view()") == pytest.approx(whole)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(opened, scheme):
    page = opened(html.render(timelines.overlapped()), color_scheme=scheme)
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(red) < 60) == (scheme == "dark")


def test_twenty_thousand_spans_are_drawn_within_a_frame_or_two(opened):
    line = many(5000)
    assert len(line.spans) == 20_000
    page = opened(html.render(line))
    ms = page.evaluate(
        """() => { const r = window.fcollReport, times = [];
            for (let i = 0; i < 20; i++) {
              const t = performance.now(); r.paint(); times.push(performance.now() - t); }
            return times.sort((a, b) => a - b)[10]; }"""
    )
    assert ms < 100  # a frame is 16
