"""Pages in Chromium: they open without an error, videos play, slider, charts and filter react.

It needs the Debian packages chromium and chromium-driver, and is skipped without them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import missing, started, until
from run_folders import STEPS, make_run, metric_rows, training_row

from unified_trainer.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    yield from started()


def page_of(tmp_path: Path, *runs: Path) -> str:
    """Return the address of a report of runs."""
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    return out.as_uri()


def opened(browser, tmp_path: Path, *runs: Path) -> None:
    browser.get(page_of(tmp_path, *runs))


def point_at(browser, element: object) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser).move_to_element(element).perform()


def enter(browser, control: str, value: str) -> None:
    script = "const one = document.getElementById(arguments[0]); one.value = arguments[1];"
    browser.execute_script(f"{script} one.dispatchEvent(new Event('input'))", control, value)


def errors(browser) -> list[str]:
    return [row["message"] for row in browser.get_log("browser") if row["level"] in ("SEVERE", "WARNING")]


def test_videos_play_and_the_slider_changes_them(browser, tmp_path):
    opened(browser, tmp_path, make_run(tmp_path / "run"))
    browser.execute_script("document.getElementById('samples').scrollIntoView({behavior: 'instant'})")
    video = "document.querySelector('#sample-rows figure:nth-child(2) video')"
    until(browser, f"{video}.currentTime > 0.1 && {video}.videoWidth === 64 && !{video}.error")
    assert browser.execute_script(f"return DATA.videos[{video}.dataset.video].startsWith('data:video/mp4;')")
    before = browser.execute_script(f"return {video}.dataset.video")
    enter(browser, "step-slider", "0")
    assert browser.execute_script("return document.getElementById('step-shown').textContent") == "step 0"
    until(browser, f"{video}.dataset.video !== arguments[0] && {video}.currentTime > 0", before)
    assert browser.execute_script("return document.querySelector('#sample-rows').textContent").count("step 0") == 4
    assert errors(browser) == []


def test_charts_are_drawn_linked_and_filtered(browser, tmp_path):
    rows = [*metric_rows(), training_row(STEPS + 1, skipped_updates=3.0)]
    opened(browser, tmp_path, make_run(tmp_path / "a", videos=0, rows=rows), make_run(tmp_path / "b", videos=0))
    browser.execute_script("document.getElementById('curves').scrollIntoView({behavior: 'instant'})")
    until(browser, "charts.filter((one) => one.seen && one.drawn).length > 3")
    plot = "charts.find((one) => one.chart.title === arguments[0]).plot"
    names = until(browser, f"{plot}.data.filter((one) => one.showlegend !== false).map((one) => one.name)", "reward")
    assert names == ["a", "b"]
    assert until(browser, f"{plot}.layout.shapes.length", "skipped_updates") == 2
    departed = f"{plot}.data.filter((one) => one.name.endsWith('range')).map((one) => one.x)"
    assert browser.execute_script(f"return {departed}", "skipped_updates") == [[STEPS + 1]]
    point_at(browser, browser.execute_script(f"return {plot}.querySelector('.nsewdrag')", "reward"))
    pointed = "[...document.querySelectorAll('.plot .hoverlayer')].filter((one) => one.childElementCount).length"
    assert until(browser, f"{pointed} > 2")  # the cursor is in other charts too
    browser.execute_script(f"Plotly.relayout({plot}, {{ 'xaxis.range[0]': 2, 'xaxis.range[1]': 6 }})", "reward")
    until(browser, f"{plot}.layout.xaxis.range[1] === 6", "skipped_updates")
    browser.execute_script("document.getElementById('log').click()")
    until(browser, f"{plot}.layout.yaxis.type === 'log'", "reward")
    enter(browser, "filter", "grad")
    shown = "charts.filter((one) => !one.card.hidden).map((one) => one.chart.title)"
    assert browser.execute_script(f"return {shown}") == ["student/grad_norm"]
    assert errors(browser) == []


def test_images_are_shown_and_the_slider_changes_them(browser, tmp_path):
    opened(browser, tmp_path, make_run(tmp_path / "run", frames=1))
    browser.execute_script("document.getElementById('samples').scrollIntoView({behavior: 'instant'})")
    picture = "document.querySelector('#sample-rows figure:nth-child(2) img')"
    until(browser, f"{picture}.naturalWidth === 64 && {picture}.classList.contains('small')")
    before = browser.execute_script(f"return {picture}.dataset.video")
    enter(browser, "step-slider", "0")
    until(browser, f"{picture}.dataset.video !== arguments[0] && {picture}.naturalWidth === 64", before)
    assert errors(browser) == []


def test_the_page_runs_no_text_of_users(browser, tmp_path):
    opened(browser, tmp_path, make_run(tmp_path / "run"))
    assert browser.title == "run: report"  # a prompt holds a script that sets it
    assert errors(browser) == []


def width_on_a_phone(browser, address: str) -> tuple[int, int]:
    """The width of a page's content, and of the screen, in pixels."""
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        browser.get(address)
        boxes = "[...document.querySelectorAll('main > section, .card, .columns, #chart-groups')]"
        widest = f"Math.max(document.documentElement.scrollWidth, ...{boxes}.map((one) => one.scrollWidth))"
        return browser.execute_script(f"return {widest}"), phone["width"]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_pages_need_no_sideways_scrolling_on_a_phone(browser, tmp_path):
    one, two = make_run(tmp_path / "one", "--steps", "20"), make_run(tmp_path / "two", videos=0)
    for runs in ((one,), (one, two)):
        content, screen = width_on_a_phone(browser, page_of(tmp_path, *runs))
        assert content <= screen, runs


def test_constant_charts_are_folded(browser, tmp_path):
    opened(browser, tmp_path, make_run(tmp_path / "run", videos=0))
    titles = "(where) => charts.filter((one) => one.card.closest(where)).map((one) => one.chart.title)"
    folded = browser.execute_script(f"return ({titles})('.folded')")
    assert "skipped_updates" in folded and "reward" not in folded
    line = "charts.find((one) => one.chart.title === 'skipped_updates').card.closest('.folded')"
    assert "skipped_updates 0" in browser.execute_script(f"return {line}.firstChild.textContent")
    enter(browser, "filter", "skipped")
    assert browser.execute_script(f"return {line}.open")
