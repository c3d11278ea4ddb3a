"""The pages of an evaluation in Chromium: intervals and videos, and votes by keys that outlive the page.

They need the Debian packages chromium and chromium-driver, and are skipped without them.
"""

from collections.abc import Iterator

import pytest
from chromium import missing, started, until
from evaluations import NAMES, PLAN, evaluated

from unified_trainer.tools.evaluate.vote_count import count

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
BALLOTS = len(PLAN.prompts) * len(PLAN.seeds)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "out"
    evaluated(folder)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    yield from started()


def press(browser, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def errors(browser) -> list[str]:
    return [row["message"] for row in browser.get_log("browser") if row["level"] in ("SEVERE", "WARNING")]


def test_the_page_shows_intervals_and_videos_side_by_side(browser, output):
    browser.get((output / "evaluation.html").as_uri())
    assert browser.title == f"{', '.join(NAMES)}: evaluation"  # a prompt holds a script that sets it
    until(browser, "document.querySelectorAll('#forest .js-plotly-plot').length === DATA.charts.length")
    reward = "DATA.charts.findIndex((one) => one.measure === 'reward')"
    points = until(browser, f"document.querySelectorAll('#forest .plot')[{reward}].data.map((one) => one.x[0])")
    assert points == [pytest.approx(1.0)]
    both = "[...document.querySelectorAll('#sample-rows .row:first-child video')]"
    until(browser, f"{both}.length === 2 && {both}.every((one) => one.currentTime > 0.1 && one.videoWidth === 64)")
    first = "document.querySelector('#sample-rows .row p').textContent"
    assert "a red circle" in until(browser, first)
    browser.execute_script("const one = get('order'); one.value = 1; one.dispatchEvent(new Event('change'))")
    assert browser.execute_script("return get('order').options.length") == 1 + 2 * 3  # of three scores
    assert "+1" in browser.execute_script("return document.querySelector('#sample-rows .row').textContent")
    browser.execute_script("get('rows-after').click()")
    assert browser.execute_script("return get('rows-shown').textContent") == f"7 to {BALLOTS} of {BALLOTS}"
    assert errors(browser) == []


def test_votes_by_keys_are_kept_and_counted(browser, output, tmp_path):
    """The key of the left video three times, then one pair back and a tie; the votes outlive a reload."""
    from selenium.webdriver.common.keys import Keys

    browser.get((output / "votes.html").as_uri())
    both = "[...document.querySelectorAll('#pair video')]"
    until(browser, f"{both}.length === 2 && {both}.every((one) => one.currentTime > 0.1)")
    press(browser, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_RIGHT, Keys.BACKSPACE, Keys.ARROW_DOWN)
    browser.execute_script("get('voter').value = 'a, \"b'; get('voter').dispatchEvent(new Event('input'))")
    browser.refresh()
    assert until(browser, "get('count').textContent") == f"pair 4 of {BALLOTS}, 3 voted"
    assert browser.execute_script("return get('progress').value") == 3
    text = browser.execute_script("return table()")
    assert [line.split(",")[1:] for line in text.splitlines()[1:]] == [
        ["a   b", "0", "left"],
        ["a   b", "1", "left"],
        ["a   b", "2", "tie"],
    ]
    file = tmp_path / "votes.csv"
    file.write_text(text, encoding="utf-8")
    (found,) = count(output, [file], 0.95)
    assert (found.wins + found.losses, found.ties) == (2, 1)
    browser.execute_script("get('right').click()")
    assert until(browser, "get('count').textContent").startswith("pair 5")
    assert errors(browser) == []
