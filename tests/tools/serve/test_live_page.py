"""The page of a server in Chromium: it plays the stream, switches the prompt, and stops.

It needs the Debian packages chromium and chromium-driver, and is skipped without them.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from chromium import missing, started, until
from test_streams import FORM, MOVES, ONE, OTHER, acting, frames_of, row_of, served, student, windowed  # noqa: F401 - fixtures

from unified_trainer.tools.serve.streams import Chunk

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

PIXELS = """
const canvas = document.getElementById("video"), data = canvas.getContext("2d").getImageData(0, 0, 32, 32).data;
return [...data].filter((_, i) => i % 4 < 3);
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    yield from started()


def text(browser, name: str) -> str:
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", name)


def start(browser, url: str, prompt: str) -> None:
    browser.get(url)
    until(browser, "about !== null")
    enter(browser, prompt)


def enter(browser, prompt: str) -> None:
    """Type a prompt and press the Enter key."""
    from selenium.webdriver.common.keys import Keys

    field = browser.find_element("id", "prompt")
    field.clear()
    field.send_keys(prompt + Keys.ENTER)


def picture(browser) -> np.ndarray:
    return np.array(browser.execute_script(PIXELS), np.uint8).reshape(32, 32, 3)


def errors(browser) -> list[str]:
    return [row["message"] for row in browser.get_log("browser") if row["level"] in ("SEVERE", "WARNING")]


def test_the_page_plays_a_video_to_its_end(browser, student):  # noqa: F811
    """The last frame on the canvas is that of the video, bit for bit; the page says how long the first one took."""
    last = frames_of(student, [ONE] * 3, seed=0)[-1][-1]
    with served(student) as url:
        start(browser, url, ONE)
        until(browser, "stream === null && document.getElementById('said').textContent === 'the video is complete'")
        assert np.array_equal(picture(browser), last)
        assert text(browser, "shown") == "9" and text(browser, "name") == "small@0"
        first = text(browser, "first")
        assert first.endswith(" ms") and int(first.removesuffix(" ms")) > 0
        assert float(text(browser, "speed")) > 0 and 0 < float(text(browser, "rate")) <= 8.1
        assert browser.execute_script("return document.getElementById('pad').hidden")
    assert errors(browser) == []


def test_the_prompt_switches_while_it_streams_and_the_user_stops_it(browser, windowed):  # noqa: F811
    with served(windowed) as url:
        start(browser, url, ONE)
        until(browser, "stream.shown > 1")
        assert text(browser, "start") == "Switch" and text(browser, "said") == ONE
        enter(browser, OTHER)
        until(browser, "document.getElementById('said').textContent === arguments[0]", OTHER)
        browser.find_element("id", "stop").click()
        until(browser, "stream === null")
        assert text(browser, "said") == "the video is complete" and text(browser, "start") == "Start"
    assert errors(browser) == []


def test_arrow_keys_steer(browser, acting, monkeypatch):  # noqa: F811
    """The first chunks stop; while a key is pressed they go its way, from the next one that the page asks for."""
    from selenium.webdriver import ActionChains, Keys

    made, given = Chunk.make, []

    def noted(self):
        given.append(self.actions.tolist())
        return made(self)

    monkeypatch.setattr(Chunk, "make", noted)
    with served(acting, form=FORM, names=MOVES) as url:
        start(browser, url, ONE)
        until(browser, "stream.shown > 0")
        ActionChains(browser).key_down(Keys.ARROW_LEFT).perform()
        assert browser.execute_script("return document.querySelector('#pad .pressed').value") == "left"
        until(browser, f"stream.shown > {4 * len(given) + 4}")
        ActionChains(browser).key_up(Keys.ARROW_LEFT).perform()
        until(browser, f"stream.shown > {4 * len(given) + 4}")
        browser.find_element("id", "stop").click()
        until(browser, "stream === null")
    moves = [MOVES[rows[0].index(1.0)] for rows in given]
    assert all(rows == [row_of(MOVES.index(move))] for rows, move in zip(given, moves, strict=True))
    assert [move for i, move in enumerate(moves) if i == 0 or moves[i - 1] != move] == ["stop", "left", "stop"]
    assert errors(browser) == []


def test_a_fault_of_the_server_is_shown_as_text(browser, student, monkeypatch):  # noqa: F811
    """The server's sentence holds the prompt of the user, which is no markup."""
    odd = "<img src=x onerror=alert(1)>"
    with served(student, images=(1, 1)) as url:
        start(browser, url, odd)
        until(browser, "document.getElementById('said').className === 'bad'")
        assert odd in text(browser, "said")
    assert errors(browser) == []


def test_the_page_runs_nothing_of_other_sites(browser, student):  # noqa: F811
    with served(student) as url:
        browser.get(url)
        until(browser, "about !== null")
        refused = browser.execute_async_script(
            "document.addEventListener('securitypolicyviolation', (event) => arguments[0](event.blockedURI));"
            "fetch('http://example.invalid/').catch(() => 0);"
        )
    assert refused.startswith("http://example.invalid")
    browser.get_log("browser")
