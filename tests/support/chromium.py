"""A headless Chromium for tests of pages: the Debian packages chromium and chromium-driver."""

import shutil
from collections.abc import Iterator

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,1000")

SECONDS = 60  # for anything to happen


def missing() -> str:
    """Return why there is no Chromium, or nothing."""
    found = shutil.which("chromium") and shutil.which("chromedriver")
    return "" if found else "no Chromium: apt-get install chromium chromium-driver"


def started() -> Iterator[object]:
    """Yield a driver that keeps what pages write to the console."""
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


def until(browser, script: str, *values: object) -> object:
    """Wait until an expression of a page is true, and return its value."""
    from selenium.webdriver.support.wait import WebDriverWait

    wait = WebDriverWait(browser, SECONDS, poll_frequency=0.02)
    return wait.until(lambda driver: driver.execute_script(f"return {script}", *values))
