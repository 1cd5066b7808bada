"""The page of a report, in a real browser."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import timelines
from timelines import many, serial

from fcoll.report import html, summary, text
from fcoll.report.advice import Advice


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
