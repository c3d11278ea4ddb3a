"""The page in Chromium: it opens without an error, videos play, and slider, charts and filter react.

It needs the Debian packages chromium and chromium-driver, and is skipped without them.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_folders import STEPS, make_run, metric_rows, training_row

from unified_trainer.__main__ import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="no Chromium: apt-get install chromium chromium-driver",
    ),
]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,1000")
SECONDS_TO_OPEN = 10.0  # on a loaded machine; it takes about one
WAIT = 30  # seconds for anything to happen


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def opened(browser, tmp_path: Path, *runs: Path, flags: tuple[str, ...] = ()) -> None:
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--out", str(out), *flags]) == 0
    began = time.monotonic()
    browser.get(out.as_uri())
    assert time.monotonic() - began < SECONDS_TO_OPEN


def until(browser, script: str, *values: object) -> object:
    """Wait until a script returns something that is true, and return it."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, WAIT).until(lambda driver: driver.execute_script(f"return {script}", *values))


def point_at(browser, element: object) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser).move_to_element(element).perform()


def enter(browser, control: str, value: str) -> None:
    script = "const one = document.getElementById(arguments[0]); one.value = arguments[1];"
    browser.execute_script(f"{script} one.dispatchEvent(new Event('input'))", control, value)


def errors(browser) -> list[str]:
    return [row["message"] for row in browser.get_log("browser") if row["level"] in ("SEVERE", "WARNING")]


@pytest.mark.parametrize("form", ["mp4", "webm"])
def test_videos_play_and_the_slider_changes_them(browser, tmp_path, form):
    opened(browser, tmp_path, make_run(tmp_path / "run"), flags=("--video", form))
    browser.execute_script("document.getElementById('samples').scrollIntoView({behavior: 'instant'})")
    video = "document.querySelector('#sample-rows figure:nth-child(2) video')"
    until(browser, f"{video}.currentTime > 0.1 && {video}.videoWidth === 64 && !{video}.error")
    assert browser.execute_script(f"return DATA.videos[{video}.dataset.video].startsWith('data:video/{form};')")
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


def test_the_page_runs_no_text_of_users(browser, tmp_path):
    opened(browser, tmp_path, make_run(tmp_path / "run"))
    assert browser.title == "run: report"  # a prompt holds a script that sets it
    assert errors(browser) == []
