"""This script takes a picture of a page in headless Chromium, of 256 colors.

python scripts/page_picture.py PAGE OUT.png [--section ID] [--find TEXT] [--height PIXELS]
"""

import io
import shutil
from pathlib import Path

import tyro
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
SECONDS = 240
DRAWN = """
const box = (one) => one.getBoundingClientRect(), seen = (one) => box(one).top < innerHeight && box(one).bottom > 0;
return [...document.querySelectorAll("video")].filter(seen).every((one) => one.currentTime > 0.4)
  && [...document.querySelectorAll(".chart")].filter(seen).every((one) => one.querySelector(".main-svg"));
"""


def main(
    page: tyro.conf.Positional[str],
    out: tyro.conf.Positional[Path],
    section: str = "",
    find: str = "",
    width: int = 1400,
    height: int = 1000,
) -> None:
    """Open a page, wait until its videos play and its charts are drawn, and take a picture of the window.

    Args:
        page: URL, or file of a report
        out: picture to write
        section: id of the section at the top of the picture
        find: text in the field that filters the charts
        width: width of the window in pixels
        height: height of the window in pixels
    """
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium")
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page if "://" in page else Path(page).resolve().as_uri())
        if find:
            set_filter = "const one = document.getElementById('filter'); one.value = arguments[0];"
            browser.execute_script(f"{set_filter} one.dispatchEvent(new Event('input'))", find)
        if section:
            browser.execute_script(
                "document.getElementById(arguments[0]).scrollIntoView({behavior: 'instant'})", section
            )
        WebDriverWait(browser, SECONDS).until(lambda one: one.execute_script(DRAWN))
        shot = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        shot.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(out, optimize=True)
    finally:
        browser.quit()


if __name__ == "__main__":
    tyro.cli(main)
