"""The page of a report, in a real browser."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import timelines
from timelines import compute, many, run, serial, start, wait

from fcoll.report import html, summary, text
from fcoll.report.advice import Advice
from fcoll.report.why import reasons


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
    page.get_by_label("close").click()
    assert not page.locator("#panel").is_visible()


def test_a_step_that_does_not_fit_is_red(opened):
    page = opened(html.render(replace(timelines.overlapped(), peak_bytes=90 << 30)))
    tile, verdict = page.locator("#tiles .alarm"), page.locator("#verdict")
    assert "more than the 80 GiB of h100" in tile.inner_text()
    assert verdict.inner_text().startswith("does not fit: 90 GiB is more than")
    red = "e => getComputedStyle(e).color"
    assert verdict.evaluate(red) == tile.locator("i").evaluate(red) == "rgb(198, 40, 40)"


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
        page.locator("#gain").inner_text() == "0.75x as fast (45.0 µs → 60.0 µs), 260 B more memory"
    )
    moved = page.locator("#moved tbody tr").all_inner_texts()
    assert any("dp" in row and "0 → 2" in row for row in moved)  # there was none before
    assert any("0.00 µs → 20.0 µs" in row for row in moved)  # b runs beside it


@pytest.mark.parametrize("width", [1600, 390])
def test_the_page_fits_its_window(opened, width):
    page = opened(html.render(serial(), many(20), advice=some_advice(4)))
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_what_is_asked_first_is_seen_on_a_phone(opened):
    page = opened(html.render(many(30)))
    wide = page.locator("#columns th").all_inner_texts()
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_function("document.querySelectorAll('#columns th')[1].textContent == 'exposed'")
    assert sorted(page.locator("#columns th").all_inner_texts()) == sorted(wide)
    box = page.locator("#columns th", has_text="why").bounding_box()
    assert box["x"] + box["width"] <= 390


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


# -- what is drawn is what the table says ---

PIXELS = """const r = window.fcollReport, c = document.getElementById("canvas");
    const k = window.devicePixelRatio, [from, to] = r.view(), wide = r.columns();
    const read = { willReadFrequently: true };
    const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", read);
    r.paint(); copy.drawImage(c, 0, 0);
    const pixels = (x, y, w, h) => copy.getImageData(
        Math.round(x * k), Math.round(y * k), Math.round(w * k), Math.round(h * k)).data;"""
AREAS = (
    "() => {"
    + PIXELS
    + """
    const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const near = (p, i, color) => color.every((v, j) => Math.abs(p[i + j] - v) < 5);
    const count = (p, color) => {
      let n = 0;
      for (let i = 0; i < p.length; i += 4) if (near(p, i, color)) n++;
      return n; };
    return r.timeline().streams.map((_, lane) => { const found = {};
      const p = pixels(r.LEFT, r.laneTop(lane), wide / k, r.LANE);
      for (const name of ["matmul", "other", "hidden", "exposed", "exposed-soft"])
        found[name] = (count(p, rgb(r.colors()[name])) / (p.length / 4)) * (to - from);
      return found; }); }"""
)
COLOR = (
    "([lane, us]) => {"
    + PIXELS
    + """
    const p = pixels(r.x(us), r.laneTop(lane) + 8, 1, 1);
    return "#" + [p[0], p[1], p[2]].map((v) => v.toString(16).padStart(2, "0")).join(""); }"""
)


def areas(page) -> list[dict[str, float]]:
    """us that each colour of each lane stands for, counted in pixels of the canvas."""
    return page.evaluate(AREAS)


@pytest.mark.parametrize("scale", [1, 2])
def test_the_area_of_a_colour_is_the_time_of_the_table(opened, scale):
    line = many(600)
    page = opened(html.render(line), device_scale_factor=scale)
    for lane, stream in zip(areas(page)[1:], line.streams[1:], strict=True):
        mine = [r for r in summary.rows(line) if r.axis == stream]
        exposed, total = sum(r.exposed_us for r in mine), sum(r.us for r in mine)
        assert lane["exposed"] == pytest.approx(exposed, rel=0.02)
        assert lane["hidden"] == pytest.approx(total - exposed, rel=0.02)
    lane = areas(page)[0]
    assert lane["matmul"] + lane["other"] == pytest.approx(line.compute_us, rel=0.02)
    assert lane["exposed-soft"] == pytest.approx(line.exposed_total_us, rel=0.02)


def test_wide_spans_have_their_colours(opened):
    """t is exposed from 35 to 50, r hidden from 10 to 25: see timelines.overlapped."""
    page = opened(html.render(timelines.overlapped()))
    names = {v: k for k, v in page.evaluate("window.fcollReport.colors()").items()}
    seen = [names[page.evaluate(COLOR, at)] for at in ([0, 5], [0, 20], [0, 40], [1, 20], [2, 45])]
    assert seen == ["matmul", "other", "exposed-soft", "hidden", "exposed"]


def test_what_is_shorter_than_a_pixel_is_seen(opened):
    steps = [compute("a", flops=1, op="aten::mm"), start("r", 0, "a"), wait("w", 0, "r")]
    line = run([*steps, compute("b", "w", flops=1, op="aten::mm")], dict(a=5e5, r=0.5, b=5e5))
    page = opened(html.render(line))
    assert areas(page)[1]["exposed"] > 0
    steps = [start("r", 0), compute("a"), wait("w", 0, "r"), compute("b", "w")]
    page = opened(html.render(run(steps, dict(r=1e6, a=1e6 - 0.5, b=1e5))))
    found = areas(page)[1]  # half a us of a second, beside green
    assert found["exposed"] > 0 and found["hidden"] == pytest.approx(1e6, rel=0.02)


# -- the panel ---

CUT = """() => [...document.querySelectorAll("#panel, #panel *")].filter((e) => e.clientWidth &&
    (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 2)
    && getComputedStyle(e).display !== "inline").map((e) => e.outerHTML.slice(0, 80))"""


def long_lines(tmp_path):
    """overlapped, whose calls are on a line of 150 characters in a file with a long name."""
    file = tmp_path / ("a_" * 40 + "model.py")
    file.write_text(
        "x = 1\n" + "result = fcoll.all_reduce(" + "argument, " * 12 + ")\n" + "y = 2\n"
    )
    line, source = timelines.overlapped(), f"{file}:2"
    calls = tuple(replace(c, source=source, module="layers.0." * 12) for c in line.collectives)
    steps = tuple(replace(s, source=source) for s in line.steps)
    return replace(line, collectives=calls, steps=steps)


@pytest.mark.parametrize("width", [1600, 390])
def test_the_panel_covers_and_cuts_nothing(opened, tmp_path, width):
    page = opened(html.render(long_lines(tmp_path)))
    page.set_viewport_size({"width": width, "height": 800})
    page.locator("#rows tr").first.click()
    panel = page.locator("#panel")
    for part in ("why it is exposed", "hidden behind", "argument, argument", "mul · "):
        assert part in panel.inner_text(), part
    assert page.evaluate(CUT) == []
    a, b = panel.bounding_box(), page.locator("#canvas").bounding_box()
    beside = b["x"] + b["width"] <= a["x"] + 1, b["y"] + b["height"] <= a["y"] + 1
    assert any(beside)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1200, 390])
def test_a_row_brings_the_lanes_into_view(opened, width):
    page = opened(html.render(many(30), advice=some_advice(9)))
    page.set_viewport_size({"width": width, "height": 700})
    page.locator("#rows tr").last.click()
    box = page.locator("#canvas").bounding_box()
    lanes = page.evaluate("window.fcollReport.laneTop(3)")
    assert box["y"] >= 0 and box["y"] + lanes <= 700


# -- rows ---


def layered(layers: int):
    """many, its calls in modules and phases as of a model."""
    line = many(layers)
    calls = tuple(
        replace(
            c,
            module=f"layers.{c.id // 3}.{('attention.wo', 'norm', 'ffn')[c.id % 3]}",
            op="all_gather_into_tensor" if c.id % 3 == 0 else "all_reduce",
            phase="bwd" if c.id % 2 else "fwd",
            source=f"models/llama.py:{30 + c.id % 3}",
        )
        for c in line.collectives
    )
    return replace(line, collectives=calls)


FILTERS = {
    "all-gather": lambda c: c.op == "all_gather_into_tensor",
    "All_Gather": lambda c: c.op == "all_gather_into_tensor",
    "allgather": lambda c: c.op == "all_gather_into_tensor",
    "all gather": lambda c: c.op == "all_gather_into_tensor",
    "ar": lambda c: c.op == "all_reduce",
    "backward": lambda c: c.phase == "bwd",
    "bwd tp": lambda c: c.phase == "bwd" and c.axis == "tp",
    "layers.3": lambda c: c.id // 3 == 3,
    "layers.3 norm": lambda c: c.id == 10,
    "llama.py:31": lambda c: c.id % 3 == 1,
    "-fwd": lambda c: c.phase == "bwd",
    "axis:dp": lambda c: c.axis == "dp",
    "module:ffn": lambda c: c.id % 3 == 2,
    "bytes>=4MiB": lambda c: True,
    "bytes>4MiB": lambda c: False,
    "time>28us": lambda c: c.id % 5 == 4,
    "nonsense": lambda c: False,
}


def test_filters_find_what_people_type(opened):
    line = layered(120)
    page = opened(html.render(line))
    page.locator("#by").select_option("call")
    for typed, wanted in FILTERS.items():
        page.locator("#filter").fill(typed)
        ids = page.eval_on_selector_all("#rows tr", "rows => rows.map((r) => +r.dataset.key)")
        assert sorted(ids) == [c.id for c in line.collectives if wanted(c)], typed


@pytest.mark.parametrize(
    ("by", "rows", "first"),
    [("module", 120, "layers."), ("layer", 40, "layers."), ("axis", 2, "tp"), ("phase", 2, "wd"),
     ("module kind", 3, "layers.*"), ("line", 6, ""), ("why", 3, ""), ("collective", 2, "")],
)  # fmt: skip
def test_calls_are_put_together(opened, by, rows, first):
    line = layered(120)
    page = opened(html.render(line))
    page.locator("#by").select_option(by)
    found = page.locator("#rows tr")
    assert found.count() <= rows if by == "why" else found.count() == rows
    assert first in found.first.inner_text()
    assert "120 calls" in page.locator("#count").inner_text()
    exposed = page.evaluate("window.fcollReport.asCsv()").splitlines()
    column = exposed[0].split(",").index("exposed_us")
    total = sum(float(next(csv.reader([row]))[column]) for row in exposed[1:])
    assert total == pytest.approx(line.exposed_total_us, abs=0.1)


def test_a_row_opens_to_its_calls(opened):
    page = opened(html.render(layered(30)))
    page.locator("#by").select_option("layer")
    page.locator("#filter").fill("layers.3")
    page.locator("#rows .fold").click()
    assert page.locator("#rows tr.call").count() == 3
    page.locator("#rows tr.call", has_text="norm").click()
    assert page.evaluate("window.fcollReport.chosen()") == 10
    page.locator("#rows .fold").click()
    assert page.locator("#rows tr.call").count() == 0


# -- out of the page ---


def test_a_link_leads_back(opened):
    page = opened(html.render(serial(), layered(30)))
    page.locator("#by").select_option("module")
    page.locator("#filter").fill("bwd")
    page.locator("#rows tr", has_text="layers.3.ffn").first.click(position={"x": 200, "y": 10})
    link, chosen = page.url, page.evaluate("window.fcollReport.chosen()")
    view = page.evaluate("window.fcollReport.view()")
    page.goto("about:blank")
    page.goto(link)
    assert page.evaluate("window.fcollReport.chosen()") == chosen is not None
    assert page.evaluate("window.fcollReport.view()") == pytest.approx(view)
    assert page.locator("#by").input_value() == "module"
    assert page.locator("#filter").input_value() == "bwd"
    assert page.locator("#rows tr.on").count() == 1
    page.goto(
        link.partition("#")[0] + "#call=999&by=nothing&timeline=7&row=gone"
    )  # of another report
    page.reload()
    assert page.evaluate("window.fcollReport.chosen()") is None


def test_text_and_csv(opened):
    line = layered(30)
    page = opened(html.render(line))
    shown = page.evaluate("window.fcollReport.asText()").splitlines()
    assert shown[0].split()[:4] == ["collective", "axis", "n", "phase"]
    table = list(csv.DictReader(io.StringIO(page.evaluate("window.fcollReport.asCsv()"))))
    for row, wanted in zip(table, summary.rows(line, reasons(line)), strict=True):
        assert row["op"] == wanted.op and row["source"] == wanted.source
        assert float(row["exposed_us"]) == pytest.approx(wanted.exposed_us, abs=0.1)
        assert float(row["bytes"]) == wanted.bytes and row["why"] == wanted.why
    click_span(page, 2)
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.locator("#panel button", has_text="copy").click()
    copied = page.evaluate("window.copied")
    assert copied.startswith("all_reduce\n") and "exposed   " in copied
    page.locator("#copy").click()
    assert page.evaluate("window.copied").splitlines() == shown


def test_pictures(opened):
    page = opened(html.render(timelines.overlapped()))
    click_span(page, 2)
    with page.expect_download() as got:
        page.locator("#png").click()
    assert got.value.path().read_bytes().startswith(b"\x89PNG")
    with page.expect_download() as got:
        page.locator("#svg").click()
    drawn = ElementTree.fromstring(got.value.path().read_text())
    wide = {}
    for e in drawn.iter():
        if e.tag.endswith("rect") and e.get("height") == "38":
            wide[e.get("fill")] = wide.get(e.get("fill"), 0.0) + float(e.get("width"))
    colors = page.evaluate("window.fcollReport.colors()")
    one_us = page.evaluate("window.fcollReport.x(1) - window.fcollReport.x(0)")
    assert wide[colors["exposed"]] == pytest.approx(15 * one_us, abs=2)
    assert wide[colors["hidden"]] == pytest.approx(20 * one_us, abs=4)
    with page.expect_download() as got:
        page.locator("#csv").click()
    assert got.value.path().read_text().startswith("op,axis,n,phase,module,count")


def test_a_step_without_collectives_or_steps(opened):
    page = opened(html.render(run([compute("a")], dict(a=5))))
    assert page.locator("#verdict").inner_text().startswith("the step has no collectives: nothing")
    assert page.locator("#rows tr").count() == 0
    for by in ("layer", "why", "call"):
        page.locator("#by").select_option(by)
    assert page.evaluate("window.fcollReport.asText()").startswith("collective")
    opened(html.render(run([], {})))
