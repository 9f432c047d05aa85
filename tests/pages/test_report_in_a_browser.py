"""HTML pages in a real browser, in phone and desktop size: layout, colors, console messages and requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from xtk_processes import run_xtk

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not browser.PROGRAM, reason=browser.MISSING)]
WINDOWS = {"phone": (390, 844), "desk": (1280, 900)}
# Elements wider than the window, except those inside of scrollable elements.
OVERFLOWING = """[...document.querySelectorAll("body *")].filter(one =>
  one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll"))
  .map(one => one.outerHTML.slice(0, 200))"""
SHAPES = """[...document.querySelectorAll("svg polyline, svg rect, .bar span")].map(one => one.getBoundingClientRect())
  .filter(box => box.width > 0 && box.height > 0).length"""
STROKE_COLORS = """[...document.querySelectorAll("polyline")].map(one => getComputedStyle(one).stroke)"""
# Table cells with a background color: a CSS class of one figure must not color the cells of another.
COLORED_CELLS = """(() => { const background = one => getComputedStyle(one).backgroundColor;
  return [...document.querySelectorAll("td, th, td code")].map(background)
    .filter(one => !["rgba(0, 0, 0, 0)", background(document.body)].includes(one)).length; })()"""
CONTRAST = """(() => { const light = color => color.match(/[0-9.]+/g).slice(0, 3)
    .map(one => one / 255).map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const paper = light(getComputedStyle(document.body).backgroundColor);
  return Math.min(...[...document.querySelectorAll("p, td, th, h2, figcaption, small")].map(one => {
    const ink = light(getComputedStyle(one).color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); }));
})()"""


@pytest.fixture(scope="module")
def pages(pair, cache, corpus, tmp_path_factory) -> dict[str, Path]:
    """Return the pages of two real runs with all sections, of an alignment and of a cache."""
    root = tmp_path_factory.mktemp("pages")
    training = ["--max-steps", 3, "--logging-steps", 1, "--per-device-train-batch-size", 2]
    evaluation = ["--eval-data", corpus, "--eval-steps", 2, "--eval-on-start"]
    runs = [root / "ce", root / "a-run-with-a-rather-long-name-of-its-own-to-fit-into-a-narrow-window"]
    for run, losses in zip(runs, (["--loss", "ce"], ["--loss", "ce", "--loss", "p-kl"]), strict=True):
        run_xtk("distill", pair.student, cache, *losses, *training, *evaluation, "-o", run)
    results = [
        {"model": name, "data": "test", "bits_per_byte": bits} for name, bits in (("untrained", 3.0), ("ce", 2.0))
    ]
    (root / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in results))
    page = ["--evaluation", root / "results.jsonl", "-o", root / "report.html"]
    run_xtk("report", *runs, *page)
    run_xtk("align", pair.student, pair.teacher, corpus, "--html", root / "alignment.html")
    run_xtk("inspect", cache, "--html", root / "cache.html")
    return {name: root / f"{name}.html" for name in ("report", "alignment", "cache")}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[browser.Browser]:
    chromium_browser = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield chromium_browser
    chromium_browser.close()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["report", "alignment", "cache"])
def test_a_page_fits_its_window_without_console_messages_and_requests(chromium, pages, name, window):
    chromium.console_messages.clear()
    chromium.requests.clear()
    width, height = WINDOWS[window]
    for scheme in ("light", "dark"):
        chromium.open(pages[name], width=width, height=height, scheme=scheme)
        assert chromium.evaluate("innerWidth") == width
        assert chromium.evaluate("document.documentElement.scrollWidth") <= width
        assert chromium.evaluate(OVERFLOWING) == []
        assert chromium.evaluate(SHAPES) >= (10 if name == "report" else 2)
        assert chromium.evaluate(COLORED_CELLS) == 0
        assert chromium.evaluate(CONTRAST) >= 4.5, "what WCAG requires of text"
    assert chromium.console_messages == []
    assert chromium.requests == [pages[name].as_uri()] * 2


def test_the_browser_records_requests_errors_and_overflow(chromium, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        '<!DOCTYPE html><img src="http://far.example/x.png"><script>throw new Error("bad")</script>'
        '<p style="width: 4000px">wide'
    )
    chromium.console_messages.clear()
    chromium.requests.clear()
    chromium.open(page)
    assert chromium.requests == [page.as_uri(), "http://far.example/x.png"]
    assert any("Error: bad" in one for one in chromium.console_messages)
    assert len(chromium.evaluate(OVERFLOWING)) == 1
    assert chromium.evaluate("document.documentElement.scrollWidth") > 4000


def test_a_report_has_a_color_for_each_run_and_every_section(chromium, pages, tmp_path):
    screenshot_hashes = set()
    for scheme in ("light", "dark"):
        chromium.open(pages["report"], scheme=scheme)
        screenshot_hashes.add(hashlib.sha256(chromium.screenshot(tmp_path / f"{scheme}.png").read_bytes()).digest())
        assert (tmp_path / f"{scheme}.png").stat().st_size > 50_000
        assert {"rgb(0, 114, 178)", "rgb(230, 159, 0)"} == set(chromium.evaluate(STROKE_COLORS))
    assert len(screenshot_hashes) == 2
    headings = chromium.evaluate('[...document.querySelectorAll("h2")].map(one => one.textContent)')
    expected = ["Held-out text", "Losses", "Training", "Last metrics", "Evaluations"]
    assert [heading for heading in headings if heading in expected] == expected
    assert "Recipes" in headings
    assert chromium.evaluate('document.querySelectorAll("figure[data-metric=peak_memory_gib] polyline").length') == 2
