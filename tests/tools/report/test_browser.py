"""Pages in Chromium: they open without an error, videos play, slider, charts and filter react, live ones follow runs.

It needs the Debian packages chromium and chromium-driver, and is skipped without them.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import missing, started, until
from run_folders import STEPS, make_run, metric_rows, sample_row, training_row, write_lines

from unified_trainer.__main__ import main
from unified_trainer.tools.report.live import LivePages
from unified_trainer.tools.serve.page_server import Pages
from unified_trainer.tools.serve.web_server import open_port, serving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    yield from started()


def opened(browser, tmp_path: Path, *runs: Path, flags: tuple[str, ...] = ()) -> None:
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--out", str(out), *flags]) == 0
    browser.get(out.as_uri())


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
        boxes = "[...document.querySelectorAll('main > section, .runs tr, .card, .columns, #chart-groups')]"
        widest = f"Math.max(document.documentElement.scrollWidth, ...{boxes}.map((one) => one.scrollWidth))"
        return browser.execute_script(f"return {widest}"), phone["width"]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_pages_need_no_sideways_scrolling_on_a_phone(browser, live):
    address, _ = live
    for page in ("/", "/run?name=one", "/run?name=one&name=two"):
        content, screen = width_on_a_phone(browser, address + page)
        assert content <= screen, page


def test_constant_charts_are_folded(browser, live):
    address, _ = live
    browser.get(f"{address}/run?name=one")
    titles = "(where) => charts.filter((one) => one.card.closest(where)).map((one) => one.chart.title)"
    folded = browser.execute_script(f"return ({titles})('.folded')")
    assert "skipped_updates" in folded and "reward" not in folded
    line = "charts.find((one) => one.chart.title === 'skipped_updates').card.closest('.folded')"
    assert "skipped_updates 0" in browser.execute_script(f"return {line}.firstChild.textContent")
    enter(browser, "filter", "skipped")
    assert browser.execute_script(f"return {line}.open")


@pytest.fixture
def live(browser, tmp_path) -> Iterator[tuple[str, Path]]:
    """The address of live pages of two runs, renewed every second, and the directory of the first one."""
    run = make_run(tmp_path / "runs" / "one", "--steps", "20")
    make_run(tmp_path / "runs" / "two", videos=0)
    pages = LivePages(tmp_path / "runs", 1.0)
    with open_port("127.0.0.1", 0) as listener, serving(Pages(pages), listener) as address:
        yield address, run
        browser.get("about:blank")  # a page that is open would go on asking
        errors(browser)


def append(run: Path, *rows: dict) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def validated(run: Path, step: int) -> None:
    """Add a validation with the videos of the last one."""
    folder = run / "validation" / f"step_{step}"
    shutil.copytree(run / "validation" / f"step_{STEPS}", folder)
    write_lines(folder / "samples.jsonl", [sample_row(i, step, f"{i}.mp4" if i < 2 else None) for i in range(4)])


def test_the_list_of_runs_follows_them(browser, live):
    address, run = live
    browser.get(address)
    states = "[...document.querySelectorAll('#runs .state')].map((one) => one.textContent).join()"
    assert browser.execute_script(f"return {states}") == "stopped,finished"
    assert browser.execute_script("return document.querySelectorAll('#runs .spark polyline').length") == 8
    browser.execute_script("document.querySelector('#runs input').click()")
    append(run, training_row(STEPS + 1, reward=9.0))
    until(browser, f"{states} === 'failed,finished'")
    row = browser.execute_script("return document.querySelector('#runs tr').textContent")
    assert "11 / 20" in row and "9" in row and "ago" in row
    assert browser.execute_script("return document.querySelector('#runs input').checked")
    browser.execute_script("document.querySelectorAll('#runs input')[1].click()")
    browser.execute_script("document.getElementById('compare').click()")
    until(browser, "document.title === 'one, two: report'")
    assert errors(browser) == []


def test_the_page_of_a_run_follows_it_and_keeps_the_place(browser, live):
    address, run = live
    browser.get(f"{address}/run?name=one")
    video = "document.querySelector('#sample-rows figure:nth-child(2) video')"
    browser.execute_script("document.getElementById('samples').scrollIntoView({behavior: 'instant'})")
    until(browser, f"{video}.currentTime > 0.1 && {video}.videoWidth === 64")
    enter(browser, "step-slider", "0")
    enter(browser, "smoothing", "0.2")
    browser.execute_script("document.getElementById('curves').scrollIntoView({behavior: 'instant'})")
    plot = "charts.find((one) => one.chart.title === 'reward').plot"
    until(browser, f"{plot}.data && {plot}.data[0].x.at(-1) === arguments[0]", STEPS)
    height = "document.getElementById('overview').offsetHeight"
    top = "document.getElementById('curves').getBoundingClientRect().top"
    before = browser.execute_script(f"return [{height}, {top}]")
    append(run, training_row(STEPS + 1), training_row(STEPS + 2, reward=9.0, skipped_updates=3.0, mine=1.0))
    validated(run, STEPS + 2)
    until(browser, f"{plot}.data[0].x.at(-1) === arguments[0] && {plot}.data[0].y.at(-1) === 9", STEPS + 2)
    slider = "document.getElementById('step-slider')"
    until(browser, f"{slider}.max === '2'")
    assert browser.execute_script(f"return [{slider}.value, document.getElementById('step-shown').textContent]") == [
        "0",
        "step 0",
    ]
    after = browser.execute_script(f"return [{height}, {top}]")
    assert after[0] > before[0] and abs(after[1] - before[1]) < 2  # a table above grew, and the reader sees the same
    assert browser.execute_script("return options.smoothing") == 0.2
    assert browser.execute_script("return charts.some((one) => one.chart.title === 'mine')")
    enter(browser, "step-slider", "2")  # the last one: now it follows
    append(run, training_row(STEPS + 3))
    validated(run, STEPS + 3)
    until(browser, "document.getElementById('step-shown').textContent === arguments[0]", f"step {STEPS + 3}")
    browser.execute_script("document.getElementById('samples').scrollIntoView({behavior: 'instant'})")
    until(browser, f"{video}.currentTime > 0.1 && !{video}.error")
    assert errors(browser) == []
    shutil.rmtree(run)
    until(browser, "document.getElementById('renewed').textContent.startsWith('no run one is here now')")
    assert browser.execute_script(f"return {plot}.data[0].x.length") == STEPS + 3  # what was shown stays
    assert all("404" in message for message in errors(browser))
